"""The time protocol code is given: it never imports `time`, so the same lines run on the wire and in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random as Random  # what peer.random is: SystemRandom on a real machine, seeded in a world

VIRTUAL_EPOCH = 1_750_000_000.0
"""Unix time at which every virtual world begins: the real date would make two runs of one seed differ."""


def virtual_wall() -> float:
    """Unix time of a virtual world, which moves with its loop."""
    return VIRTUAL_EPOCH + asyncio.get_running_loop().time()


class Clock:
    """The running loop tells the time. `wall` is injected: real by default, `virtual_wall` in a simulated world."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall

    def now(self) -> float:
        """Seconds that only go forward; compare them within one process only."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Return `seconds` later; 0 or less lets the others run once."""
        await asyncio.sleep(seconds)

    def wall(self) -> float:
        """Unix time in seconds, for records that others read. It may jump: never measure with it."""
        return self._wall()
