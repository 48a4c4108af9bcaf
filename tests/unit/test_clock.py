"""The clock that protocol code gets: the same on a real loop and in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from shoal.core.clock import VIRTUAL_EPOCH, Clock, virtual_wall
from shoal.core.loop import run_virtual


async def measure(clock: Clock, seconds: float) -> tuple[float, float]:
    """Seconds that passed by `now` and by `wall`."""
    now, wall = clock.now(), clock.wall()
    await clock.sleep(seconds)
    return clock.now() - now, clock.wall() - wall


def test_in_virtual_time_both_clocks_move_by_exactly_what_was_slept() -> None:
    assert run_virtual(measure(Clock(virtual_wall), 3600.5)) == (3600.5, 3600.5)


def test_the_wall_of_every_virtual_world_begins_at_one_moment() -> None:
    async def main() -> float:
        return Clock(virtual_wall).wall()

    assert run_virtual(main()) == run_virtual(main()) == VIRTUAL_EPOCH


def test_on_a_real_loop_the_same_class_tells_real_time() -> None:
    clock = Clock()
    by_now, by_wall = asyncio.run(measure(clock, 0.05))
    assert 0.049 <= by_now < 5
    assert 0.0 <= by_wall < 5
    assert abs(clock.wall() - time.time()) < 5


def test_sleep_zero_lets_the_others_run_once() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        asyncio.get_running_loop().call_soon(order.append, "other")
        await Clock(virtual_wall).sleep(0)
        return [*order, "me"]

    assert run_virtual(main()) == ["other", "me"]


def test_a_wall_that_is_wrong_does_not_touch_now() -> None:
    """Clock skew is a fault of the simulated world: only `wall` may show it."""
    assert run_virtual(measure(Clock(lambda: virtual_wall() * 2 - 1000), 10)) == (10.0, 20.0)


def test_outside_a_loop_there_is_no_now() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        Clock().now()
