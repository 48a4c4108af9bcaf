"""The virtual-time loop: each trap of a deterministic simulation, with the value that is right."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core import loop as loop_module
from shoal.core.loop import (
    OWNER,
    DeadlockError,
    LooseEndsError,
    TimeLimitError,
    VirtualLoop,
    VirtualTimeError,
    run_virtual,
)

SOURCE = Path(loop_module.__file__).parents[2]


def now() -> float:
    return asyncio.get_running_loop().time()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# ---------------------------------------------------------------- time


def test_time_starts_at_zero_and_a_sleep_ends_when_it_should() -> None:
    async def main() -> list[float]:
        begun = now()
        await asyncio.sleep(2.5)
        return [begun, now()]

    assert run_virtual(main()) == [0.0, 2.5]


def test_a_thousand_sleeps_in_a_row_end_at_exactly_the_times_of_the_heap() -> None:
    async def main() -> list[float]:
        ends = []
        for _ in range(1000):
            await asyncio.sleep(0.1)
            ends.append(now())
        return ends

    expected, when = [], 0.0
    for _ in range(1000):
        when += 0.1  # what call_later computes; nothing else may be added
        expected.append(when)
    assert run_virtual(main()) == expected


def test_a_thousand_sleeps_side_by_side_end_at_exactly_the_times_of_the_heap() -> None:
    async def main() -> list[float]:
        ends = []

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            ends.append(now())

        async with asyncio.TaskGroup() as group:
            for number in reversed(range(1, 1001)):
                group.create_task(sleep(number * 0.1))
        return ends

    assert run_virtual(main()) == [number * 0.1 for number in range(1, 1001)]


def test_time_is_set_from_the_heap_not_added_up() -> None:
    times = [0.2, 0.9, 3.3, 1000 / 3]
    assert any(a + (b - a) != b for a, b in itertools.pairwise(times)), "a choice of times that shows the difference"

    async def main() -> list[float]:
        seen: list[float] = []
        for when in times:
            asyncio.get_running_loop().call_at(when, lambda: seen.append(now()))
        await asyncio.sleep(1e5)
        return seen

    assert run_virtual(main()) == times


def test_ties_in_time_run_in_scheduling_order_also_after_cancelled_timers_were_swept() -> None:
    async def main() -> list[int]:
        loop, order = asyncio.get_running_loop(), []
        timers = [loop.call_at(5.0, order.append, number) for number in range(500)]
        for number, timer in enumerate(timers):
            if number % 5:  # over half: asyncio then rebuilds its heap
                timer.cancel()
        await asyncio.sleep(6)
        return order

    assert run_virtual(main()) == list(range(0, 500, 5))


def test_timers_closer_than_the_grain_share_the_instant_of_the_first_and_run_in_order_of_time() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []
        loop.call_at(1.0 + 5e-10, lambda: seen.append(("second", now())))
        loop.call_at(1.0, lambda: seen.append(("first", now())))
        loop.call_at(1.0 + 5e-9, lambda: seen.append(("third", now())))
        await asyncio.sleep(2)
        return seen

    assert run_virtual(main()) == [("first", 1.0), ("second", 1.0), ("third", 1.0 + 5e-9)]


def test_a_day_in_under_a_second() -> None:
    async def main() -> float:
        for _ in range(24 * 60):
            await asyncio.sleep(60)
        return now()

    started = time.perf_counter()
    assert run_virtual(main()) == 86_400.0
    assert time.perf_counter() - started < 1.0


def test_the_clock_resolution_does_not_vanish_beside_a_late_time() -> None:
    """From 2**24 s on, 1e-9 is below the spacing of floats: asyncio alone would spin before the due timer for ever."""

    async def main() -> float:
        assert asyncio.get_running_loop()._clock_resolution == 1e-9
        await asyncio.sleep(1e9)
        for _ in range(10):
            await asyncio.sleep(0.25)
        assert asyncio.get_running_loop()._clock_resolution > 0
        return now()

    assert run_virtual(main(), limit_seconds=1e10) == 1e9 + 2.5


def test_time_never_goes_back_for_a_timer_in_the_past() -> None:
    async def main() -> tuple[float, float]:
        await asyncio.sleep(3)
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_at(1.0, lambda: done.set_result(now()))
        return await done, now()

    assert run_virtual(main()) == (3.0, 3.0)


def test_timeout_and_wait_for_fire_at_the_exact_time() -> None:
    async def main() -> list[float]:
        fired = []
        try:
            async with asyncio.timeout(0.3):
                await forever()
        except TimeoutError:
            fired.append(now())
        try:
            await asyncio.wait_for(forever(), 0.7)
        except TimeoutError:
            fired.append(now())
        async with asyncio.timeout(None), asyncio.timeout(1):
            await asyncio.sleep(0.5)
        return [*fired, now()]

    assert run_virtual(main()) == [0.3, 0.3 + 0.7, 0.3 + 0.7 + 0.5]


def test_a_timeout_that_ties_with_its_sleep_was_set_first_and_wins() -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        run_virtual(main())


def test_queue_event_lock_condition_and_semaphore_work() -> None:
    async def main() -> list[tuple[int, float]]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        opened, lock, got = asyncio.Event(), asyncio.Lock(), []

        async def produce() -> None:
            await opened.wait()
            for number in range(4):
                await asyncio.sleep(1)
                await queue.put(number)

        async def consume() -> None:
            for _ in range(2):
                async with lock, asyncio.Semaphore(1):
                    got.append((await queue.get(), now()))

        async with asyncio.TaskGroup() as group:
            for work in (produce, consume, consume):
                group.create_task(work())
            await asyncio.sleep(10)
            opened.set()
        return got

    assert run_virtual(main()) == [(0, 11.0), (1, 12.0), (2, 13.0), (3, 14.0)]


def test_nan_is_refused_and_an_infinite_timer_never_rings() -> None:
    async def nan() -> None:
        asyncio.get_running_loop().call_at(math.nan, print)

    async def infinite() -> None:
        async with asyncio.timeout(math.inf):
            await forever()

    with pytest.raises(ValueError, match="NaN"):
        run_virtual(nan())
    with pytest.raises(DeadlockError):
        run_virtual(infinite())


# ---------------------------------------------------------------- order

ORDERS = """
import asyncio, sys
for name in sys.argv[1:]:
    __import__(name)
junk = [object() for _ in range(len(sys.argv) * 1237)]
from shoal.core.loop import OWNER, VirtualLoop, run_virtual

async def main():
    order = []
    loop = asyncio.get_running_loop()

    async def wait(number):
        try:
            await loop.create_future()
        finally:
            order.append(number)

    async def fail():
        await asyncio.sleep(1)
        raise ValueError

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(wait(number))
            group.create_task(fail())
    except* ValueError:
        pass

    futures = [loop.create_future() for _ in range(50)]
    for number, future in enumerate(futures):
        future.number = number
        loop.call_later(1, future.set_result, None)
    for _ in range(2):
        done, _ = await asyncio.wait(futures)
        order.extend(future.number for future in done)

    tasks = [asyncio.create_task(asyncio.sleep(number % 3, number)) for number in range(50)]
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        order.extend(task.result() for task in done)
    tasks = [asyncio.create_task(asyncio.sleep(1), name=None) for _ in range(20)]
    order.extend(task.get_name() for task in asyncio.all_tasks())
    await asyncio.gather(*tasks)

    async def generate(number):
        try:
            yield number
        finally:
            order.append(number)

    global generators
    generators = [generate(number) for number in range(50)]
    for generator in generators:
        await anext(generator)
    return order

order = run_virtual(main())
print(order)
"""


def orders(hash_seed: str, *imports: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ORDERS, *imports],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sets_of_tasks_have_one_order_in_every_process() -> None:
    """Cancellation in a TaskGroup, asyncio.wait of futures and tasks, all_tasks, names, the closing of generators."""
    first = orders("0")
    assert orders("1") == first
    assert orders("77", "decimal", "sqlite3", "email.message", "xml.dom.minidom") == first


def test_sets_of_tasks_have_the_same_order_after_torch_was_imported() -> None:
    pytest.importorskip("torch")
    assert orders("5", "torch") == orders("0")


def test_a_second_run_in_one_process_has_the_order_and_the_names_of_the_first() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def wait() -> None:
            try:
                await forever()
            finally:
                task = asyncio.current_task()
                assert task is not None
                order.append(task.get_name())

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1), asyncio.TaskGroup() as group:
                for _ in range(50):
                    group.create_task(wait())
        return order

    first = run_virtual(main())
    assert len(first) == 50
    assert run_virtual(main()) == first


def test_tasks_and_futures_are_equal_to_themselves_only() -> None:
    async def main() -> tuple[asyncio.Future[Any], asyncio.Task[None]]:
        task = asyncio.create_task(asyncio.sleep(0))
        await task
        return asyncio.get_running_loop().create_future(), task

    future, task = run_virtual(main())
    other_future, other_task = run_virtual(main())
    assert (hash(future), hash(task)) == (hash(other_future), hash(other_task))
    assert future != other_future
    assert task != other_task
    assert len({future, task, other_future, other_task}) == 4


def test_the_base_class_still_has_the_names_this_loop_rests_on() -> None:
    assert "self._run_once()" in inspect.getsource(asyncio.BaseEventLoop.run_forever)
    assert "_timer_handle_cancelled(self)" in inspect.getsource(asyncio.TimerHandle.cancel)
    assert "self._context.run(self._callback, *self._args)" in inspect.getsource(asyncio.Handle._run)
    for name in ("_check_closed", "_asyncgen_firstiter_hook", "_asyncgen_finalizer_hook"):
        assert name in inspect.getsource(asyncio.base_events)


# ---------------------------------------------------------------- what never ends


def test_a_deadlock_names_who_waits_and_where() -> None:
    async def consume(queue: asyncio.Queue[int]) -> int:
        return await queue.get()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(asyncio.Queue()), name="hungry")
            await asyncio.sleep(3)

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main())
    line = consume.__code__.co_firstlineno + 1
    text = str(caught.value)
    assert "at 3.0 s" in text
    assert f"hungry: {consume.__qualname__} (test_loop.py:{line}) > Queue.get (queues.py:" in text
    assert "main: " in text
    assert not getattr(caught.value, "__notes__", [])


def test_a_deadlock_of_a_thousand_tasks_is_not_a_thousand_lines() -> None:
    async def main() -> None:
        await asyncio.gather(*(forever() for _ in range(1000)))

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main())
    assert len(str(caught.value).splitlines()) == 22
    assert str(caught.value).endswith("and 981 more")


def test_the_limit_of_virtual_time() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(40)

    with pytest.raises(TimeLimitError, match=r"(?s)120\.0 s, is beyond 100 s.*main: .*sleep"):
        run_virtual(main(), limit_seconds=100)
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="limit_seconds"):
            run_virtual(forever(), limit_seconds=wrong)


def test_polling_at_one_instant_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "PASSES_LIMIT", 1000)

    async def main() -> None:
        await asyncio.sleep(1)
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(TimeLimitError, match=r"1000 turns of the loop, and still 1\.0 s"):
        run_virtual(main())


def test_turns_of_the_loop_count_anew_whenever_time_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "PASSES_LIMIT", 10)

    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 100.0


def test_a_task_that_ignores_its_cancellation_is_named_and_does_not_hang_the_end() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                continue

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(stubborn(), name="stubborn")
        await asyncio.sleep(1)
        return task

    with pytest.raises(LooseEndsError, match=r"(?s)outlived main: stubborn: .*still did not end"):
        run_virtual(main())


# ---------------------------------------------------------------- the real world


REAL_WORLD: list[Callable[[asyncio.AbstractEventLoop], Any]] = [
    lambda loop: loop.run_in_executor(None, print),
    lambda loop: asyncio.to_thread(print),
    lambda loop: loop.getaddrinfo("localhost", 80),
    lambda loop: loop.getnameinfo(("127.0.0.1", 80)),
    lambda loop: loop.create_connection(asyncio.Protocol, "127.0.0.1", 80),
    lambda loop: loop.create_server(asyncio.Protocol, "127.0.0.1", 0),
    lambda loop: loop.create_datagram_endpoint(asyncio.DatagramProtocol, ("127.0.0.1", 0)),
    lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
    lambda loop: loop.add_signal_handler(2, print),
    lambda loop: loop.add_reader(0, print),
    lambda loop: asyncio.open_connection("127.0.0.1", 80),
]


@pytest.mark.parametrize("reach_out", REAL_WORLD, ids=range(len(REAL_WORLD)))
def test_the_real_world_is_refused(reach_out: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
    async def main() -> None:
        await reach_out(asyncio.get_running_loop())

    with pytest.raises(VirtualTimeError, match="needs the real world"):
        run_virtual(main())


def test_every_method_of_an_event_loop_is_either_allowed_or_refused() -> None:
    allowed = set(loop_module.ALLOWED.split())
    assert allowed <= set(dir(asyncio.AbstractEventLoop))
    for name in ("sock_recv", "sock_sendto", "start_tls", "connect_read_pipe", "set_default_executor", "sendfile"):
        assert name not in allowed
        assert name in vars(VirtualLoop)


def test_call_soon_threadsafe_is_call_soon_on_its_own_thread_and_refused_on_another() -> None:
    async def main() -> tuple[list[str], list[BaseException]]:
        loop, order, errors = asyncio.get_running_loop(), [], []
        loop.call_soon(order.append, "first")
        loop.call_soon_threadsafe(order.append, "second")
        loop.call_soon(order.append, "third")

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(order.append, "intruder")
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        await asyncio.sleep(1)
        return order, errors

    order, errors = run_virtual(main())
    assert order == ["first", "second", "third"]
    assert [type(error) for error in errors] == [VirtualTimeError]


# ---------------------------------------------------------------- how it ends


def test_a_leaked_task_is_named_with_its_place_and_is_cancelled() -> None:
    ended = []

    async def leak() -> None:
        try:
            await asyncio.sleep(50)
        finally:
            await asyncio.sleep(1)
            ended.append(now())

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(leak(), name="orphan")
        await asyncio.sleep(1)
        return task

    with pytest.raises(LooseEndsError, match=r"outlived main: orphan: .*leak \(test_loop\.py:\d+\) > sleep"):
        run_virtual(main())
    assert ended == [2.0]


def test_an_error_of_main_comes_first_and_the_leak_is_its_note() -> None:
    kept = []

    async def main() -> None:
        kept.append(asyncio.create_task(forever(), name="orphan"))
        await asyncio.sleep(1)
        raise KeyError("main's own")

    with pytest.raises(KeyError, match="main's own") as caught:
        run_virtual(main())
    assert [note for note in caught.value.__notes__ if note.startswith("outlived main: orphan")]


async def _fail() -> None:
    raise ValueError("unseen")


def kept_in_a_cycle() -> None:
    cycle: list[Any] = [asyncio.create_task(_fail(), name="failing")]
    cycle.append(cycle)


def dropped() -> None:
    kept_in_a_cycle.__dict__["task"] = task = asyncio.create_task(_fail(), name="failing")
    task.add_done_callback(lambda _: kept_in_a_cycle.__dict__.clear())


@pytest.mark.parametrize("begin", [kept_in_a_cycle, dropped])
def test_an_exception_nobody_retrieved_is_raised_at_the_end(begin: Callable[[], None]) -> None:
    """Whether its task was freed during the run, or is still alive in a cycle the collector has not seen."""

    async def main() -> None:
        begin()
        await asyncio.sleep(1)

    with pytest.raises(LooseEndsError, match=r"never retrieved \(failing\): ValueError\('unseen'\)") as caught:
        run_virtual(main())
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert "in _fail" in "".join(traceback.format_exception(caught.value))


def test_an_exception_that_was_looked_at_is_no_loose_end() -> None:
    async def main() -> str:
        task = asyncio.create_task(_fail())
        await asyncio.wait([task])
        return repr(task.exception())

    assert run_virtual(main()) == "ValueError('unseen')"


def test_a_failing_callback_is_raised_at_the_end() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(LooseEndsError, match="ZeroDivisionError"):
        run_virtual(main())


def test_generators_are_closed_also_when_dropped_or_still_open() -> None:
    closed = []

    async def generate(name: str) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append((name, now()))

    still_open = [generate(f"open {number}") for number in range(3)]

    async def main() -> None:
        for generator in still_open:
            await anext(generator)
        async for _ in generate("dropped"):
            break
        await asyncio.sleep(5)
        async for _ in generate("dropped last"):
            break

    run_virtual(main())
    assert closed == [("dropped", 1.0), ("dropped last", 6.0), *((f"open {number}", 7.0) for number in range(3))]


def test_a_generator_left_to_the_garbage_collector_is_reported() -> None:
    """The collector comes after so many allocations: an import more, and the generator's `finally` runs elsewhen."""

    async def generate() -> AsyncIterator[int]:
        yield 1

    async def main() -> None:
        cycle: list[Any] = [generate()]
        await anext(cycle[0])
        cycle.append(cycle)
        del cycle
        gc.collect()

    with pytest.raises(LooseEndsError, match=r"generate was left to the garbage collector: use contextlib\.aclosing"):
        run_virtual(main())


def test_nothing_is_left_behind() -> None:
    async def main() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def fail() -> None:
        raise KeyError

    asyncio.set_event_loop(None)
    callbacks = list(gc.callbacks)
    loop = run_virtual(main())
    with pytest.raises(KeyError):
        run_virtual(fail())
    assert loop.is_closed()
    assert asyncio._get_running_loop() is None
    with pytest.raises(RuntimeError, match="no current event loop"):
        asyncio.get_event_loop_policy().get_event_loop()
    assert gc.callbacks == callbacks
    assert asyncio.run(asyncio.sleep(0, "a real loop still works")) == "a real loop still works"


def test_a_world_inside_a_world_is_refused() -> None:
    async def main() -> None:
        run_virtual(forever())

    with pytest.raises(VirtualTimeError, match="one world has one clock"):
        run_virtual(main())


def test_keyboard_interrupt_goes_through_and_tasks_are_cancelled() -> None:
    seen = []

    async def worker() -> None:
        try:
            await forever()
        finally:
            seen.append("cancelled")

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(worker())
            asyncio.get_running_loop().call_later(1, interrupt)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert seen == ["cancelled"]


def test_debug_mode_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")

    async def main() -> float:
        asyncio.get_running_loop().set_debug(True)
        await asyncio.sleep(1)
        async with asyncio.timeout(3):
            await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 2.0


# ---------------------------------------------------------------- pauses


def test_what_is_paused_runs_nothing_and_then_all_in_its_order() -> None:
    async def main() -> list[tuple[str, float, int]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen: list[tuple[str, float, int]] = []

        async def tick(name: str) -> None:
            OWNER.set(name)
            for number in range(4):
                seen.append((name, now(), number))
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tick("a"))
            tasks.create_task(tick("b"))
            await asyncio.sleep(0.5)
            loop.pause("a")
            await asyncio.sleep(5)
            assert [entry for entry in seen if entry[0] == "a"] == [("a", 0.0, 0)]
            loop.resume("a")
        return seen

    seen = run_virtual(main())
    assert [(at, number) for name, at, number in seen if name == "b"] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(at, number) for name, at, number in seen if name == "a"] == [(0, 0), (5.5, 1), (6.5, 2), (7.5, 3)]


def test_a_timer_of_the_past_does_not_turn_the_clock_back() -> None:
    async def main() -> float:
        await asyncio.sleep(10)
        fired = asyncio.Event()
        asyncio.get_running_loop().call_at(3.0, fired.set)
        await fired.wait()
        return now()

    assert run_virtual(main()) == 10.0


def test_many_cancelled_timers_leave_the_heap() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for number in range(10_000):
            loop.call_later(1000 + number, lambda: None).cancel()
        await asyncio.sleep(1)
        assert loop._cancelled_timers >= 0
        return len(loop._timers)

    assert run_virtual(main()) < 210
