"""All-reduce in one group of everybody, in the background of local steps.

The exchange is the butterfly of Moshpit All-Reduce (Ryabinin et al. 2021, reference section 2.3) with a single group;
the training loop around it is local SGD by the difference rule (reference section 2.7):

    each peer, for ever:
        local steps                                        in the user's thread, never waiting
        when due, or invited by somebody who is:
            s <- snapshot of theta                         at a safe point
            a <- weighted mean of s over the group         weights: samples since the last averaging
            theta <- theta + (a - s)                       at a safe point: steps taken meanwhile survive
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from shoal.protocols.averaging import average_in_background
from shoal.protocols.butterfly import butterfly
from shoal.protocols.large_batch import begin_stepping, step_together
from shoal.protocols.outcome import Outcome, is_exact
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Replica
from shoal.protocols.roll_record import Stand
from shoal.protocols.round_record import whole_group
from shoal.strategies.options import GRADIENTS, PARAMETERS, check_averaging
from shoal.tensors.flat import Shapes, Vectors


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One group of all peers that take part; each averaging costs a peer 2 s (n-1)/n bytes for s bytes of parameters.

    `every_seconds` (2 where neither is given) or `every_steps` (of the fastest peer): how often. `timeout_seconds`:
    when an averaging is given up. `part_bytes`: how much is sent, averaged and returned at a time.

    `average`: "parameters" is all of the above. "gradients": the peers gather `target_batch` samples together, however
    unequal they are, and all take one step with the mean gradient, clipped to `max_grad_norm` where that is given.
    Where the target is not reached in `gather_timeout_seconds` (600), the step is taken with what there is.
    """

    every_seconds: float | None = None
    every_steps: int | None = None
    timeout_seconds: float = 30.0
    part_bytes: int = 1 << 19
    average: str = PARAMETERS
    target_batch: int | None = None
    max_grad_norm: float | None = None
    gather_timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        check_averaging(self)

    async def prepare(self, peer: Peer, replica: Replica) -> None:
        """With the run's state, before this peer trains. Raises AttachError or OutOfStep."""
        if self.average == GRADIENTS:
            await begin_stepping(peer, replica, self.max_grad_norm)

    async def run(self, peer: Peer, replica: Replica) -> None:
        """Average until this peer leaves."""
        all_reduce = partial(self.all_reduce, peer)
        if self.target_batch is not None and self.gather_timeout_seconds is not None:
            await step_together(peer, replica, all_reduce, self.target_batch, self.gather_timeout_seconds)
        else:
            await average_in_background(peer, replica, all_reduce, self.every_seconds, self.every_steps)

    async def all_reduce(
        self, peer: Peer, series: str, vectors: Vectors, weight: float, shapes: Shapes, *,
        timeout_seconds: float | None = None, stand: Stand | None = None,
    ) -> Outcome:  # fmt: skip
        """One averaging of a series with whoever takes part. Raises NobodyThere, TensorError or RoundError."""
        limit = timeout_seconds or self.timeout_seconds
        until = peer.clock.now() + limit
        roll = await peer.rolls.call(series, weight, peer.bandwidth(), shapes, limit, stand)
        result = await butterfly(
            peer.rounds, whole_group(roll), vectors, source=peer.id, mass=weight,
            part_bytes=self.part_bytes, timeout_seconds=max(0.1, until - peer.clock.now()),
        )  # fmt: skip
        return Outcome(result.vectors, roll, 1, (result.report,), (), is_exact(roll, result))
