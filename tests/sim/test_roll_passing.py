"""The roll of a large swarm is taken from a member of the same block; here a block is 4, and 12 are a large swarm."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import Context

import msgspec
import pytest
from crowd import call_for_average, crowd
from on_demand import inputs_of

from shoal.net.envelope import Message
from shoal.protocols import roll_passing
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_passing import RollPassing, TakeRoll
from shoal.sim import SimPeer, World
from shoal.strategies.allreduce import AllReduce

PEERS, BLOCK = 12, 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_passing, "BLOCK", BLOCK)
    monkeypatch.setattr(roll_passing, "LARGE_ROLL", 2 * BLOCK)


async def average(world: World) -> tuple[list[SimPeer], list[Outcome | BaseException]]:
    strategy = AllReduce(every_seconds=3600.0)
    peers = await crowd(world, PEERS, strategy)
    return peers, await call_for_average(peers, strategy, inputs_of(PEERS), [1.0] * PEERS, timeout_seconds=10.0)


def test_the_first_of_a_block_gives_it_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Counter[str] = Counter()
    give = RollPassing._give

    async def counted(self: RollPassing, peer_id: str, take: TakeRoll) -> Message:
        given[self._host.peer_id] += 1
        return await give(self, peer_id, take)

    monkeypatch.setattr(RollPassing, "_give", counted)

    async def scenario(world: World) -> None:
        _, outcomes = await average(world)
        (roll_id,) = {one.roll.roll_id for one in outcomes if isinstance(one, Outcome)}
        assert all(isinstance(one, Outcome) and one.exact for one in outcomes), outcomes
        roll = next(one.roll for one in outcomes if isinstance(one, Outcome))
        assert roll_id
        assert given.keys() <= set(roll.members[::BLOCK])
        assert len(given) >= 2  # but for the collector's own block, where it may be the first
        assert PEERS - PEERS // BLOCK - BLOCK < sum(given.values()) <= PEERS - PEERS // BLOCK

    World(seed=1).run(scenario)


def test_where_the_first_of_a_block_dies_the_collector_gives_it_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[SimPeer] = []
    dying: list[asyncio.Task[None]] = []

    async def scenario(world: World) -> None:
        give, loop = RollPassing._give, asyncio.get_running_loop()

        async def dies(self: RollPassing, peer_id: str, take: TakeRoll) -> Message:
            if not dead:
                dead.append(next(peer for peer in world.peers if peer.id == self._host.peer_id))
                dying.append(loop.create_task(dead[0].crash(), context=Context()))
            return await give(self, peer_id, take)

        monkeypatch.setattr(RollPassing, "_give", dies)
        peers, outcomes = await average(world)
        rolls = {one.roll.roll_id for peer, one in zip(peers, outcomes, strict=True) if peer not in dead}  # type: ignore[union-attr]
        await dying[0]
        assert len(dead) == len(rolls) == 1

    World(seed=2).run(scenario)


def test_another_roll_than_the_collectors_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    give = RollPassing._give

    async def lies(self: RollPassing, peer_id: str, take: TakeRoll) -> Message:
        roll = await give(self, peer_id, take)
        return msgspec.structs.replace(roll, weights=[7.0] * PEERS)

    monkeypatch.setattr(RollPassing, "_give", lies)

    async def scenario(world: World) -> None:
        _, outcomes = await average(world)
        for one in outcomes:
            assert isinstance(one, Outcome)
            assert one.exact
            assert one.roll.weights == [1.0] * PEERS

    World(seed=3).run(scenario)


def test_a_small_roll_is_given_by_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_passing, "LARGE_ROLL", PEERS)

    async def refuses(self: RollPassing, peer_id: str, take: TakeRoll) -> Message:
        raise AssertionError("nobody is sent elsewhere")

    monkeypatch.setattr(RollPassing, "_give", refuses)

    async def scenario(world: World) -> None:
        _, outcomes = await average(world)
        assert all(isinstance(one, Outcome) and one.exact for one in outcomes), outcomes

    World(seed=4).run(scenario)
