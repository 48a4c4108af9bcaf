"""Which live member collects the roll of an averaging, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.planning.distance import point_of


def collector_of(run_key: str, series: str, number: int, members: Iterable[str]) -> str:
    """The member whose hashed id is nearest (by XOR, as in Kademlia) to hash(run, series, number).

    Every peer with the same list of members names the same collector, and the duty moves with every averaging.
    """
    target = point_of(f"{run_key}/{series}/{number}")
    return min(members, key=lambda peer_id: (point_of(peer_id) ^ target, peer_id))


def roll_deadline_seconds(step_seconds: Iterable[float]) -> float:
    """max(1 s, 1.5 x the slowest participant's step): each gets a safe point to snapshot at (design, section 5)."""
    return max(1.0, 1.5 * max(step_seconds, default=0.0))


def believable(number: int, wall: float) -> bool:
    """Whether an averaging can have this number: as many as there were milliseconds until now, not one more.

    The higher number always wins, and a liar that names the highest of all would leave none for those that follow.
    `wall` is Unix time; where that is no real date all up to 2**40 are believed.
    """
    return 0 < number <= max(2**40, wall * 1000)
