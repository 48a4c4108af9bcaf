"""The deterministic event loop in virtual time: the same coroutines as on the wire, in the same order in every run.

Each trap is handled where it bites:

- sets of tasks (TaskGroup, asyncio.wait, all_tasks) are ordered by address        -> serial hashes: `_Task`, `_Future`
- timers of one instant leave the heap in any order                                -> serial ties: `call_at`
- a clock that adds up steps drifts; closer timers than its grain share an instant -> `VirtualLoop._jump`
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
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from shoal.core.virtual_errors import DeadlockError, LooseEndsError, TimeLimitError, VirtualTimeError, listed, where

__all__ = ["DeadlockError", "LooseEndsError", "TimeLimitError", "VirtualLoop", "VirtualTimeError", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOCK_GRAIN = 1e-9  # seconds; closer timers share one instant, that of the earliest, in the order of their times
PASSES_LIMIT = 1_000_000  # turns of the loop at one instant
WIND_UP_SECONDS = 60.0  # virtual time in which cancelled tasks must end, once main is done

OWNER: ContextVar[object] = ContextVar("OWNER", default=None)
"""Whose callbacks and tasks these are, inherited as contexts are: a world sets it to be able to pause a host."""

ALLOWED = """
    call_at call_exception_handler call_later call_soon call_soon_threadsafe close create_future create_task
    default_exception_handler get_debug get_exception_handler get_task_factory is_closed is_running run_forever
    run_until_complete set_debug set_exception_handler set_task_factory shutdown_asyncgens shutdown_default_executor
    stop time
"""
"""What of an event loop makes sense here. The rest waits for the real world: the clock would jump past it, or stand."""


class _Future(asyncio.Future[Any]):
    """A future hashed by its serial number in its loop. Equality stays identity."""

    _loop: VirtualLoop

    def __init__(self, *, loop: VirtualLoop) -> None:
        self._serial = next(loop.serials)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._serial

    def set_exception(self, exception: type | BaseException, /) -> None:
        self._loop.alive.add(self)  # until somebody has retrieved it
        super().set_exception(exception)


class _Task(asyncio.Task[Any]):
    """A task hashed by its serial number in its loop, and named by it too: asyncio counts names per process."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, name: str | None = None, **options: Any) -> None:
        self._serial = next(loop.serials)  # first: the constructor already puts the task into a set
        super().__init__(coro, loop=loop, name=name or f"task-{self._serial}", **options)
        loop.alive.add(self)

    def __hash__(self) -> int:
        return self._serial


class _Handle(asyncio.Handle):
    """A callback that is due. The base class's own constructor asks for debug mode, a million times."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._callback, self._args, self._loop, self._cancelled = callback, args, loop, False
        self._context = copy_context() if context is None else context
        self._repr = self._source_traceback = None


class _Timer(_Handle, asyncio.TimerHandle):
    """A callback of a later moment."""

    __slots__ = ()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that starts at 0.0 and never waits. Use it through `run_virtual`.

    The base class's turn (`_run_once`) would wait in a selector; here a turn jumps to the first timer, unless something
    is ready now. A thousand peers make millions of turns, so this is also where a simulation spends its time.
    """

    _ready: deque[asyncio.Handle]  # the base class's own

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
        self.events = 0
        """Callbacks that were called."""
        self._timers: list[tuple[float, int, _Timer]] = []
        self._cancelled_timers = 0
        self._paused: dict[object, list[asyncio.Handle]] = {}
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
        timer = _Timer(callback, args, self, context)
        timer._when, timer._scheduled = when, True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._timer_serials), timer))
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Asyncio's timers tell their loop. They leave the heap at its head, or all at once when they are many."""
        self._cancelled_timers += timer._scheduled  # type: ignore[attr-defined]
        if self._cancelled_timers > max(100, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled and entry[2] is not timer]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError("Event loop is closed")
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._own_thread:
            raise VirtualTimeError("call_soon_threadsafe from another thread: its moment would differ in every run")
        return self.call_soon(callback, *args, context=context)

    # -- a turn

    def _run_once(self) -> None:
        """Run what is ready and due; if nothing is ready, jump to the first timer."""
        self._passes += 1
        if self._passes > PASSES_LIMIT:
            raise TimeLimitError(f"{PASSES_LIMIT} turns of the loop, and still {self._now} s{self._who_waits()}")
        ready = self._ready
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump()
        timers, end = self._timers, self._now + max(CLOCK_GRAIN, math.ulp(self._now))
        while timers and timers[0][0] < end:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            self._cancelled_timers -= timer._cancelled
            ready.append(timer)
        self.events += len(ready)
        for _ in range(len(ready)):  # what they add is for the next turn
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._paused and (held := self._paused.get(handle._context.get(OWNER))) is not None:  # type: ignore[attr-defined]
                held.append(handle)
                continue
            handle._run()

    def _jump(self) -> None:
        """To the first timer. Time is set from it, never added up; timers within a grain of it share its moment.

        The grain must not vanish beside the time: 1e8 + 1e-9 == 1e8.
        """
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        head = timers[0][0] if timers else math.inf
        if head == math.inf:
            raise DeadlockError(f"nothing can run any more at {self._now} s, and main isn't done{self._who_waits()}")
        if head > self.limit_seconds:
            raise TimeLimitError(f"the next timer, {head} s, is beyond {self.limit_seconds} s{self._who_waits()}")
        if head > self._now:
            self._now, self._passes = head, 0

    # -- owners that stand still

    def pause(self, owner: object) -> None:
        """From now on nothing runs whose context has this OWNER; the rest of the world goes on."""
        self._paused.setdefault(owner, [])

    def resume(self, owner: object) -> None:
        """What should have run meanwhile runs now, in its order."""
        self._ready.extend(self._paused.pop(owner, ()))

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
