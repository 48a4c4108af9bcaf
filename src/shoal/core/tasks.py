"""A trap of asyncio's TaskGroup, kept in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.core.errors import PeerLost

Result = TypeVar("Result")


async def contained(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, which may use a TaskGroup, in a task of its own.

    A TaskGroup that is cancelled from outside in the same moment as a child fails raises the failure and swallows the
    cancellation (Python 3.11 and 3.12): whoever catches that failure lives on, though it was told to end. Here the
    cancellation reaches the caller, and then the work.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return task.result()


def root_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group of groups that says most: what somebody told before a connection that merely broke."""
    flat = [root_cause(error) if isinstance(error, BaseExceptionGroup) else error for error in errors.exceptions]
    return min(flat, key=lambda error: isinstance(error, PeerLost))
