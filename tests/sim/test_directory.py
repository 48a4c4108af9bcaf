"""The directory among nodes that work: what is stored is found, at the right peers, with few calls."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from nodes import Node, Swarm, run

from shoal.core.address import Endpoint
from shoal.core.errors import OptionError
from shoal.overlay.directory import CACHE_SECONDS, MAX_CALLS, POINT_BYTES, REPLICAS, Directory, Find, Found
from shoal.overlay.lookup import MAX_POINTS_PER_CALL
from shoal.overlay.routing import BUCKET_SIZE
from shoal.planning.distance import point_of

HERE = Path(__file__).parent


def now() -> float:
    return asyncio.get_running_loop().time()


def values(entries: dict) -> dict[str, bytes]:
    return {owner: entry.value for owner, entry in entries.items()}


def holders(swarm: Swarm, key: str) -> list[str]:
    return [node.id for node in swarm.nodes if node.directory.shelf.under(point_of(key))]


@pytest.mark.timeout(400)  # 200 nodes: half a minute on a free machine
@pytest.mark.parametrize("count", [1, 2, 8, 40, pytest.param(200, marks=pytest.mark.acceptance)])
def test_what_is_stored_lies_at_the_nearest_and_is_found_with_few_calls(count: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        most = REPLICAS + math.ceil(math.log2(count))
        for number in range(20 if count < 200 else 8):
            key = f"key {number}"
            owner, reader = swarm.nodes[number % count], swarm.nodes[(7 * number + 3) % count]
            owner.calls.clear()
            assert await owner.directory.store(key, b"value %d" % number, 60) == min(count, REPLICAS)
            assert sorted(holders(swarm, key)) == sorted(node.id for node in swarm.nearest(key, REPLICAS))
            finds = [who for kind, who in owner.calls if kind == "Find"]
            assert len(finds) <= most
            reader.calls.clear()
            begun = now()
            found = await reader.directory.get(key)
            assert values(found[key]) == {owner.id: b"value %d" % number}
            assert len(reader.calls) <= most
            if count <= BUCKET_SIZE:
                assert now() - begun < 0.03, "one round trip of 0.02 s"

    run(scenario, count)


def test_what_is_stored_again_and_again_is_looked_up_twice_and_then_each_25_s() -> None:
    """And at once where one of those who keep it is gone."""

    async def scenario(swarm: Swarm) -> None:
        owner = swarm.nodes[0]

        async def look_ups(times: int) -> list[bool]:
            found = []
            for _ in range(times):
                owner.calls.clear()
                await owner.directory.store("key", b"value", 30)
                found.append(any(kind == "Find" for kind, _ in owner.calls))
                await asyncio.sleep(10)
            return found

        assert await look_ups(6) == [True, True, False, False, True, False]
        keepers = swarm.nearest("key", REPLICAS)
        next(node for node in keepers if node is not owner).crash()
        assert await look_ups(4) == [False, True, True, False]
        assert await owner.directory.store("key", b"value", 30) == REPLICAS

    run(scenario, 12)


def test_each_owner_has_its_own_entry_under_a_key() -> None:
    async def scenario(swarm: Swarm) -> None:
        wall = swarm.nodes[0].host.clock.wall
        for node in swarm.nodes:
            await node.directory.store("members", node.id.encode(), 30)
        first = (await swarm.nodes[3].directory.get("members"))["members"]
        assert values(first) == {node.id: node.id.encode() for node in swarm.nodes}
        assert all(29 < entry.expires_at - wall() <= 30 for entry in first.values())
        await swarm.nodes[5].directory.store("members", b"changed", 30)
        second = (await swarm.nodes[8].directory.get("members"))["members"]
        assert second[swarm.nodes[5].id].value == b"changed"
        assert second[swarm.nodes[5].id].sequence > first[swarm.nodes[5].id].sequence
        assert len(second) == len(swarm.nodes)

    run(scenario, 12)


def test_replicas_that_are_asked_one_by_one_give_what_those_before_did_not_have() -> None:
    async def scenario(swarm: Swarm) -> None:
        for node in swarm.nodes:
            await node.directory.store("members", bytes(1000), 60)
        keepers = swarm.nearest("members", REPLICAS)
        keepers[0].directory.shelf._held[point_of("members")].pop(swarm.nodes[5].id)  # not all have the same
        reader = next(node for node in swarm.nodes if node not in keepers)
        received = []
        for one_by_one in (False, True):
            before = reader.host.received.total_bytes
            found = await reader.directory.get("members", one_by_one=one_by_one)
            assert found["members"].keys() == {node.id for node in swarm.nodes}
            received.append(reader.host.received.total_bytes - before)
            await asyncio.sleep(CACHE_SECONDS)
        page_bytes = 20 * 1000
        assert received[0] > REPLICAS * page_bytes
        assert page_bytes < received[1] < 2 * page_bytes

    run(scenario, 20)


def test_many_keys_are_looked_up_at_once() -> None:
    async def scenario(swarm: Swarm) -> None:
        keys = [f"key {number}" for number in range(100)]
        for number, key in enumerate(keys):
            await swarm.nodes[number % 40].directory.store(key, key.encode(), 60)
        reader = swarm.nodes[17]
        reader.calls.clear()
        found = await reader.directory.get(*keys, "nothing here")
        assert list(found) == [*keys, "nothing here"]
        assert found["nothing here"] == {}
        for number, key in enumerate(keys):
            assert values(found[key]) == {swarm.nodes[number % 40].id: key.encode()}
        assert len(reader.calls) <= 3 * 40, "one by one it would be 500"

    run(scenario, 40)


def test_a_call_never_carries_more_points_than_its_limit() -> None:
    async def scenario(swarm: Swarm) -> None:
        asked: list[int] = []

        async def counting(peer_id: str, call: Find) -> object:
            asked.append(len(call.points))
            return await swarm.nodes[1].directory._find(peer_id, call)

        swarm.nodes[1].host.serve(Find, counting)
        await swarm.nodes[0].directory.get(*[f"key {number}" for number in range(MAX_POINTS_PER_CALL * 2 + 1)])
        assert asked == [MAX_POINTS_PER_CALL, MAX_POINTS_PER_CALL, 1]

    run(scenario, 2)


def test_what_was_found_is_kept_for_a_moment_and_never_hides_the_own_word() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, reader = swarm.nodes[0], swarm.nodes[1]
        await owner.directory.store("key", b"one", 60)
        found = await reader.directory.get("key")
        found["key"].clear()  # the caller's own copy
        await owner.directory.store("key", b"two", 60)
        reader.calls.clear()
        assert values((await reader.directory.get("key"))["key"]) == {owner.id: b"one"}
        assert reader.calls == []
        await reader.directory.store("key", b"mine", 60)
        assert values((await reader.directory.get("key"))["key"]) == {owner.id: b"two", reader.id: b"mine"}
        await owner.directory.store("key", b"three", 60)
        await asyncio.sleep(CACHE_SECONDS)
        assert (await reader.directory.get("key"))["key"][owner.id].value == b"three"

    run(scenario, 8)


def test_what_is_not_there_yet_is_asked_for_again() -> None:
    async def scenario(swarm: Swarm) -> None:
        assert await swarm.nodes[1].directory.get("key") == {"key": {}}
        await swarm.nodes[0].directory.store("key", b"now", 60)
        assert values((await swarm.nodes[1].directory.get("key"))["key"]) == {swarm.nodes[0].id: b"now"}

    run(scenario, 8)


def test_a_kept_entry_expires_too() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.nodes[0].directory.store("key", b"short", 0.5)
        assert (await swarm.nodes[1].directory.get("key"))["key"]
        await asyncio.sleep(0.5)
        assert await swarm.nodes[1].directory.get("key") == {"key": {}}

    run(scenario, 4)


def test_an_expired_record_is_not_found_and_is_forgotten() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.nodes[0].directory.store("key", b"value", 5)
        await asyncio.sleep(4.8)
        assert (await swarm.nodes[1].directory.get("key"))["key"]
        await asyncio.sleep(1.2)
        assert await swarm.nodes[1].directory.get("key") == {"key": {}}
        await asyncio.sleep(5.0)
        await swarm.nodes[1].directory.get("key")
        assert [len(node.directory.shelf) for node in swarm.nodes] == [0] * 4

    run(scenario, 4)


def test_a_restarted_peer_is_newer_than_it_was() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner = swarm.nodes[2]
        for number in range(5):
            await owner.directory.store("key", b"before %d" % number, 600)
        await asyncio.sleep(1.0)
        owner.directory = Directory(owner.host)
        owner.directory.meet(swarm.nodes[0].id, swarm.nodes[0].places)
        await owner.directory.store("key", b"after", 60)
        assert values((await swarm.nodes[4].directory.get("key"))["key"]) == {owner.id: b"after"}

    run(scenario, 8)


def test_records_are_passed_on_to_a_newcomer_that_is_nearer() -> None:
    async def scenario(swarm: Swarm) -> None:
        keys = [f"key {number}" for number in range(30)]
        for number, key in enumerate(keys):
            await swarm.nodes[number % 8].directory.store(key, key.encode(), 600)
        await swarm.grow(4)
        await asyncio.sleep(2.0)
        taken = 0
        for number, key in enumerate(keys):
            for node in swarm.nearest(key, REPLICAS):
                held = node.directory.shelf.under(point_of(key))
                assert [(r.owner, r.value) for r in held] == [(swarm.nodes[number % 8].id, key.encode())]
                taken += node in swarm.nodes[8:]
        assert taken > 20, "a third of the nodes are new"

    run(scenario, 8)


def test_only_those_further_away_than_the_newcomer_pass_a_record_on() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.nodes[0].directory.store("key", b"value", 600)
        senders = 0
        for _ in range(8):
            holding = holders(swarm, "key")
            for node in swarm.nodes:
                node.calls.clear()
            await swarm.grow(1)
            await asyncio.sleep(1.0)
            fresh = swarm.nodes[-1]
            rank = [node.id for node in swarm.nearest("key", len(swarm.nodes))].index
            further = [who for who in holding if rank(who) > rank(fresh.id)] if rank(fresh.id) < REPLICAS else []
            sent = [node.id for node in swarm.nodes if ("Store", fresh.id) in node.calls]
            assert sent == further
            senders += len(sent)
        assert senders > 5

    run(scenario, 8)


def test_who_does_not_answer_is_not_named_to_others() -> None:
    async def scenario(swarm: Swarm) -> None:
        asker, teller, dead = swarm.nodes

        async def named() -> list[str]:
            request = Find([point_of("key").to_bytes(POINT_BYTES)], False, ())
            answer = await asker.host.call(teller.id, request, Found, timeout_seconds=2)
            return [contact.peer_id for contact in answer.contacts]

        assert await named() == [dead.id]
        dead.crash()
        await asyncio.sleep(0.1)
        await teller.directory.get("key")
        await asyncio.sleep(6.0)  # its rest is over
        assert await named() == []

    run(scenario, 3)


def test_a_newcomer_knows_peers_at_every_distance() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.grow(1)
        fresh = swarm.nodes[-1]

        def distance(peer_id: str) -> int:
            return (point_of(peer_id) ^ point_of(fresh.id)).bit_length()

        there = Counter(distance(node.id) for node in swarm.nodes if node is not fresh)
        known = Counter(distance(contact.peer_id) for contact in fresh.directory.table)
        assert len(there) >= 4
        assert {bits: known[bits] for bits in there if known[bits] < min(there[bits], REPLICAS)} == {}

    run(scenario, 60)


def test_clocks_that_differ_by_seconds_do_no_harm() -> None:
    async def scenario(swarm: Swarm) -> None:
        skewed = [await swarm.add(skew_seconds=seconds) for seconds in (-3, 3, -3, 3, 2, -1)]
        for node in skewed:
            await swarm.enter(node)
        for turn in (b"one", b"two"):
            for node in skewed:
                assert await node.directory.store("key", turn + node.id.encode(), 3600) == REPLICAS
        await asyncio.sleep(CACHE_SECONDS)
        for node in swarm.nodes:
            found = (await node.directory.get("key"))["key"]
            assert values(found) == {owner.id: b"two" + owner.id.encode() for owner in skewed}

    run(scenario, 3)


@pytest.mark.parametrize("silent", [False, True], ids=["their connections break", "they fall silent"])
def test_records_are_found_when_a_third_of_the_nodes_is_gone(silent: bool) -> None:
    async def scenario(swarm: Swarm) -> None:
        keys = [f"key {number}" for number in range(24)]
        for number, key in enumerate(keys):
            await swarm.nodes[number].directory.store(key, key.encode(), 600)
        gone = random.Random(3).sample(swarm.nodes, 12)
        for node in gone:
            fall_silent(node) if silent else node.crash()
        await asyncio.sleep(0.1)
        living = [node for node in swarm.nodes if node not in gone]
        lost = [key for key in keys if all(node in gone for node in swarm.nearest(key, REPLICAS))]
        assert len(lost) <= 1, "by chance one in 400"
        for number, key in enumerate(keys):
            begun = now()
            found = (await living[number % 28].directory.get(key))[key]
            assert values(found) == ({} if key in lost else {swarm.nodes[number].id: key.encode()})
            assert now() - begun < 3.0, "little more than one silence of 2 s"
        owner = living[0]
        assert await owner.directory.store("new", b"new", 600) == REPLICAS
        assert values((await living[1].directory.get("new"))["new"]) == {owner.id: b"new"}

    run(scenario, 40)


def fall_silent(node: Node) -> None:
    async def never(peer_id: str, call: object) -> object:
        await asyncio.sleep(1e3)
        raise AssertionError

    for kind in list(node.host.call_handlers):
        node.host.serve(node.host.call_handlers[kind][0], never)


def test_a_silent_peer_is_not_asked_again_for_a_while() -> None:
    async def scenario(swarm: Swarm) -> None:
        reader, silent, _ = swarm.nodes  # the third one goes on naming the silent one

        async def asked() -> bool:
            reader.calls.clear()
            assert await reader.directory.get("key") == {"key": {}}
            return ("Find", silent.id) in reader.calls

        fall_silent(silent)
        begun = now()
        assert await asked()
        assert now() - begun == pytest.approx(2.0)
        for _ in range(4):
            await asyncio.sleep(1.2)
            assert not await asked()
        await asyncio.sleep(0.3)
        assert await asked()

    run(scenario, 3)


def test_a_second_endpoint_gets_its_turn_behind_one_that_never_answers() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.nodes[0].directory.store("key", b"value", 60)
        fresh = await swarm.add()
        dial = fresh.transport.dial

        async def black_hole(endpoint: Endpoint) -> object:
            await asyncio.sleep(1e3 if endpoint.host == "unreachable" else 0.0)
            return await dial(endpoint)

        fresh.transport.dial = black_hole
        fresh.directory.meet(swarm.nodes[0].id, ["unreachable:1", *swarm.nodes[0].places])
        assert await fresh.directory.get("key") == {"key": {}}
        await asyncio.sleep(1.0)
        assert values((await fresh.directory.get("key"))["key"]) == {swarm.nodes[0].id: b"value"}

    run(scenario, 1)


def test_many_operations_at_once_stay_within_a_hosts_limits() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, other = swarm.nodes[0], swarm.nodes[1]
        running, most = 0, 0
        find = other.directory._find

        async def slow(peer_id: str, call: Find) -> object:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return await find(peer_id, call)

        other.host.serve(Find, slow)
        stored = await asyncio.gather(*[one.directory.store(f"key {n}", b"%d" % n, 60) for n in range(20)])
        assert stored == [5] * 20
        found = await asyncio.gather(*[one.directory.get(f"key {n}", f"none {n}") for n in range(200)])
        for number, result in enumerate(found[:20]):
            assert values(result[f"key {number}"]) == {one.id: b"%d" % number}
        assert 1 < most <= MAX_CALLS
        assert one.host.linked(other.id)
        assert not one.host.log.counts["late"]

    run(scenario, 6)


def test_only_one_link_is_made_to_a_peer() -> None:
    async def scenario(swarm: Swarm) -> None:
        fresh = await swarm.add()
        fresh.directory.meet(swarm.nodes[0].id, swarm.nodes[0].places)
        await asyncio.gather(*[fresh.directory.get(f"key {number}") for number in range(30)])
        await fresh.directory.bootstrap()
        assert [len(fresh.host.remotes[node.id].links) for node in swarm.nodes[:-1]] == [1] * 8

    run(scenario, 8)


def test_a_contact_that_makes_no_sense_is_ignored() -> None:
    async def scenario(swarm: Swarm) -> None:
        alone, other = swarm.nodes[0], await swarm.add()
        alone.directory.meet(other.id, ["no endpoint"])
        alone.directory.meet(other.id, [])
        alone.directory.meet(alone.id, alone.places)
        assert len(alone.directory.table) == 0
        alone.directory.meet(other.id, other.places * 50)
        assert [len(contact.places) for contact in alone.directory.table] == [16]
        alone.directory.forget(other.id)
        alone.directory.forget(other.id)
        assert len(alone.directory.table) == 0

    run(scenario, 1)


@pytest.mark.parametrize(
    ("key", "value", "ttl_seconds"),
    [("", b"", 1), ("k" * 201, b"", 1), ("\udc80", b"", 1), ("key", b"v" * 4097, 1), ("key", b"", 0)]
    + [("key", b"", seconds) for seconds in (-1, 3601, math.nan, math.inf)],
)
def test_a_mistake_of_the_caller_is_refused_at_once(key: str, value: bytes, ttl_seconds: float) -> None:
    async def scenario(swarm: Swarm) -> None:
        with pytest.raises(OptionError):
            await swarm.nodes[0].directory.store(key, value, ttl_seconds)

    run(scenario, 1)


def test_the_longest_key_and_the_largest_value_fit() -> None:
    async def scenario(swarm: Swarm) -> None:
        key, value = "ü" * 200, os.urandom(4096)
        assert await swarm.nodes[0].directory.store(key, value, 3600) == REPLICAS
        assert values((await swarm.nodes[5].directory.get(key))[key]) == {swarm.nodes[0].id: value}

    run(scenario, 8)


async def _churn(swarm: Swarm) -> str:
    """Much at once, with deaths: any order that depends on chance would show."""
    choose = random.Random(9)
    for turn in range(3):
        work = [node.directory.store(f"key {choose.randrange(9)}", b"%d" % turn, 60) for node in swarm.nodes]
        await asyncio.gather(*work)
        swarm.nodes.pop(choose.randrange(len(swarm.nodes))).crash()
        await asyncio.sleep(0.3)
    found = await asyncio.gather(*[node.directory.get(*[f"key {n}" for n in range(9)]) for node in swarm.nodes])
    return f"{swarm.digest()} {found}"


def test_one_seed_is_one_run() -> None:
    assert run(_churn, 12, seed=4) != run(_churn, 12, seed=5)
    code = (
        "import hashlib, nodes, test_directory as t; print(hashlib.md5(nodes.run(t._churn, 12, 4).encode()).digest())"
    )
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True, timeout=120,
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        ).stdout
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_what_is_found_was_said_and_is_the_newest(seed: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        choose, said, last = random.Random(seed), {}, {}
        crashes = 0
        for turn in range(80):
            node, key = choose.choice(swarm.nodes[1:]), f"key {choose.randrange(5)}"
            move = choose.choice(["store", "store", "get", "get", "get", "crash", "join"])
            if move == "store":
                value = b"%d" % turn
                assert 3 <= await node.directory.store(key, value, 3600) <= REPLICAS
                said.setdefault((key, node.id), []).append(value)
                last[key, node.id] = value, crashes
            elif move == "get":
                await asyncio.sleep(CACHE_SECONDS)
                found = values((await node.directory.get(key))[key])
                assert all(value in said[key, owner] for owner, value in found.items())
                for (stored_key, owner), (value, before) in last.items():
                    if stored_key == key and crashes - before < 3:
                        assert found[owner] == value
            elif move == "crash" and len(swarm.nodes) > 10:
                swarm.nodes.remove(node)
                node.crash()
                crashes += 1
            elif move == "join":
                await swarm.grow(1)
            await asyncio.sleep(choose.uniform(0, 1))

    run(scenario, 14, seed)
