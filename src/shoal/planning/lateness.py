"""Which senders of a group round are late: learned from the round itself, never a constant the user must guess."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from shoal.core.gauges import LONGEST_PATIENCE_SECONDS

BEYOND_MEDIAN = 3.0
EARLIEST_SECONDS = LONGEST_PATIENCE_SECONDS


def predicted_stragglers(
    delivered: Mapping[str, float], elapsed_seconds: Mapping[str, float], slowness: Mapping[str, float]
) -> list[str]:
    """Senders predicted to take more than 3 x the group's median (design, section 6).

    `delivered`: for each sender the fraction of its parts that came, 0 to 1; `elapsed_seconds`: since it began. One
    that delivered a fraction f in t seconds is predicted to take t / f: beginning later than the others is no slowness.
    Nobody is judged as long as it might as well be silent: a busy machine that stalled for a second has delivered next
    to nothing by then, and is done a moment later. Nor is anybody in a group of fewer than three senders, where a
    median says nothing about the others. A sender that sent nothing yet is judged by its silence.

    `slowness`: the inverse of each one's rate in the roll, where that has one. Who is known to be slower than the
    median has so much longer.
    """
    paces = {who: elapsed_seconds[who] / share for who, share in delivered.items() if share > 0}
    if len(paces) < 3:
        return []
    limit = BEYOND_MEDIAN * median(paces.values())
    usual = median(slowness.values()) if slowness else 1.0
    return [
        who
        for who, pace in paces.items()
        if pace > limit * max(1.0, slowness.get(who, usual) / usual)
        and delivered[who] < 1
        and elapsed_seconds[who] >= EARLIEST_SECONDS
    ]
