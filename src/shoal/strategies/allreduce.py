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

import asyncio
from dataclasses import dataclass

from shoal.core.errors import NobodyThere, OptionError, RemoteError, RoundError, TensorError
from shoal.overlay.membership import TRAINING
from shoal.protocols.butterfly import Outcome, butterfly
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Replica
from shoal.protocols.roll_record import TRAIN
from shoal.strategies.options import check_number
from shoal.tensors.flat import Shapes, Vectors

EVERY_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""After a failed averaging, doubling with each failure in a row."""


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
        if self.every_steps is None and self.every_seconds is None:
            object.__setattr__(self, "every_seconds", EVERY_SECONDS)
        check_number("every_seconds", self.every_seconds, 0.01, 86400, optional=True)
        check_number("every_steps", self.every_steps, 1, 10**9, whole=True, optional=True)
        if self.every_seconds is not None and self.every_steps is not None:
            raise OptionError("every_seconds", self.every_seconds, "left out where every_steps is given")
        check_number("timeout_seconds", self.timeout_seconds, 1, 3600)
        check_number("part_bytes", self.part_bytes, 1024, 4 << 20, whole=True)

    async def run(self, peer: Peer, replica: Replica) -> None:
        """Average until this peer leaves. What fails is recorded, changes nothing, and is tried again soon."""
        last_at, last_steps, failures = peer.clock.now(), replica.steps, 0
        last = False
        while not last:
            await self._due(peer, replica, last_at, last_steps)
            started_at, last = peer.clock.now(), peer.leaving
            snapshot = await replica.snapshot()
            try:
                outcome = await self.average(peer, TRAIN, snapshot.vectors, snapshot.weight, replica.shapes)
                stale_steps = await replica.offer(outcome.vectors, snapshot)
            except (NobodyThere, RoundError, TensorError, RemoteError) as error:
                if not isinstance(error, NobodyThere) or peer.members.others(TRAINING):
                    peer.history.failed(error)
                await _something_new(peer, min(FIRST_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS))
                failures = min(failures + 1, 10)
            else:
                peer.history.averaged(outcome, stale_steps)
                last_at, last_steps, failures = started_at, snapshot.steps, 0

    async def _due(self, peer: Peer, replica: Replica, last_at: float, last_steps: int) -> None:
        """Return when an averaging is due: by time, by steps, by invitation, or because this peer is about to leave."""
        while not peer.leaving:
            left = None
            if peer.members.others(TRAINING):
                if peer.rolls.invited_to(TRAIN):
                    return
                if self.every_seconds is not None:
                    left = last_at + self.every_seconds - peer.clock.now()
                elif replica.notify_at(last_steps + (self.every_steps or 1), peer.stir.set):
                    return
                if left is not None and left <= 0:
                    return
            await _something_new(peer, left)

    async def average(
        self,
        peer: Peer,
        series: str,
        vectors: Vectors,
        weight: float,
        shapes: Shapes,
        timeout_seconds: float | None = None,
    ) -> Outcome:
        """One averaging of a series with whoever takes part. Raises NobodyThere, TensorError or RoundError."""
        limit = timeout_seconds or self.timeout_seconds
        until = peer.clock.now() + limit
        roll = await peer.rolls.call(series, weight, peer.bandwidth(), shapes, limit)
        return await butterfly(
            peer.host, peer.rounds, roll, vectors,
            part_bytes=self.part_bytes, timeout_seconds=max(0.1, until - peer.clock.now()),
        )  # fmt: skip


async def _something_new(peer: Peer, within_seconds: float | None) -> None:
    """Return when somebody came, went or invites, or when the time is over."""
    try:
        async with asyncio.timeout(within_seconds):
            await peer.stir.wait()
    except TimeoutError:
        return
    finally:
        peer.stir.clear()
