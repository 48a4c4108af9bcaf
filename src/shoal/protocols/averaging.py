"""One averaging after the other, in the background of local steps: what the averaging strategies share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from shoal.core.errors import NobodyThere, RemoteError, RoundError, TensorError
from shoal.overlay.member_record import TRAINING
from shoal.protocols.outcome import Outcome
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Replica, Snapshot
from shoal.protocols.roll_record import TRAIN, Stand
from shoal.tensors.flat import Shapes, Vectors

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""After a failed averaging, doubling with each failure in a row."""


class AllReduce(Protocol):
    """One averaging of a series with whoever takes part, as a strategy does it."""

    def __call__(
        self, series: str, vectors: Vectors, weight: float, shapes: Shapes, *, stand: Stand | None = None
    ) -> Awaitable[Outcome]:
        """Raises NobodyThere, TensorError, RoundError, or OutOfStep where this replica's `stand` is not the others'."""


async def average_in_background(
    peer: Peer,
    replica: Replica,
    all_reduce: AllReduce,
    every_seconds: float | None,
    every_steps: int | None,
) -> None:
    """Average until this peer leaves. What fails is recorded, changes nothing, and is tried again soon.

    Each averaging works on a snapshot and is applied by the difference rule: steps taken meanwhile survive.
    """
    last_at, last_steps, failures = peer.clock.now(), replica.steps, 0
    last = False
    while not last:
        await _due(peer, replica, last_at, every_seconds, last_steps, every_steps)
        last = peer.leaving
        snapshot = await replica.snapshot()
        started_at = peer.clock.now()  # not before: the loop may have paused for long
        try:
            outcome, stale_steps = await _average(peer, replica, all_reduce, snapshot)
        except (NobodyThere, RoundError, TensorError, RemoteError) as error:
            if not isinstance(error, NobodyThere) or peer.members.others(TRAINING):
                peer.history.failed(error)
            await _something_new(peer, min(FIRST_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS))
            failures = min(failures + 1, 10)
        else:
            peer.history.averaged(outcome, stale_steps)
            last_at, last_steps, failures = started_at, snapshot.steps, 0


async def _average(peer: Peer, replica: Replica, all_reduce: AllReduce, snapshot: Snapshot) -> tuple[Outcome, int]:
    peer.rolls.in_averaging = True
    try:
        outcome = await all_reduce(TRAIN, snapshot.vectors, snapshot.weight, replica.shapes)
        return outcome, await replica.offer(outcome.vectors, snapshot)
    finally:
        peer.rolls.in_averaging = False


async def _due(
    peer: Peer, replica: Replica, last_at: float, every_seconds: float | None, last_steps: int, every_steps: int | None
) -> None:
    """Return when an averaging is due: by time, by steps, by invitation, or because this peer is about to leave."""
    while not peer.leaving:
        left = None
        if peer.members.has_others(TRAINING):
            if peer.rolls.invited_to(TRAIN) or peer.meetings.invited:
                return
            if every_seconds is not None:
                left = last_at + every_seconds - peer.clock.now()
            elif replica.notify_at(last_steps + (every_steps or 1), peer.stir.set):
                return
            if left is not None and left <= 0:
                return
        await _something_new(peer, left)


async def _something_new(peer: Peer, within_seconds: float | None) -> None:
    """Return when somebody came, went or invites, or when the time is over."""
    try:
        async with asyncio.timeout(within_seconds):
            await peer.stir.wait()
    except TimeoutError:
        return
    finally:
        peer.stir.clear()
