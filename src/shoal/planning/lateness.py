"""Which senders of a group round are late: learned from the round itself, never a constant the user must guess."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

BEYOND_MEDIAN = 3.0
EARLIEST_SECONDS = 1.0


def predicted_stragglers(delivered: Mapping[str, float], elapsed_seconds: float) -> list[str]:
    """Senders whose predicted end lies beyond 3 x the group's median (design, section 6).

    `delivered`: for each sender the fraction of its parts that came, 0 to 1. A sender that delivered a fraction f in
    t seconds is predicted to end at t / f. Nobody is judged in the first second, nor in a group of fewer than three
    senders, where a median says nothing about the others. A sender that sent nothing yet is judged by its silence.
    """
    if elapsed_seconds < EARLIEST_SECONDS or len(delivered) < 3:
        return []
    ends = {who: elapsed_seconds / share for who, share in delivered.items() if share > 0}
    if len(ends) < 3:
        return []
    limit = BEYOND_MEDIAN * median(ends.values())
    return [who for who, end in ends.items() if end > limit and delivered[who] < 1]
