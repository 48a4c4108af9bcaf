"""How the network thread has things done in the user's thread, which alone touches the model: at safe points."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from shoal.core.errors import RoundError

Result = TypeVar("Result")


class Mailbox:
    """Work that other threads leave for the user's thread."""

    def __init__(self) -> None:
        self._requests: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()

    async def ask(self, work: Callable[[], Result]) -> Result:
        """From the network thread: run `work` at the next safe point and return its result."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Result] = loop.create_future()

        def answer(value: Any, error: Exception | None) -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(value)
            else:
                answered.set_exception(error)

        def at_safe_point() -> None:
            if answered.cancelled():
                return
            value: Any = None
            error: Exception | None = None
            try:
                value = work()
            except Exception as problem:  # noqa: BLE001  raised again where it was asked for
                error = problem
            except BaseException:
                error = RoundError("the training thread was interrupted")
                raise
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(answer, value, error)

        self._requests.append(at_safe_point)
        self._wake.set()
        return await answered

    def work(self) -> None:
        """From the user's thread: a safe point."""
        while self._requests:
            self._requests.popleft()()

    def work_until(self, done: Future[Any], timeout_seconds: float) -> bool:
        """From the user's thread: one long safe point until `done`, or until the time is over. Returns whether done."""
        done.add_done_callback(lambda future: self._wake.set())
        until = time.monotonic() + timeout_seconds
        while not done.done():
            self._wake.clear()
            self.work()
            if done.done():
                break
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._wake.wait(None if left == math.inf else left)
        return True
