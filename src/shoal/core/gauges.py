"""Plain measurements that protocol code decides on: silence between bytes, and the rate of a busy link."""

from __future__ import annotations

from collections import deque

SHORTEST_PATIENCE_SECONDS, LONGEST_PATIENCE_SECONDS, GAPS_KEPT = 1.0, 3.0, 100
WINDOW_SECONDS, WINDOWS_KEPT = 0.05, 200


class Silence:
    """How long a sender may be silent: 4 x the longest of its last 100 gaps, kept between 1 s and 3 s."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._last: float | None = None

    def seconds(self, now: float, since: float) -> float:
        """How long it has been silent, counted from `since` at the earliest."""
        return now - max(since, self._last or since)

    def heard(self, now: float) -> None:
        """Bytes came at `now`."""
        if self._last is not None:
            self._gaps.append(now - self._last)
        self._last = now

    def rest(self) -> None:
        """The transfer ended: the silence that follows is no gap."""
        self._last = None

    def patience_seconds(self) -> float:
        """3 s before any history."""
        if not self._gaps:
            return LONGEST_PATIENCE_SECONDS
        return min(max(4 * max(self._gaps), SHORTEST_PATIENCE_SECONDS), LONGEST_PATIENCE_SECONDS)


class RateGauge:
    """Bytes per second of a link while it is busy: the upper quartile over its last busy windows of 50 ms.

    A quartile, not the mean: a fast peer that waits for a slow partner has many half-empty windows, and they say
    nothing about its own link.
    """

    def __init__(self) -> None:
        self._window_start = 0.0
        self._window_bytes = 0
        self._windows: deque[int] = deque(maxlen=WINDOWS_KEPT)
        self.total_bytes = 0

    def add(self, count_bytes: int, now: float) -> None:
        """`count_bytes` passed at `now`."""
        self.total_bytes += count_bytes
        if now - self._window_start >= WINDOW_SECONDS:
            if self._window_bytes >= 16 * 1024:  # heartbeats alone do not make a window busy
                self._windows.append(self._window_bytes)
            self._window_start, self._window_bytes = now, 0
        self._window_bytes += count_bytes

    def bytes_per_second(self) -> float | None:
        """None before four busy windows."""
        if len(self._windows) < 4:
            return None
        ranked = sorted(self._windows)
        return ranked[(3 * len(ranked)) // 4] / WINDOW_SECONDS
