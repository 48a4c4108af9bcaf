"""Matchmaking of plain Moshpit All-Reduce: reference section 2.5 and check 19.

The real meetings on a simulated clock; each peer's wall clock is wrong by up to 3 s, and they come at random moments.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

import pytest

from peers import nodes
from shoal.core.loop import run_virtual
from shoal.planning.collector import collector_of
from shoal.protocols.roll_record import PLAIN, Here, Roll

WINDOW_SECONDS, LATENCY_SECONDS = 1.0, 0.01


@dataclass(frozen=True)
class Meeting:
    """Who came after how many seconds, what record each one got, and after how many seconds of waiting."""

    came_after: list[float]
    rolls: list[Roll]
    waited: list[float]


def meeting(seed: int, count: int, *, absent: int = 0) -> Meeting:
    """`count` peers with one key, all within the window; `absent` more take part in the run, but do not come."""
    random = Random(seed)
    everyone = count + absent
    offsets = [random.uniform(-3, 3) for _ in range(everyone)]
    spread = random.choice([0.0, 0.05, 0.5, 0.95]) * WINDOW_SECONDS
    key = f"{seed}.0 (0, {seed})"

    async def main() -> Meeting:
        async with nodes(everyone, links=(), wall_offsets=offsets) as group:
            ids = [node.id for node in group]
            point = ids.index(collector_of("", f"meeting {key}", 0, ids))
            await asyncio.gather(
                *(
                    node.peer.host.link(group[point].peer.host.endpoints, ids[point])
                    for number, node in enumerate(group)
                    if number != point
                )
            )
            came_after = [random.uniform(0, spread) for _ in range(count)]
            callers = random.sample(range(everyone), count)
            loop = asyncio.get_running_loop()

            async def one(number: int, after_seconds: float) -> tuple[Roll, float]:
                await asyncio.sleep(after_seconds)
                called_at = loop.time()
                here = Here(PLAIN, 1, 1.0, None, [((1,), "float32")], WINDOW_SECONDS)
                return await group[number].peer.meetings.meet(key, 64, here, 10.0), loop.time() - called_at

            found = await asyncio.gather(*(one(*who) for who in zip(callers, came_after, strict=True)))
            assert {*found[0][0].members} == {ids[number] for number in callers}
            return Meeting(came_after, [roll for roll, _ in found], [seconds for _, seconds in found])

    return run_virtual(main(), limit_seconds=60)


def sizes_of_100_seeds() -> list[int]:
    """Most of them small; 2 and 64 are among them."""
    random = Random(19)
    counts = [random.choice([2, 3, 4, 5, 6, 8, 10, 12, 16]) for _ in range(94)]
    return [*counts, 2, 24, 32, 48, 63, 64]


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_check_19_one_group_forms_whatever_the_wall_clocks_say_and_nobody_waits_longer_than_the_window(first) -> None:
    """Each of 100 seeds: 2 to 64 peers, clocks wrong by up to 3 s, and in every third somebody who does not come."""
    for seed in range(first, first + 20):
        count, absent = sizes_of_100_seeds()[seed], seed % 3 == 0
        found = meeting(seed, count, absent=int(absent))
        assert len({roll.roll_id for roll in found.rolls}) == 1, "one group"
        assert len(found.rolls[0].members) == count
        longest = max(found.came_after) - min(found.came_after)
        if absent:  # the window of the first one passes
            assert max(found.waited) == pytest.approx(WINDOW_SECONDS, abs=6 * LATENCY_SECONDS)
        else:  # it closes as soon as all are here
            assert max(found.waited) <= longest + 6 * LATENCY_SECONDS
        assert max(found.waited) <= WINDOW_SECONDS + 6 * LATENCY_SECONDS
