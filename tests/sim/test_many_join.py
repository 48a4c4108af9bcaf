"""Many peers join through one entry peer at once, and some restart all the time: one run, nobody is left waiting."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
from crowd import now

from group import members
from shoal.core.loop import run_virtual
from shoal.protocols.history import Averaging
from shoal.sim import SimPeer, VirtualReplica, World
from shoal.strategies.moshpit import Moshpit

MANY = 64
MARK = 1e6
"""Who holds more has the run's state: a fresh replica begins at 0."""
FIRST_ROLL_SECONDS = 3.0
SEEDS = [seed if seed < 3 else pytest.param(seed, marks=pytest.mark.acceptance) for seed in range(20)]


def replica(value: float = 0.0) -> VirtualReplica:
    return VirtualReplica(torch.full((50,), value), drift=1.0, step_seconds=0.1)


def uneven(world: World) -> None:
    """Connections of 2 to 20 ms one way, drawn from the world's seed."""
    latencies = Random(world.random.getrandbits(32))
    world.network.latency_seconds = lambda: latencies.choice([0.002, 0.01, 0.02])


async def join_at_once(world: World, strategy: Moshpit, alone_seconds: float) -> tuple[list[SimPeer], float]:
    """All that there will be, and when the last one called for entry: within 0.2 s of the first."""
    founder = await world.start("p0", strategy=strategy, replica=replica(MARK))
    await founder.attached.wait()
    await asyncio.sleep(alone_seconds)
    moments = [0.2 * world.random.random() for _ in range(MANY - 1)]

    async def join(number: int, after_seconds: float) -> SimPeer:
        await asyncio.sleep(after_seconds)
        return await world.start(f"p{number}", peers=[founder.address], replica=replica())

    began = now()
    rest = await asyncio.gather(*(join(number, after) for number, after in enumerate(moments, start=1)))
    return [founder, *rest], began + max(moments)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_who_join_at_once_are_in_the_first_roll_within_3_seconds(seed: int) -> None:
    """Odd seeds: the founder has trained alone before, so that an averaging is due as soon as the first one came."""

    async def scenario(world: World) -> None:
        uneven(world)
        strategy = Moshpit(group_size=8, every_seconds=1.0)
        peers, called_at = await join_at_once(world, strategy, alone_seconds=10.0 * (seed % 2))
        while not all(peer.peer.history.applied and met_all(peer) for peer in peers):
            assert now() < called_at + FIRST_ROLL_SECONDS, [len(peer.peer.members.members) for peer in peers]
            await asyncio.sleep(0.05)
        ids = {peer.id for peer in peers}
        assert {peer.peer.members.charter.charter_id for peer in peers} == {peers[0].peer.members.charter.charter_id}
        for peer in peers:
            assert peer.peer.members.members.keys() == ids - {peer.id}
            assert not peer.peer.history.failures
            entry = peer.peer.history.applied[-1]
            assert set(entry.members) == ids
            assert all(averaging.exact for averaging in peer.peer.history.applied)
            assert float(peer.replica.tensors[0].min()) > MARK
        if seed % 2 == 0:
            assert all(peer.peer.history.applied_count == 1 for peer in peers)

    World(seed=seed).run(scenario)


def test_a_group_that_comes_all_at_once_passes_the_door() -> None:
    """70 members that have never met: each opens a link to one of them in the same moment, and a stream."""

    async def main() -> None:
        count = 70
        async with members(count, strangers=set(itertools.combinations(range(count), 2))) as group:
            first = group[0].host
            met = [member.host.link(first.endpoints, first.peer_id) for member in group[1:] for _ in range(2)]
            assert await asyncio.gather(*met) == [first.peer_id] * 2 * (count - 1)

    run_virtual(main(), limit_seconds=60)


def met_all(peer: SimPeer) -> bool:
    return len(peer.peer.history.applied[-1].members) == MANY


# ---------------------------------------------------------------- restarts


@dataclass(frozen=True)
class Wait:
    """One averaging that somebody waited for."""

    seconds: float
    ended_by: str


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Wait]:
    """How long each averaging of any peer took, whatever it brought; without those whose peer was killed in it."""
    seen: list[Wait] = []
    all_reduce = Moshpit.all_reduce

    async def timed(self: Moshpit, *args: Any, **named: Any) -> Any:
        began = now()
        try:
            outcome = await all_reduce(self, *args, **named)
        except Exception as error:
            seen.append(Wait(now() - began, type(error).__name__))
            raise
        seen.append(Wait(now() - began, "outcome"))
        return outcome

    monkeypatch.setattr(Moshpit, "all_reduce", timed)
    return seen


async def restart(world: World, peers: list[SimPeer], number: int, *, keeps_identity: bool) -> None:
    """It dies, and comes back empty at its old place within 2 s, through any of the others."""
    old = peers[number]
    key = world.random.randbytes(32) if not keeps_identity else world_key(number)
    await old.crash()
    await asyncio.sleep(2 * world.random.random())
    entry = world.random.choice([peer for peer in peers if peer.attached.is_set() and peer is not old])
    began = now()
    fresh = await world.start(old.name, peers=[entry.address], replica=replica(), key=key)
    await asyncio.wait_for(fresh.attached.wait(), 20)
    assert now() < began + 10
    peers[number] = fresh


def world_key(number: int) -> bytes:
    return (1000 + number).to_bytes(32, "big")


@pytest.mark.parametrize(
    ("count", "minutes"), [(16, 2), pytest.param(MANY, 30, marks=[pytest.mark.acceptance, pytest.mark.timeout(7200)])]
)
def test_with_a_tenth_restarting_every_minute_every_wait_ends(count: int, minutes: int, waits: list[Wait]) -> None:
    """Half of them keep their identity. The founder restarts too: its run goes on without it. 64: a random seed."""
    seed = SystemRandom().getrandbits(32) if count == MANY else count

    async def scenario(world: World) -> None:
        uneven(world)
        strategy = Moshpit(group_size=8, every_seconds=5.0)
        founder = await world.start("p0", strategy=strategy, replica=replica(MARK), key=world_key(0))
        joining = [
            world.start(f"p{number}", peers=[founder.address], replica=replica(), key=world_key(number))
            for number in range(1, count)
        ]
        peers = [founder, *await asyncio.gather(*joining)]
        await asyncio.sleep(5)
        for minute in range(minutes):
            ends_at = now() + 60
            numbers = world.random.sample(range(count), max(1, count // 10))
            if minute == 0:
                numbers[0] = 0
            moments = sorted(45 * world.random.random() for _ in numbers)  # then all have time for an averaging
            for number, moment in zip(numbers, moments, strict=True):
                await asyncio.sleep(max(0.0, ends_at - 60 + moment - now()))
                await restart(world, peers, number, keeps_identity=world.random.random() < 0.5)
            await asyncio.sleep(ends_at - now())
            check(peers, waits, strategy)
        averaged = sum(wait.ended_by == "outcome" for wait in waits)
        print(
            f"{count} peers, {minutes} minutes: {averaged} of {len(waits)} averagings brought a result, "
            f"the longest took {max(wait.seconds for wait in waits):.1f} s"
        )
        assert averaged > 0.95 * len(waits)
        assert averaged >= count * minutes * 6

    print(f"seed {seed}")
    World(seed=seed).run(scenario)


def check(peers: list[SimPeer], waits: list[Wait], strategy: Moshpit) -> None:
    """At the end of a minute: nobody waited too long, all know all, and all are in the newest averaging."""
    assert max(wait.seconds for wait in waits) <= strategy.timeout_seconds
    ids = {peer.id for peer in peers}
    newest: list[Averaging] = []
    for peer in peers:
        assert peer.peer.members.members.keys() == ids - {peer.id}
        assert float(peer.replica.tensors[0].min()) > MARK
        newest.append(peer.peer.history.applied[-1])
    last = max(entry.number for entry in newest)
    for entry in newest:
        assert entry.number >= last - 1
        assert len(entry.members) >= len(peers) - 1
