"""Which replicas have parted: judged from sketches that each of them made of its own state.

A sketch is a row of float32 numbers for each tensor: its norm, and a few sums of its values under random signs. The
difference of two such sums is, on average over the signs, as large as the distance of the two tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt

SUMS = 3
ROW_BYTES = 4 * (1 + SUMS)
EQUAL = 1e-4
"""Relative distance below which two tensors are equal up to rounding (design, section 5)."""


@dataclass(frozen=True)
class Verdict:
    """`parted`: for each replica of a minority, the row in which it is farthest off and by how much, relatively.

    `disunited`: there is no majority, so that nobody can be called wrong.
    """

    parted: dict[str, tuple[int, float]] = field(default_factory=dict)
    disunited: bool = False


def farthest(ours: bytes, theirs: bytes) -> tuple[int, float]:
    """The row in which two sketches differ most, and the relative distance there; infinite where they do not compare.

    Without rows (-1, 0).
    """
    if len(ours) != len(theirs) or len(ours) % ROW_BYTES:
        return -1, float("inf")
    row_format = f"<{1 + SUMS}f"
    worst = -1, 0.0
    pairs = zip(struct.iter_unpack(row_format, ours), struct.iter_unpack(row_format, theirs), strict=True)
    for row, (mine, other) in enumerate(pairs):
        if mine == other:
            continue
        off = sqrt(sum((a - b) ** 2 for a, b in zip(mine[1:], other[1:], strict=True)) / SUMS)
        norm = max(mine[0], other[0])
        distance = off / norm if norm > 0 and isfinite(off) and isfinite(norm) else float("inf")
        if distance > worst[1]:
            worst = row, distance
    return worst


def judge(sketches: Mapping[str, bytes]) -> Verdict:
    """Who is equal with most of the others, and who has parted from them."""
    camps: list[list[str]] = []
    for peer_id, sketch in sketches.items():
        camp = next((camp for camp in camps if farthest(sketches[camp[0]], sketch)[1] < EQUAL), None)
        if camp is None:
            camps.append([peer_id])
        else:
            camp.append(peer_id)
    if len(camps) < 2:
        return Verdict()
    camps.sort(key=len, reverse=True)
    if len(camps[0]) == len(camps[1]):
        return Verdict(disunited=True)
    standard = sketches[camps[0][0]]
    return Verdict({peer_id: farthest(standard, sketches[peer_id]) for camp in camps[1:] for peer_id in camp})
