"""The one daemon thread that runs the network. The user's thread hands it coroutines and waits for results."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

SWITCH_INTERVAL_SECONDS = 0.0005
"""While the user's thread runs pure Python, the network thread gets the GIL only every switch interval: with Python's
default of 5 ms its throughput is a seventh (0.008 against 0.055 GB/s, measured)."""


class _SwitchInterval:
    """Shortened while any swarm of this process lives, restored after the last one left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL_SECONDS))
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                sys.setswitchinterval(self._before)


_switch_interval = _SwitchInterval()


class NetworkThread:
    """Runs one main coroutine until it ends."""

    def __init__(self, main: Coroutine[Any, Any, None], name: str) -> None:
        self._main = main
        self._loop_ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _switch_interval.acquire()
        self._thread.start()
        self.loop = self._loop_ready.result()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._task = runner.get_loop().create_task(self._main)
            self._loop_ready.set_result(runner.get_loop())
            runner.get_loop().run_until_complete(self._task)

    def cancel(self) -> None:
        """On the loop: end the main coroutine wherever it is."""
        self._task.cancel()

    @property
    def alive(self) -> bool:
        """Whether the main coroutine still runs."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the network's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the main coroutine."""
        self._thread.join(timeout_seconds)
        _switch_interval.release()
