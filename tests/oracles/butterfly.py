"""Weighted butterfly all-reduce in one group, in NumPy, from the description alone (Moshpit reference, 2.3 and 2.6).

* The vector is cut into one share for each member, by bandwidth; a share is cut into parts.
* Member k receives its share from every member, reduces it part by part, and sends the means back to every member.
* The mean of a part is weighted, over the members who delivered that part; a member of weight 0 sends nothing.
* A member that vanishes has delivered only the first parts of each share. Without any weight nobody's values change.

Nothing here is fast and nothing is shared with the code it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Result:
    values: np.ndarray  # (members, size): what each member holds afterwards
    parts: list[tuple[int, int, int, list[int]]]  # (reducer, start, stop, who is in its mean)
    sent_bytes: np.ndarray  # (members,)
    received_bytes: np.ndarray


def shares(bandwidths: list[float | None]) -> np.ndarray:
    """w_i(T) = max(0, (T b_i - 1) / (n - 2)), T bisected until they sum to 1; unknown = mean of known; b = 0: none."""
    known = [b for b in bandwidths if b is not None]
    unknown = np.mean(known) if any(known) else 1.0
    b = np.array([unknown if x is None else x for x in bandwidths], dtype=float)
    n = len(b)
    if not b.any():
        b[:] = 1.0
    if n <= 2:
        return (b > 0) / (b > 0).sum()
    low, high = 0.0, (n - 1) / b.max()
    for _ in range(200):
        level = (low + high) / 2
        w = np.maximum(0, (level * b - 1) / (n - 2))
        low, high = (level, high) if w.sum() < 1 else (low, level)
    return w / w.sum()


def butterfly(
    values: np.ndarray,
    weights: list[float],
    bandwidths: list[float | None],
    part_elements: int,
    delivered: dict[int, dict[int, int]] | None = None,
) -> Result:
    """`values`: (members, size). `delivered[sender][reducer]`: parts that came before the sender vanished."""
    n, size = values.shape
    bounds = np.rint(np.cumsum([0.0, *shares(bandwidths)]) * size).astype(int)
    result = Result(values.copy(), [], np.zeros(n), np.zeros(n))
    for reducer in range(n):
        starts = range(bounds[reducer], bounds[reducer + 1], part_elements)
        for number, start in enumerate(starts):
            stop = min(start + part_elements, bounds[reducer + 1])
            bytes_of_part = (stop - start) * values.itemsize
            came = [
                sender
                for sender in range(n)
                if weights[sender] > 0 and number < (delivered or {}).get(sender, {}).get(reducer, len(starts))
            ]
            result.parts.append((reducer, start, stop, came))
            for sender in came:
                if sender != reducer:
                    result.sent_bytes[sender] += bytes_of_part
                    result.received_bytes[reducer] += bytes_of_part
            if not came:
                continue
            mass = np.array([weights[sender] for sender in came])
            mean = (mass[:, None] * values[came, start:stop].astype(np.float64)).sum(0) / mass.sum()
            for member in range(n):
                if member not in (delivered or {}):
                    result.values[member, start:stop] = mean.astype(values.dtype)
                    if member != reducer:
                        result.sent_bytes[reducer] += bytes_of_part
                        result.received_bytes[member] += bytes_of_part
    return result
