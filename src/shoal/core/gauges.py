"""Plain measurements that protocol code decides on: silence between bytes, the rate of a busy link, an allowance."""

from __future__ import annotations

from collections import deque

SHORTEST_PATIENCE_SECONDS, LONGEST_PATIENCE_SECONDS = 1.0, 3.0
GAPS_KEPT, SHORTEST_GAP_SECONDS = 100, 0.05
WINDOW_SECONDS, WINDOWS_KEPT = 0.05, 200
BUSY_BYTES = 16 * 1024
"""Fewer bytes in a window are heartbeats, not traffic."""


class Silence:
    """How long a peer may be silent: 4 x the longest of its last 100 gaps, kept between 1 s and 3 s.

    Bytes of any kind break a silence: on a full link bulk comes in bursts, and signs of life come between them. Gaps
    inside a burst are not counted, or a hundred of them would push out of memory how long the peer can be quiet.
    """

    def __init__(self, now: float) -> None:
        self._gaps: deque[float] | None = None  # it takes 0.7 KB, and most connections never fall silent
        self.last_heard = now

    def heard(self, now: float) -> None:
        """Bytes came at `now`."""
        if now - self.last_heard >= SHORTEST_GAP_SECONDS:
            if self._gaps is None:
                self._gaps = deque(maxlen=GAPS_KEPT)
            self._gaps.append(now - self.last_heard)
        self.last_heard = now

    def excuse(self, now: float) -> None:
        """The silence up to `now` was not its fault, but ours."""
        self.last_heard = now

    def patience_seconds(self) -> float:
        """3 s before any history."""
        if not self._gaps:
            return LONGEST_PATIENCE_SECONDS
        return min(max(4 * max(self._gaps), SHORTEST_PATIENCE_SECONDS), LONGEST_PATIENCE_SECONDS)


class RateGauge:
    """Bytes per second of a link while it is busy: three of four of the last bytes passed at this rate or more slowly.

    A window lasts 50 ms, or until the next bytes where they come more slowly. The quartile is one of bytes, not of
    windows: the pause between two averagings, and a fast peer's long wait for a slow partner's trickle, say nothing
    about its own link. A burst that only fills a buffer is few bytes.
    """

    def __init__(self) -> None:
        self._window_start = 0.0
        self._window_bytes = 0
        self._windows: deque[tuple[float, int]] = deque(maxlen=WINDOWS_KEPT)  # (rate, bytes)
        self.total_bytes = 0

    def count(self, count_bytes: int) -> None:
        """These bytes passed, whatever they are: `total_bytes` has them all."""
        self.total_bytes += count_bytes

    def add(self, count_bytes: int, now: float) -> None:
        """`count_bytes` of bulk passed at `now`. Nothing else says how fast the link is: no burst of calls fills it."""
        elapsed = now - self._window_start
        if elapsed >= WINDOW_SECONDS:
            if self._window_bytes >= BUSY_BYTES:
                self._windows.append((self._window_bytes / elapsed, self._window_bytes))
            self._window_start, self._window_bytes = now, 0
        self._window_bytes += count_bytes

    def bytes_per_second(self) -> float | None:
        """None before four busy windows."""
        if len(self._windows) < 4:
            return None
        passed, most = 0, 0.75 * sum(count for _, count in self._windows)
        for rate, count in sorted(self._windows):  # noqa: B007  the last one is returned
            passed += count
            if passed >= most:
                break
        return rate


class Allowance:
    """So many at once, and so many per second from then on."""

    def __init__(self, at_once: float, per_second: float, now: float) -> None:
        self._most, self._per_second = at_once, per_second
        self._left, self._at = at_once, now

    def has_any(self, now: float) -> bool:
        """Whether `take` would grant one now."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_second)
        self._at = now
        return self._left >= 1.0

    def take(self, now: float) -> bool:
        """Take one; False where none is left."""
        if not self.has_any(now):
            return False
        self._left -= 1.0
        return True
