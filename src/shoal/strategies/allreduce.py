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

from shoal.protocols.averaging import average_in_background
from shoal.protocols.butterfly import butterfly
from shoal.protocols.outcome import Outcome, is_exact
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Replica
from shoal.protocols.roll_record import TRAIN
from shoal.protocols.round_record import whole_group
from shoal.strategies.options import check_averaging
from shoal.tensors.flat import Shapes, Vectors


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One group of all peers that take part; each averaging costs a peer 2 s (n-1)/n bytes for s bytes of parameters.

    `every_seconds` (2 where neither is given) or `every_steps` (of the fastest peer): how often. `timeout_seconds`:
    when an averaging is given up. `part_bytes`: how much is sent, averaged and returned at a time.
    """

    every_seconds: float | None = None
    every_steps: int | None = None
    timeout_seconds: float = 30.0
    part_bytes: int = 1 << 19

    def __post_init__(self) -> None:
        check_averaging(self)

    async def run(self, peer: Peer, replica: Replica) -> None:
        """Average until this peer leaves."""
        await average_in_background(
            peer, replica,
            lambda snapshot: self.average(peer, TRAIN, snapshot.vectors, snapshot.weight, replica.shapes),
            self.every_seconds, self.every_steps,
        )  # fmt: skip

    async def average(
        self, peer: Peer, series: str, vectors: Vectors, weight: float, shapes: Shapes,
        timeout_seconds: float | None = None,
    ) -> Outcome:  # fmt: skip
        """One averaging of a series with whoever takes part. Raises NobodyThere, TensorError or RoundError."""
        limit = timeout_seconds or self.timeout_seconds
        until = peer.clock.now() + limit
        roll = await peer.rolls.call(series, weight, peer.bandwidth(), shapes, limit)
        result = await butterfly(
            peer.rounds, whole_group(roll), vectors, source=peer.id, mass=weight,
            part_bytes=self.part_bytes, timeout_seconds=max(0.1, until - peer.clock.now()),
        )  # fmt: skip
        return Outcome(result.vectors, roll, 1, (result.report,), (), is_exact(roll, result))
