"""A collector that dies as it hands its roll out: those who live have one roll, never two, and never none."""

from __future__ import annotations

import asyncio

import pytest

from shoal.net.envelope import Message
from shoal.protocols.roll_record import CALL, Here, Roll
from shoal.sim import SimPeer, World
from shoal.strategies.allreduce import AllReduce

SHAPES = [((1000,), "float32")]
PASSAGE_SECONDS = 0.05


def die_after_answers(victim: SimPeer, answers: int) -> None:
    """It dies when so many callers have its roll; the others get no answer."""
    answered = 0

    async def here(peer_id: str, call: Here) -> Message:
        nonlocal answered
        roll = await victim.peer.rolls._here(peer_id, call)
        answered += 1
        if answered == answers:
            asyncio.get_running_loop().call_later(PASSAGE_SECONDS, lambda: deaths.append(asyncio.create_task(die())))
        elif answered > answers:
            await asyncio.Event().wait()
        return roll

    async def die() -> None:
        await victim.crash()

    deaths: list[asyncio.Task[None]] = []
    victim.peer.host.serve(Here, here)


@pytest.mark.parametrize("answers", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_roll_that_some_have_is_the_roll_of_all(seed: int, answers: int) -> None:
    async def scenario(world: World) -> None:
        founder = await world.start("a", strategy=AllReduce())
        peers = [founder, *[await world.start(name, peers=[founder.address]) for name in "bcd"]]
        await asyncio.sleep(2)
        candidates = [peer.id for peer in peers]
        victim = next(peer for peer in peers if peer.id == peer.peer.rolls._collector(CALL, 1, candidates))
        die_after_answers(victim, answers)
        began = asyncio.get_running_loop().time()
        calls = {
            peer.name: asyncio.create_task(peer.peer.rolls.call(CALL, 1.0, None, SHAPES, 30.0))
            for peer in peers
            if peer is not victim
        }
        last = asyncio.create_task(victim.peer.rolls.call(CALL, 1.0, None, SHAPES, 30.0))
        rolls = await asyncio.gather(*calls.values(), return_exceptions=True)
        assert asyncio.get_running_loop().time() - began < 1.0
        assert all(isinstance(roll, Roll) for roll in rolls), rolls
        assert len({roll.roll_id for roll in rolls}) == 1
        assert rolls[0].members == sorted(candidates)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)

    World(seed=seed).run(scenario)
