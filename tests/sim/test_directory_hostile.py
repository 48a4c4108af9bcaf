"""The directory among nodes that lie, forge, replay and flood: nothing that they do changes what others said."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec
import pytest
from nodes import Node, Swarm, run

from shoal.core.errors import RemoteError
from shoal.net.envelope import Message
from shoal.net.identity import Identity
from shoal.overlay import directory as directory_under_test
from shoal.overlay import records as records_under_test
from shoal.overlay.directory import (
    LOOKUP_SECONDS,
    MAX_ANSWER_BYTES,
    MAX_RECORDS_PER_ANSWER,
    POINT_BYTES,
    REPLICAS,
    Find,
    Found,
    Store,
    Stored,
)
from shoal.overlay.records import MAX_KEYS_PER_OWNER, Record, sign
from shoal.overlay.routing import Contact
from shoal.planning.distance import point_of

altered = msgspec.structs.replace


def now() -> float:
    return asyncio.get_running_loop().time()


def held(node: Node, key: str) -> dict[str, bytes]:
    return {record.owner: record.value for record in node.directory.shelf.under(point_of(key))}


async def give(giver: Node, taker: Node, *records: Record) -> list[bool]:
    """Store directly at one node."""
    if not giver.host.linked(taker.id):
        await giver.host.link(taker.host.endpoints, taker.id)
    return (await giver.host.call(taker.id, Store(list(records)), Stored, timeout_seconds=2)).kept


def lie(node: Node, twist: Callable[[Find, Found], Found]) -> None:
    """From now on its answers are twisted."""

    async def find(peer_id: str, call: Find) -> Message:
        answer = await node.directory._find(peer_id, call)
        assert isinstance(answer, Found)
        return twist(call, answer)

    node.host.serve(Find, find)


# -- what is stored


def test_an_honest_record_is_taken_from_whoever_brings_it() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, bringer, taker = swarm.nodes
        assert await give(bringer, taker, owner.record("key", b"value")) == [True]
        assert held(taker, "key") == {owner.id: b"value"}

    run(scenario, 3)


@pytest.mark.parametrize(
    "change",
    [{"value": b"other"}, {"key": "other"}, {"sequence": 2}, {"expires_at": 1_750_000_059.0}, {"signature": b"s" * 64}],
    ids=lambda change: next(iter(change)),
)
def test_whatever_is_altered_the_signature_no_longer_fits(change: dict[str, object]) -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, forger, taker = swarm.nodes
        honest = owner.record("key", b"value")
        with pytest.raises(RemoteError):  # its connection is closed
            await give(forger, taker, altered(honest, **change))
        assert held(taker, "key") == held(taker, "other") == {}
        assert taker.host.log.counts["refused"] == 1

    run(scenario, 3)


def test_nobody_signs_for_another() -> None:
    async def scenario(swarm: Swarm) -> None:
        victim, forger, taker = swarm.nodes
        await give(victim, taker, victim.record("key", b"mine"))
        forged = altered(forger.record("key", b"forged", sequence=9), public_key=victim.host.identity.public_key)
        with pytest.raises(RemoteError):
            await give(forger, taker, forged)
        assert await give(forger, taker, forger.record("key", b"forger", sequence=9)) == [True]
        assert held(taker, "key") == {victim.id: b"mine", forger.id: b"forger"}

    run(scenario, 3)


def test_a_signature_for_another_purpose_is_none_here() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, taker = swarm.nodes
        record = owner.record("key", b"value")
        content = msgspec.msgpack.encode([record.key, record.public_key, b"value", 1, record.expires_at])
        with pytest.raises(RemoteError):
            await give(owner, taker, altered(record, signature=owner.host.identity.sign(content)))

    run(scenario, 2)


@pytest.mark.parametrize(
    "change",
    [{"key": "k" * 201}, {"key": ""}, {"value": b"v" * 4097}, {"sequence": -1}, {"public_key": b"p" * 33}],
    ids=["long key", "no key", "large value", "negative sequence", "long public key"],
)
def test_what_is_too_large_closes_the_connection(change: dict[str, object]) -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, taker = swarm.nodes
        fields = {"key": "key", "value": b"", "sequence": 1, "public_key": owner.host.identity.public_key} | change
        until = owner.host.clock.wall() + 9
        signed = sign(owner.host.identity, fields["key"], fields["value"], fields["sequence"], until)
        with pytest.raises(RemoteError):
            await give(owner, taker, altered(signed, public_key=fields["public_key"]))
        assert len(taker.directory.shelf) == 0

    run(scenario, 2)


@pytest.mark.parametrize("ttl_seconds", [0.0, -1.0, 3661.0, 1e9, math.inf, math.nan])
def test_what_is_expired_or_dated_far_ahead_is_not_kept(ttl_seconds: float) -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, taker = swarm.nodes
        assert await give(owner, taker, owner.record("key", b"value", ttl_seconds=ttl_seconds)) == [False]
        assert await give(owner, taker, owner.record("key", b"value", ttl_seconds=3659.0)) == [True]

    run(scenario, 2)


def test_an_old_record_does_not_come_back() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, replayer, taker = swarm.nodes
        first = owner.record("key", b"first", sequence=1, ttl_seconds=600)
        second = owner.record("key", b"second", sequence=2, ttl_seconds=10)
        assert await give(owner, taker, first) == [True]
        assert await give(owner, taker, second) == [True]
        assert await give(replayer, taker, first, second) == [False, True]
        assert held(taker, "key") == {owner.id: b"second"}
        await asyncio.sleep(20)
        assert held(taker, "key") == {}
        assert await give(replayer, taker, first, second) == [False, False], "the newer has expired, it still counts"
        assert held(taker, "key") == {}
        assert await give(owner, taker, owner.record("key", b"third", sequence=3)) == [True]
        assert held(taker, "key") == {owner.id: b"third"}

    run(scenario, 3)


def test_of_two_with_one_sequence_the_first_stays() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, taker = swarm.nodes
        assert await give(owner, taker, owner.record("key", b"one"), owner.record("key", b"two")) == [True, False]
        assert held(taker, "key") == {owner.id: b"one"}

    run(scenario, 2)


def test_an_owner_has_so_many_keys_at_a_node_and_no_more() -> None:
    async def scenario(swarm: Swarm) -> None:
        flooder, honest, taker = swarm.nodes
        records = [flooder.record(f"key {number}", b"flood", ttl_seconds=5) for number in range(60)]
        assert await give(flooder, taker, *records) == [True] * MAX_KEYS_PER_OWNER + [False] * 28
        assert await give(flooder, taker, flooder.record("key 0", b"newer", sequence=2, ttl_seconds=5)) == [True]
        assert await give(honest, taker, honest.record("key 50", b"honest")) == [True]
        assert held(taker, "key 50") == {honest.id: b"honest"}
        assert len(taker.directory.shelf) == MAX_KEYS_PER_OWNER + 1
        await asyncio.sleep(11)
        fresh = [flooder.record(f"key {number}", b"again") for number in range(40, 60)]
        assert await give(flooder, taker, *fresh) == [True] * 20

    run(scenario, 3)


@pytest.mark.parametrize(("limit", "value"), [("MAX_RECORDS", 10), ("MAX_BYTES", 1600)])
def test_a_full_node_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        monkeypatch.setattr(records_under_test, limit, value)
        early, late, taker = swarm.nodes
        records = [early.record(f"key {number}", b"") for number in range(20)]
        assert await give(early, taker, *records) == [True] * 10 + [False] * 10
        assert await give(late, taker, late.record("key 0", b"")) == [False]
        assert await give(early, taker, early.record("key 3", b"", sequence=2)) == [True]
        assert [sorted(held(taker, f"key {number}")) for number in range(10)] == [[early.id]] * 10

    run(scenario, 3)


# -- what is told


def test_an_answer_is_bounded_and_holds_the_newest() -> None:
    async def scenario(swarm: Swarm) -> None:
        asker, holder = swarm.nodes

        async def ask(*keys: str) -> Found:
            points = [point_of(key).to_bytes(POINT_BYTES) for key in keys]
            return await asker.host.call(holder.id, Find(points, True, ()), Found, timeout_seconds=30)

        for number in range(1200):
            owner = Identity(number.to_bytes(32, "big"))
            wall = asker.host.clock.wall()
            holder.directory.shelf.put(point_of("small"), sign(owner, "small", b"s", number + 1, wall + 60))
            if number < 400:
                for key in ("large", "larger"):
                    holder.directory.shelf.put(point_of(key), sign(owner, key, b"l" * 4096, number + 1, wall + 60))
        small = (await ask("small")).records
        assert [record.sequence for record in small] == list(range(1200, 200, -1))
        assert len(small) == MAX_RECORDS_PER_ANSWER
        large = await ask("large", "larger")
        sequences = [[r.sequence for r in large.records if r.key == key] for key in ("large", "larger")]
        assert min(map(len, sequences)) > 110, "each key has its share"
        assert all(sequence == list(range(400, 400 - len(sequence), -1)) for sequence in sequences)
        assert 0.95 * MAX_ANSWER_BYTES < len(msgspec.msgpack.encode(large)) < 1.05 * MAX_ANSWER_BYTES
        found = (await asker.directory.get("small"))["small"]
        assert len(found) == MAX_RECORDS_PER_ANSWER
        assert asker.host.linked(holder.id)

    run(scenario, 2)


def _altering(call: Find, answer: Found) -> Found:
    return altered(answer, records=[altered(r, value=b"lie", sequence=r.sequence + 1) for r in answer.records])


def _withholding(call: Find, answer: Found) -> Found:
    return altered(answer, records=[], contacts=[])


def test_the_truth_comes_from_whoever_tells_it() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, other = swarm.nodes[0], swarm.nodes[1]
        await owner.directory.store("key", b"old", 600)
        liars = [node for node in swarm.nearest("key", REPLICAS) if node not in (owner, other)][:3]
        past = [record for record in liars[0].directory.shelf.under(point_of("key")) if record.owner == owner.id]
        await owner.directory.store("key", b"true", 600)
        await other.directory.store("key", b"also true", 600)
        lie(liars[0], _altering)
        lie(liars[1], lambda call, answer: altered(answer, records=past if call.wants_records else []))
        lie(liars[2], _withholding)
        truth = {owner.id: b"true", other.id: b"also true"}
        for reader in swarm.nodes:
            if reader not in liars:
                found = (await reader.directory.get("key"))["key"]
                assert {who: entry.value for who, entry in found.items()} == truth
                assert reader.directory.table.resting(Contact(liars[0].id, tuple(liars[0].places)))
                assert [event.peer_id for event in reader.host.log.recent if event.kind == "refused"] == [liars[0].id]

    run(scenario, 12)


def test_an_answer_to_another_question_is_a_lie() -> None:
    async def scenario(swarm: Swarm) -> None:
        reader, liar = swarm.nodes
        lie(liar, lambda call, answer: altered(answer, records=[liar.record("another key", b"value")]))
        assert await reader.directory.get("key") == {"key": {}}
        assert reader.host.log.counts["refused"] == 1

    run(scenario, 2)


def test_expired_records_in_an_answer_are_passed_over() -> None:
    async def scenario(swarm: Swarm) -> None:
        reader, liar = swarm.nodes
        dates = [-1.0, 1e6, math.nan]
        stale = [liar.record("key", b"stale", ttl_seconds=seconds, sequence=9) for seconds in dates]
        fresh = liar.record("key", b"fresh", sequence=3)
        lie(liar, lambda call, answer: altered(answer, records=[*stale, fresh]))
        found = await reader.directory.get("key")
        assert found["key"][liar.id].value == b"fresh"

    run(scenario, 2)


def test_a_liar_about_endpoints_silences_nobody() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, liar, honest = swarm.nodes[0], swarm.nodes[1], swarm.nodes[2]
        await owner.directory.store("key", b"true", 600)

        def elsewhere(call: Find, answer: Found) -> Found:
            return altered(answer, contacts=[Contact(c.peer_id, ("nowhere:1",)) for c in answer.contacts])

        lie(liar, elsewhere)
        fresh = await swarm.add()
        fresh.directory.meet(liar.id, liar.places)
        await fresh.directory.get("another key")  # it is told false endpoints of everybody
        fresh.directory.meet(honest.id, honest.places)
        found = await fresh.directory.get("key")
        assert found["key"][owner.id].value == b"true"
        assert await fresh.directory.store("key", b"mine", 60) == REPLICAS
        told = {contact.peer_id: contact.places for contact in fresh.directory.table}
        assert told == {node.id: tuple(node.places) for node in swarm.nodes if node.id in told}
        assert len(told) >= REPLICAS

    run(scenario, 10)


def test_invented_contacts_cost_time_within_the_deadline_and_enter_no_table() -> None:
    async def scenario(swarm: Swarm) -> None:
        owner, reader, liar = swarm.nodes[0], swarm.nodes[3], swarm.nodes[5]
        await owner.directory.store("key", b"true", 600)
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        ghosts = [Contact(one + other + "a" * 30, (f"ghost-{one}{other}:1",)) for one in alphabet for other in alphabet]
        ghosts = sorted(ghosts, key=lambda contact: point_of(contact.peer_id) ^ point_of("key"))[:20]
        lie(liar, lambda call, answer: altered(answer, contacts=ghosts * 3))
        dial = reader.transport.dial

        async def black_hole(endpoint):
            if endpoint.host.startswith("ghost"):
                await asyncio.sleep(1e3)
            return await dial(endpoint)

        reader.transport.dial = black_hole
        begun = now()
        found = await reader.directory.get("key")
        assert found["key"][owner.id].value == b"true"
        assert now() - begun <= LOOKUP_SECONDS
        names = {node.id for node in swarm.nodes}
        assert all(contact.peer_id in names for node in swarm.nodes for contact in node.directory.table)
        begun = now()
        assert await reader.directory.store("key", b"mine", 60) == REPLICAS
        assert now() - begun < 1.0, "they rest"

    run(scenario, 12)


def test_an_oversized_answer_closes_the_connection_and_nothing_else() -> None:
    async def scenario(swarm: Swarm) -> None:
        reader, liar = swarm.nodes[0], swarm.nodes[1]
        await swarm.nodes[2].directory.store("key", b"true", 60)
        many = [Contact("a" * 32, ("host:1",))] * 641
        lie(liar, lambda call, answer: altered(answer, contacts=many))
        found = await reader.directory.get("key")
        assert found["key"][swarm.nodes[2].id].value == b"true"
        assert reader.host.log.counts["refused"] == 1
        assert reader.host.linked(swarm.nodes[2].id)

    run(scenario, 4)


def test_a_node_that_keeps_nothing_is_not_counted() -> None:
    async def scenario(swarm: Swarm) -> None:
        async def refuse(peer_id: str, call: Store) -> Message:
            return Stored([False])

        async def boast(peer_id: str, call: Store) -> Message:
            return Stored([True] * 9)

        swarm.nodes[1].host.serve(Store, refuse)
        swarm.nodes[2].host.serve(Store, boast)
        assert await swarm.nodes[0].directory.store("key", b"value", 60) == 2

    run(scenario, 4)


def test_a_look_up_ends_at_its_deadline_with_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(swarm: Swarm) -> None:
        monkeypatch.setattr(directory_under_test, "LOOKUP_SECONDS", 1.0)
        owner, reader, silent = swarm.nodes
        await owner.directory.store("key", b"true", 60)

        async def never(peer_id: str, call: Find) -> Message:
            await asyncio.sleep(1e3)
            raise AssertionError

        silent.host.serve(Find, never)
        begun = now()
        found = await reader.directory.get("key")
        assert now() - begun == pytest.approx(1.0)
        assert found["key"][owner.id].value == b"true"
        assert reader.host.log.counts["late"] == 1

    run(scenario, 3)
