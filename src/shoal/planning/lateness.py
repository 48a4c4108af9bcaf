"""Which senders of a group round are late: learned from the round itself, never a constant the user must guess."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

BEYOND_MEDIAN, SLACK_SECONDS = 3.0, 5.0
EARLIEST_SECONDS = 1.0


def predicted_stragglers(delivered: Mapping[str, float], elapsed_seconds: Mapping[str, float]) -> list[str]:
    """Senders predicted to take more than 3 x the group's median (design, section 6), and 5 s more than it.

    `delivered`: for each sender the fraction of its parts that came, 0 to 1; `elapsed_seconds`: since it began. One
    that delivered a fraction f in t seconds is predicted to take t / f: beginning later than the others is no slowness.
    Nobody is judged in its first second, nor in a group of fewer than three senders, where a median says nothing about
    the others. A sender that sent nothing yet is judged by its silence. The 5 s: in a round of one second a peer on a
    busy machine is 3 x slower than its like again and again, and waiting for it costs less than cutting it off.
    """
    paces = {who: elapsed_seconds[who] / share for who, share in delivered.items() if share > 0}
    if len(paces) < 3:
        return []
    usual = median(paces.values())
    limit = max(BEYOND_MEDIAN * usual, usual + SLACK_SECONDS)
    return [
        who
        for who, pace in paces.items()
        if pace > limit and delivered[who] < 1 and elapsed_seconds[who] >= EARLIEST_SECONDS
    ]
