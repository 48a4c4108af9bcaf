"""The directory over every transport: links on demand, stored, found, and found again after a death."""

from __future__ import annotations

import asyncio

from worlds import Trial, World, within

from shoal.overlay.directory import CACHE_SECONDS, REPLICAS, Directory
from shoal.planning.distance import point_of


async def entered(trials: list[Trial]) -> list[Directory]:
    """A directory at each; they know of the first one and find each other."""
    nodes = [Directory(trial.host) for trial in trials]
    places = [str(endpoint) for endpoint in trials[0].host.endpoints]
    for node in nodes[1:]:
        node.meet(trials[0].id, places)
        await node.bootstrap()
    return nodes


async def test_what_is_stored_is_found_at_the_right_peers(world: World) -> None:
    async with within(30), world.hosts(8, linked=False) as trials:
        nodes = await entered(trials)
        for number, node in enumerate(nodes):
            assert await node.store("members", b"%d" % number, 60) == REPLICAS
            assert await node.store(f"own {number}", b"own %d" % number, 60) == REPLICAS
        expected = {trial.id: b"%d" % number for number, trial in enumerate(trials)}
        for node in nodes:
            found = await node.get("members", "own 3", "nothing")
            assert {who: entry.value for who, entry in found["members"].items()} == expected
            assert {who: entry.value for who, entry in found["own 3"].items()} == {trials[3].id: b"own 3"}
            assert found["nothing"] == {}
        nearest = sorted(nodes, key=lambda node: point_of(node.host.peer_id) ^ point_of("members"))
        assert [len(node.shelf.under(point_of("members"))) for node in nearest] == [8] * REPLICAS + [0] * 3
        assert not any(trial.host.faults for trial in trials)


async def test_it_is_found_after_deaths(world: World) -> None:
    async with within(30), world.hosts(8, linked=False) as trials:
        nodes = await entered(trials)
        await nodes[1].store("key", b"value", 60)
        by_distance = sorted(range(8), key=lambda number: point_of(trials[number].id) ^ point_of("key"))
        for number in by_distance[:3]:
            world.kill(trials[number].transport)
        await asyncio.sleep(0.1)
        reader = nodes[by_distance[-1]]
        found = await reader.get("key")
        assert {who: entry.value for who, entry in found["key"].items()} == {trials[1].id: b"value"}
        await asyncio.sleep(CACHE_SECONDS)
        assert await reader.store("key", b"mine", 60) == REPLICAS, "five of the eight are left"
        assert set((await reader.get("key"))["key"]) == {trials[1].id, reader.host.peer_id}


async def test_the_largest_value_travels(world: World) -> None:
    async with within(30), world.hosts(3, linked=False) as trials:
        nodes = await entered(trials)
        value = bytes(range(256)) * 16
        assert await nodes[1].store("ü" * 200, value, 3600) == 3
        assert (await nodes[2].get("ü" * 200))["ü" * 200][trials[1].id].value == value
