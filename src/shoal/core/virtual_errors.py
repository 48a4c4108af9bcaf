"""What goes wrong in virtual time, as errors that name the tasks which wait, and where.

    VirtualTimeError (a RuntimeError, no ShoalError: the code under test is wrong, not a peer)
    ├── DeadlockError      nothing can ever run again
    ├── TimeLimitError     time went too far, or stood still for too long
    └── LooseEndsError     main returned and left tasks or exceptions behind

Their messages show each task's chain of awaits: a dead-lock is read off, not searched for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

SHOWN_LINES = 20


class VirtualTimeError(RuntimeError):
    """The code under test did what virtual time does not allow."""


class DeadlockError(VirtualTimeError):
    """No callback is ready, no timer is set, and main isn't done. The message names who waits, and where."""


class TimeLimitError(VirtualTimeError):
    """The next timer lies beyond `limit_seconds`; or time stood still for a million turns (a poll by sleep(0))."""


class LooseEndsError(VirtualTimeError):
    """Main returned, but tasks outlived it, or exceptions were never retrieved (those are in `__cause__`)."""


def where(task: asyncio.Task[Any]) -> str:
    """`name: outer (file.py:3) > inner (file.py:9)`: the chain of awaits down to where the task is suspended."""
    steps: list[str] = []
    link: Any = task.get_coro()
    while kind := next((kind for kind in ("cr", "gi", "ag") if getattr(link, f"{kind}_frame", None)), None):
        frame = getattr(link, f"{kind}_frame")
        steps.append(f"{frame.f_code.co_qualname} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})")
        link = getattr(link, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return f"{task.get_name()}: {' > '.join(steps)}"


def listed(lines: Iterable[str]) -> str:
    """The lines of a message's list, each on its own line; a thousand peers are not all shown."""
    every = list(lines)
    more = [f"and {len(every) - SHOWN_LINES} more"] if len(every) > SHOWN_LINES else []
    return "".join(f"\n  {line}" for line in every[:SHOWN_LINES] + more)
