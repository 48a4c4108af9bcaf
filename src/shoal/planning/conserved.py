"""Conserved shares: the rule for an averaging that goes on beyond one pass of the grid (reference, section 8.0).

Each member carries a number mu, at the start its weight. A group's value is sum(mu x) / sum(mu) over those present;
its whole mu goes on, split over the next groups of its members. Whoever is absent keeps x and mu. So sum(mu x) stays.

The reference splits mu equally over the next groups. In two rounds, and where all groups are of one size, that is
exact. In an uneven grid of three or more rounds it is not: exact is a split by which each group gets one and the same
fraction of every line's mu. Those fractions follow backwards from the last round, where the groups get equal ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from shoal.planning.grid import block_of, grid_groups


def conserved_shares(total: float, next_groups: Sequence[int], claims: Sequence[float]) -> list[float]:
    """What each present member of a group carries on of the group's `total`: all of it is carried.

    The next groups get it in proportion to their claims, the members that go to one of them in equal parts.
    """
    sharing = Counter(next_groups)
    parts = [claim / sharing[group] for claim, group in zip(claims, next_groups, strict=True)]
    whole = sum(parts)
    return [total * part / whole for part in parts]


def conserved_claims(count: int, dims: tuple[int, ...], round_index: int) -> list[float]:
    """For each member: the claim of the next group that it goes to on the mu of the group that it is in now."""
    if round_index == len(dims) - 1:
        return [1.0] * count  # the next pass begins
    now, following = (_group_numbers(count, dims, number) for number in (round_index, round_index + 1))
    claims: defaultdict[tuple[int, int], float] = defaultdict(float)
    for way, part in zip(zip(now, following, strict=True), _carried(count, dims, round_index), strict=True):
        claims[way] += part
    return [claims[way] for way in zip(now, following, strict=True)]


def _carried(count: int, dims: tuple[int, ...], round_index: int) -> list[float]:
    """What each member brings to its next group: its line's fraction for that group, shared by those of the line."""
    group = _group_numbers(count, dims, round_index + 1)
    fraction: defaultdict[int, float] = defaultdict(float)
    if round_index + 1 == len(dims) - 1:
        fraction.update(dict.fromkeys(group, 1.0))
    else:
        for number, part in zip(group, _carried(count, dims, round_index + 1), strict=True):
            fraction[number] += part
    lines = [block_of(member, dims, round_index + 1) for member in range(count)]
    together = Counter(zip(lines, group, strict=True))
    return [fraction[number] / together[line, number] for line, number in zip(lines, group, strict=True)]


def _group_numbers(count: int, dims: tuple[int, ...], round_index: int) -> list[int]:
    """The number of each member's group in a round."""
    numbers = [0] * count
    for number, group in enumerate(grid_groups(count, dims, round_index)):
        for member in group:
            numbers[member] = number
    return numbers
