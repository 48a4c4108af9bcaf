"""Who reduces how much: shares by bandwidth, and the cut of a vector into shares and parts.

Source: Moshpit reference, section 2.6. Member i sends (1 - w_i) and receives (n - 1) w_i of the vector, so its time is
(1 + (n - 2) w_i) / b_i; the shares minimise the slowest member's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEGLIGIBLE = 1e-9
"""A member this much slower than the fastest reduces nothing; without a bound the arithmetic ends in 0 / 0."""
ALIKE = 1.2
"""Measured rates that differ by less than this factor may well be of equal lines."""


def without_noise(bandwidths: Sequence[float | None]) -> list[float | None]:
    """Rates that are alike become equal: each level, from the fastest down, has its mean.

    A share follows the difference to what a member sends in any case, so it magnifies noise: of 16 equal lines that are
    measured 6 % too fast and too slow, the shares would differ by 30 %.
    """
    levels: list[list[float]] = []
    for rate in sorted((rate for rate in bandwidths if rate is not None), reverse=True):
        if levels and levels[-1][0] < ALIKE * rate:
            levels[-1].append(rate)
        else:
            levels.append([rate])
    means = {rate: sum(level) / len(level) for level in levels for rate in level}
    return [None if rate is None else means[rate] for rate in bandwidths]


def shares_by_bandwidth(bandwidths: Sequence[float | None]) -> list[float]:
    """Shares w_i >= 0 with sum 1 that minimise max_i (1 + (n-2) w_i) / b_i; w_i = 0 where b_i = 0.

    `bandwidths`: bytes per second; None is unknown and counts as the mean of the known ones (if any is above 0).
    The level T of the slowest time solves sum_i max(0, (T b_i - 1) / (n - 2)) = 1; the left side is piecewise linear
    and rising, so it is solved exactly over the members sorted by bandwidth. For n <= 2 every split is optimal: equal.
    """
    n = len(bandwidths)
    known = [b for b in bandwidths if b is not None]
    fallback = sum(known) / len(known) if any(known) else 1.0
    rates = [fallback if b is None else float(b) for b in bandwidths]
    if n == 0 or not any(r > 0 for r in rates):
        return [1.0 / n] * n if n else []
    fastest = max(rates)
    rates = [rate / fastest if rate > NEGLIGIBLE * fastest else 0.0 for rate in rates]
    if n <= 2:
        takers = sum(r > 0 for r in rates)
        return [1.0 / takers if r > 0 else 0.0 for r in rates]
    total, level = 0.0, 0.0
    for count, rate in enumerate(sorted((r for r in rates if r > 0), reverse=True), start=1):
        if count > 1 and level * rate <= 1.0:  # this member and all slower ones get nothing
            break
        total += rate
        level = (n - 2 + count) / total
    raw = [max(0.0, (level * rate - 1.0) / (n - 2)) if rate > 0 else 0.0 for rate in rates]
    scale = sum(raw)
    return [w / scale for w in raw]


@dataclass(frozen=True)
class Part:
    """The unit of contribution and version: elements [start, stop) of flat vector number `vector`."""

    vector: int
    start: int
    stop: int


def cut_parts(
    sizes: Sequence[int], item_bytes: Sequence[int], shares: Sequence[float], part_bytes: int
) -> list[list[Part]]:
    """For each member the parts it reduces, in order. Every element lies in exactly one part.

    `sizes`: elements of each flat vector; `item_bytes`: bytes of one element of each.
    Shares are cut element by element, so that each member's traffic is 2 s (n-1)/n for equal shares.
    """
    owned: list[list[Part]] = [[] for _ in shares]
    for vector, (size, width) in enumerate(zip(sizes, item_bytes, strict=True)):
        step = max(1, part_bytes // width)
        begin, covered = 0, 0.0
        for member, share in enumerate(shares):
            covered += share
            end = size if covered > 1 - 1e-9 else max(begin, round(covered * size))
            owned[member] += [Part(vector, at, min(at + step, end)) for at in range(begin, end, step)]
            begin = end
    return owned
