"""The deterministic event loop in virtual time: the same coroutines as on the wire, in the same order in every run.

Each trap is handled where it bites:

- sets of tasks (TaskGroup, asyncio.wait, all_tasks) are ordered by address        -> serial hashes: `_Task`, `_Future`
- timers of one instant leave the heap in any order                                -> serial ties: `_Timer`
- a clock that adds up steps drifts; without a grain it spins before a due timer   -> `VirtualLoop.select`
- threads, sockets and DNS end in real time, which this clock can't see            -> `ALLOWED`, all else is refused
- the garbage collector closes generators when it likes                            -> `_asyncgen_finalizer_hook`

Two sets stay out of reach: `asyncio.as_completed` keys bare coroutines by address, and the future of a bare
`gather(...)` given to `asyncio.wait` is made without the loop. Give both of them tasks.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from shoal.core.virtual_errors import DeadlockError, LooseEndsError, TimeLimitError, VirtualTimeError, listed, where

__all__ = ["DeadlockError", "LooseEndsError", "TimeLimitError", "VirtualLoop", "VirtualTimeError", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOCK_GRAIN = 1e-9  # seconds; closer timers share one instant, that of the earliest, in the order of their times
PASSES_LIMIT = 1_000_000  # turns of the loop at one instant
WIND_UP_SECONDS = 60.0  # virtual time in which cancelled tasks must end, once main is done

ALLOWED = """
    call_at call_exception_handler call_later call_soon call_soon_threadsafe close create_future create_task
    default_exception_handler get_debug get_exception_handler get_task_factory is_closed is_running run_forever
    run_until_complete set_debug set_exception_handler set_task_factory shutdown_asyncgens shutdown_default_executor
    stop time
"""
"""What of an event loop makes sense here. The rest waits for the real world: the clock would jump past it, or stand."""


class _Future(asyncio.Future[Any]):
    """A future hashed by its serial number in its loop. Equality stays identity."""

    def __init__(self, *, loop: VirtualLoop) -> None:
        self._serial = next(loop.serials)
        super().__init__(loop=loop)
        loop.alive.add(self)

    def __hash__(self) -> int:
        return self._serial


class _Task(asyncio.Task[Any]):
    """A task hashed by its serial number in its loop, and named by it too: asyncio counts names per process."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, name: str | None = None, **options: Any) -> None:
        self._serial = next(loop.serials)  # first: the constructor already puts the task into a set
        super().__init__(coro, loop=loop, name=name or f"task-{self._serial}", **options)
        loop.alive.add(self)

    def __hash__(self) -> int:
        return self._serial


class _Timer(asyncio.TimerHandle):
    """A timer that knows when it was set: asyncio's compare by time alone, and a heap forgets the order of equals."""

    _serial: int
    _when: float

    def __lt__(self, other: Any) -> bool:
        return bool(self._when < other._when or (self._when == other._when and self._serial < other._serial))


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that starts at 0.0 and never waits. Use it through `run_virtual`."""

    _scheduled: list[_Timer]  # the base class's own heap

    def __init__(self, *, limit_seconds: float) -> None:
        super().__init__()
        self.limit_seconds = limit_seconds
        self.serials, self._timer_serials, self._generator_serials = (itertools.count() for _ in range(3))
        self.alive: weakref.WeakSet[_Future | _Task] = weakref.WeakSet()
        self.complaints: list[dict[str, Any]] = []
        self._generators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._closers: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._collecting = False
        self._own_thread = threading.get_ident()
        self._now, self._passes = 0.0, 0
        self._clock_resolution = CLOCK_GRAIN
        self._selector = self  # where the base class would wait in its selector, it calls our `select`
        self.set_task_factory(lambda _, coro, **options: _Task(coro, loop=self, **options))
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        if math.isnan(when):
            raise ValueError("a timer can't be set to NaN: the heap would lose its order and nobody would notice")
        timer = _Timer(when, callback, args, self, context)
        timer._serial, timer._scheduled = next(self._timer_serials), True  # type: ignore[attr-defined]
        heapq.heappush(self._scheduled, timer)
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._own_thread:
            raise VirtualTimeError("call_soon_threadsafe from another thread: its moment would differ in every run")
        return self.call_soon(callback, *args, context=context)

    def select(self, timeout: float | None) -> tuple[()]:
        """Jump to the first timer, unless something is ready now (timeout 0). None: there is no timer.

        Time is set from the heap's head, never added up. The resolution must not vanish beside the time
        (1e8 + 1e-9 == 1e8), or the base class would find the head not yet due, for ever.
        """
        self._passes += 1
        if self._passes > PASSES_LIMIT:
            raise TimeLimitError(f"{PASSES_LIMIT} turns of the loop, and still {self._now} s{self._who_waits()}")
        if timeout == 0:
            return ()
        head = math.inf if timeout is None else self._scheduled[0]._when
        if head == math.inf:
            raise DeadlockError(f"nothing can run any more at {self._now} s, and main isn't done{self._who_waits()}")
        if head > self.limit_seconds:
            raise TimeLimitError(f"the next timer, {head} s, is beyond {self.limit_seconds} s{self._who_waits()}")
        self._now, self._passes = head, 0
        self._clock_resolution = max(CLOCK_GRAIN, math.ulp(head))
        return ()

    def _process_events(self, event_list: tuple[()]) -> None:
        """Nothing comes from outside."""

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Oldest first, without the caller."""
        tasks = (task for task in self.alive if isinstance(task, _Task) and not task.done())
        return sorted((task for task in tasks if task is not asyncio.current_task(self)), key=hash)

    def _who_waits(self) -> str:
        return listed(map(where, self.unfinished()))

    def note_collection(self, phase: str, info: dict[str, int]) -> None:
        """For gc.callbacks."""
        self._collecting = phase == "start"

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._generators[next(self._generator_serials)] = agen

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """A generator was dropped half-way. By its last reference: close it. By the collector: nobody knows when."""
        if self._collecting:
            story = f"async generator {agen.__qualname__} was left to the garbage collector: use contextlib.aclosing"
            self.complaints.append({"message": story})
        elif not self.is_closed():
            self.call_soon_threadsafe(self._close_generator, agen)

    def _close_generator(self, agen: Any) -> asyncio.Task[Any]:
        task = self.create_task(agen.aclose(), name=f"aclose {agen.__qualname__}")
        self._closers.add(task)
        return task

    async def _cancel_and_close(self) -> None:
        """Cancel the tasks, then close generators in the order they were begun (the base class: by address)."""
        while tasks := self.unfinished() or [
            self._close_generator(self._generators.pop(serial)) for serial in sorted(self._generators)
        ]:
            for task in tasks:
                if task not in self._closers:
                    task.cancel()
            await asyncio.wait(tasks)

    def wind_up(self) -> tuple[list[str], list[BaseException]]:
        """Cancel what still runs, close what is open: one line per loose end, and the exceptions among them."""
        lines = [f"outlived main: {where(task)}" for task in self.unfinished() if task not in self._closers]
        self.limit_seconds, self._passes = self._now + WIND_UP_SECONDS, 0
        try:
            self.run_until_complete(self.create_task(self._cancel_and_close(), name="wind-up"))
        except VirtualTimeError as error:
            lines.append(f"cancelled, and still did not end: {error}")
        for future in sorted(self.alive, key=hash):
            future._log_destroy_pending = False  # type: ignore[union-attr]  # what is pending has just been named
            if future.done() and not future.cancelled() and future._log_traceback:
                self.complaints.append({"message": "never retrieved", "exception": future.exception(), "task": future})
        for complaint in self.complaints:
            task = complaint.get("task") or complaint.get("future")
            who = f" ({task.get_name()})" if isinstance(task, _Task) else ""
            lines.append(f"{complaint['message']}{who}: {complaint.get('exception', 'no exception')!r}")
        return lines, [complaint["exception"] for complaint in self.complaints if "exception" in complaint]


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: VirtualLoop, *args: Any, **options: Any) -> NoReturn:
        raise VirtualTimeError(f"{name} needs the real world, and this loop runs in virtual time")

    return refuse


for _name in dir(asyncio.AbstractEventLoop):
    if not _name.startswith("_") and _name not in ALLOWED.split():
        setattr(VirtualLoop, _name, _refusal(_name))


def run_virtual(main: Coroutine[Any, Any, T], *, limit_seconds: float = 1e6) -> T:
    """Run `main` on a fresh loop in virtual time, from 0.0, and return its result.

    Raises what main raises (loose ends become its notes), and a `VirtualTimeError` for a dead-lock, for time beyond
    `limit_seconds`, and, after a good end, for tasks that outlived main and exceptions nobody looked at.
    """
    if not limit_seconds > 0:
        main.close()
        raise ValueError(f"limit_seconds = {limit_seconds!r} is not allowed: it must be above 0")
    if asyncio._get_running_loop() is not None:
        main.close()
        raise VirtualTimeError("run_virtual inside a running loop: one world has one clock")
    loop = VirtualLoop(limit_seconds=limit_seconds)
    gc.callbacks.append(loop.note_collection)
    try:
        try:
            result: T = loop.run_until_complete(loop.create_task(main, name="main"))
        except BaseException as error:
            told = isinstance(error, (DeadlockError, TimeLimitError))  # they have named every task already
            for line in loop.wind_up()[0]:
                if not (told and line.startswith("outlived")):
                    error.add_note(line)
            raise
        lines, errors = loop.wind_up()
        cause = BaseExceptionGroup("never retrieved", errors) if errors else None
        if lines:
            raise LooseEndsError(f"main returned and left loose ends{listed(lines)}") from cause
        return result
    finally:
        gc.callbacks.remove(loop.note_collection)
        loop.close()
