"""Large-batch steps: when a peer stops gathering samples, and which target batch a fleet can gather."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

TARGET, INVITED, TIME, BEHIND, AHEAD = "target", "invited", "time", "behind", "ahead"
"""Why a peer stops: the swarm has the target; somebody calls for the step; the time is over; the others are a step
further; or they will have the target before this peer could end another batch, for which everybody would wait."""
AHEAD_OF_BATCH, SLOWEST_AHEAD_OF_BATCH = 0.25, 0.5
MOST_BATCHES_UNTOLD = 1.5
"""What a peer is thought to have gathered since it told: it may have paused."""
PAUSES_AFTER_BATCHES, PAUSES_AFTER_SECONDS = 3.0, 1.0
"""A peer that told of no batch for so long is not waited for by whoever stopped ahead of it."""
WORTHWHILE = 1.5
"""A batch is proposed where it differs from the target by at least this factor."""


@dataclass(frozen=True)
class Gathered:
    """What one peer has gathered towards its next step, on a state of `step` steps, as it told at `told_at`.

    `waits`: it has stopped.
    """

    peer_id: str
    step: int
    samples: float = 0.0
    samples_per_second: float = 0.0
    batch_seconds: float = 0.0
    waits: bool = False
    told_at: float = 0.0


def level_of(steps: Iterable[int]) -> int:
    """The step that most replicas are at; of two that are as frequent, the higher one. 0 for none."""
    counts = Counter(steps)
    return max(counts, key=lambda step: (counts[step], step), default=0)


def samples_gathered(me: Gathered, others: Iterable[Gathered]) -> float:
    """By all who are at this peer's step: what others gathered on older states does not count."""
    told = [other.samples for other in others if other.step == me.step]
    return me.samples + sum(samples for samples in told if 0 <= samples < inf)


def still_gather(me: Gathered, others: Iterable[Gathered], now: float) -> list[Gathered]:
    """The others at this peer's step that have not stopped, and do not pause, as for an evaluation."""
    return [
        other
        for other in others
        if other.step == me.step
        and not other.waits
        and now - other.told_at <= max(PAUSES_AFTER_SECONDS, PAUSES_AFTER_BATCHES * other.batch_seconds)
    ]


def why_stop(
    me: Gathered, others: Sequence[Gathered], target_batch: int, now: float, *,
    overdue: bool = False, invited: bool = False,
) -> str:  # fmt: skip
    """Why this peer gathers no more for this step; empty: it goes on. `overdue`: the time for one step is over.

    It stops ahead where the others, at their usual pace, have what is missing by now and have not told it yet, or will
    have it within a quarter of this peer's next batch; within half of it, where this peer is the slowest.
    """
    if level_of([me.step, *(other.step for other in others)]) > me.step:
        return BEHIND
    missing = target_batch - samples_gathered(me, others)
    if missing <= 0:
        return TARGET
    if invited or overdue:
        return INVITED if invited else TIME
    running = still_gather(me, others, now)
    slowest = all((other.batch_seconds, other.peer_id) < (me.batch_seconds, me.peer_id) for other in running)
    ahead_seconds = (SLOWEST_AHEAD_OF_BATCH if slowest else AHEAD_OF_BATCH) * me.batch_seconds
    coming = sum(
        other.samples_per_second
        * (ahead_seconds + min(max(0.0, now - other.told_at), MOST_BATCHES_UNTOLD * other.batch_seconds))
        for other in running
    )
    return AHEAD if running and coming >= missing else ""


def proposed_batch(
    samples_per_second: float, slowest_batch_seconds: float, target_batch: int, longest_seconds: float
) -> int | None:
    """A target that this fleet gathers well; None where the given one is.

    It is gathered within half of `longest_seconds`, and not before the slowest peer has ended a batch: else all wait
    for that one in each step.
    """
    if not (samples_per_second > 0 and isfinite(samples_per_second * (slowest_batch_seconds + longest_seconds))):
        return None  # nobody has measured yet, or a peer tells nonsense
    most = samples_per_second * longest_seconds
    least = samples_per_second * slowest_batch_seconds
    if target_batch > most:
        return max(1, int(most / 2))
    if target_batch * WORTHWHILE < least <= most / 2:
        return int(least) + 1
    return None
