"""A swarm of more peers than a peer keeps links to: the register lists the rest, and averagings are of everybody."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from shoal.overlay import membership, register
from shoal.overlay.directory import REPLICAS, Directory
from shoal.planning.distance import point_of
from shoal.sim import SimPeer, VirtualReplica, World
from shoal.strategies.moshpit import Moshpit

COUNT, NEIGHBOURS = 30, 6


@pytest.fixture(autouse=True)
def few_links(monkeypatch):
    monkeypatch.setattr(membership, "NEIGHBOURS", NEIGHBOURS)
    monkeypatch.setattr(membership, "OWN_DIALS", NEIGHBOURS // 2)
    monkeypatch.setattr(register, "NEIGHBOURS", NEIGHBOURS)


async def swarm(world: World, strategy: Moshpit) -> list[SimPeer]:
    def replica(value: float) -> VirtualReplica:
        return VirtualReplica(torch.full((60,), value), drift=0.0, step_seconds=0.5)

    first = await world.start("p0", strategy=strategy, replica=replica(1.0))
    await first.attached.wait()
    rest = await asyncio.gather(
        *(world.start(f"p{i}", peers=[first.address], replica=replica(0.0)) for i in range(1, COUNT))
    )
    for peer in rest:
        await peer.attached.wait()
    return [first, *rest]


def test_everybody_is_in_each_averaging_though_nobody_has_links_to_all() -> None:
    async def scenario(world: World) -> None:
        peers = await swarm(world, Moshpit(group_size=4, every_seconds=5.0))
        await asyncio.sleep(22)
        links = [len(peer.peer.members.members) for peer in peers]
        assert sum(links) / COUNT < 0.75 * (COUNT - 1)
        assert min(links) >= NEIGHBOURS // 2
        for peer in peers:
            assert len(peer.peer.register.everybody()) == COUNT
            last = peer.peer.history.applied[-1]
            assert (len(last.members), last.exact, last.rounds_done) == (COUNT, True, last.rounds_planned)
        assert len({peer.peer.history.applied[-1].number for peer in peers}) == 1

    World(seed=1).run(scenario)


def test_who_left_or_died_is_listed_no_more_and_averagings_go_on() -> None:
    async def scenario(world: World) -> None:
        peers = await swarm(world, Moshpit(group_size=4, every_seconds=5.0))
        await asyncio.sleep(12)
        gone = [peers.pop(), peers.pop(0)]  # the entry peer is one of them
        await gone[0].leave()
        await gone[1].crash()
        await asyncio.sleep(45)
        for peer in peers:
            assert not {left.id for left in gone} & peer.peer.register.everybody().keys()
            last = peer.peer.history.applied[-1]
            assert (len(last.members), last.exact) == (COUNT - 2, True)

    World(seed=6).run(scenario)


def test_a_large_page_is_read_rarely_and_a_newcomer_is_soon_in_the_averagings(monkeypatch) -> None:
    """Three visits in the first 20 s read it; then each sixth does, every minute. Rolls tell who is there."""
    monkeypatch.setattr(register, "LARGE_PAGE", 4)
    reads: Counter[str] = Counter()
    get = Directory.get

    async def counted(self: Directory, *keys: str, one_by_one: bool = False):
        reads[self.host.peer_id] += 1
        return await get(self, *keys, one_by_one=one_by_one)

    monkeypatch.setattr(Directory, "get", counted)

    async def scenario(world: World) -> None:
        peers = await swarm(world, Moshpit(group_size=4, every_seconds=5.0))
        await asyncio.sleep(70)
        assert all(3 <= reads[peer.id] <= 6 for peer in peers)
        values = VirtualReplica(torch.zeros(60), drift=0.0, step_seconds=0.5)
        newcomer = await world.start("late", peers=[peers[3].address], replica=values)
        await newcomer.attached.wait()
        before = peers[0].peer.history.applied[-1].number
        await asyncio.sleep(11)
        for peer in (*peers, newcomer):
            last = peer.peer.history.applied[-1]
            assert (len(last.members), last.exact) == (COUNT + 1, True)
            assert last.number <= before + 3, "nobody had to call for an averaging of its own"
            assert newcomer.id in peer.peer.register.everybody()
        first = newcomer.peer.history.applied[0]
        assert (first.number, len(first.members)) == (before + 1, COUNT + 1)

    World(seed=3).run(scenario)


def test_links_that_nobody_needs_are_given_up_and_their_peers_stay_known() -> None:
    async def scenario(world: World) -> None:
        peers = await swarm(world, Moshpit(group_size=4, every_seconds=3600.0))
        entry = peers[0].peer
        assert len(entry.members.members) == COUNT - 1
        page = point_of(f"members of {entry.members.charter.charter_id}")
        keepers = sorted(peers, key=lambda peer: point_of(peer.id) ^ page)[:REPLICAS]
        assert peers[0] not in keepers, "whoever keeps the page is asked for it by all"
        await asyncio.sleep(60)
        assert len(entry.members.members) < COUNT - 1 - NEIGHBOURS
        assert len(entry.register.everybody()) == COUNT
        assert not entry.log.counts["left"]
        assert not entry.log.counts["lost"]

    World(seed=6).run(scenario)
