"""Which version of a part wins: pure functions of what the members of a group hold (design, section 5).

A part's version is (attempt, digest). Attempt 0 is its owner's; where the owner dies, the next member in the part's
order reduces it anew, as attempt 1, and so on. Each attempt has one maker, who fixes its contributors before it sends
the first byte: two members with the same version hold the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Version = tuple[int, bytes]
Versions = tuple[Version, ...]
"""The version that one member holds of each part, in order."""


def reducer_order(owner: int, bandwidths: Sequence[float | None]) -> list[int]:
    """Who reduces a part of this owner: itself, then the members after it; those without bandwidth never."""
    count = len(bandwidths)
    order = [(owner + step) % count for step in range(count)]
    return [number for number in order if number == owner or bandwidths[number] != 0.0]


def lowest_versions(lists: Iterable[Versions]) -> Versions:
    """The lowest version of each part that any of these members holds: it wins."""
    return tuple(min(versions) for versions in zip(*lists, strict=True))


def is_settled(mine: Versions, lowest: Versions, before: Versions | None, somebody_was_lost: bool) -> bool:
    """Whether a member may stop exchanging lists.

    It holds the lowest versions, and nobody can still bring a lower one: either they are all the owners' own, or the
    exchange `before` showed the same and nobody was lost in between. A member that got a lower version from a dying one
    would have listed it by now.
    """
    if mine != lowest:
        return False
    return all(attempt == 0 for attempt, _ in lowest) or (before == lowest and not somebody_was_lost)
