"""CPU work of protocol code: in a thread on a real machine, as a cost on the virtual clock in the simulated world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Compute(Protocol):
    """`await compute(fn, *args, cost_seconds=...)` returns fn(*args) and leaves the loop free meanwhile."""

    async def __call__(self, fn: Callable[..., Result], *args: Any, cost_seconds: float) -> Result:
        """`cost_seconds` is what the work takes in the simulated world."""


class ThreadCompute:
    """Runs the work in an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def __call__(self, fn: Callable[..., Result], *args: Any, cost_seconds: float) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, fn, *args)


class VirtualCompute:
    """Runs the work at once, after its cost has passed on the virtual clock."""

    async def __call__(self, fn: Callable[..., Result], *args: Any, cost_seconds: float) -> Result:
        await asyncio.sleep(cost_seconds)
        return fn(*args)
