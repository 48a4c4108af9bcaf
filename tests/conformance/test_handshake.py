"""The handshake over every transport: who gets in, and that a refusal shows one reason at both ends, at once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest
from worlds import RUN, SECRET, Pair, identity, link, now, soon, within

from shoal.core.errors import PeerLost, ProtocolError, RefusedError
from shoal.net import door, handshake
from shoal.net.channel import Channel
from shoal.net.identity import Identity
from shoal.planning import crowd

KEY = handshake.run_key(RUN, SECRET)
DIALLER, LISTENER = identity(1), identity(2)  # the first two that a world makes
ENCODE = msgspec.msgpack.encode
WORDS = "hello", "challenge", "proof", "accepted"


async def shake(
    pair: Pair, *, ours: bytes = KEY, theirs: bytes = KEY, expected: str | None = None,
    dialler: ModuleType = handshake, listener: ModuleType = handshake, me: Identity = DIALLER,
) -> list[Any]:  # fmt: skip
    """What each end returns or raises, within a second."""
    async with within(1):
        return await asyncio.gather(
            dialler.greet(pair.near, me, ours, b"d" * 16, expected, "link"),
            listener.answer(pair.far, LISTENER, theirs, b"l" * 16),
            return_exceptions=True,
        )


def assert_refused(results: list[Any], code: str, reason: str) -> None:
    """Both ends raise RefusedError with this code and one and the same reason."""
    assert [type(result) for result in results] == [RefusedError, RefusedError]
    assert [result.code for result in results] == [code, code]
    assert results[0].reason == results[1].reason
    assert reason in results[0].reason


def of_version(number: int) -> ModuleType:
    """The handshake of a shoal that speaks another version of the protocol."""
    spec = importlib.util.find_spec("shoal.net.handshake")
    assert spec is not None and spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    sys.modules["handshake_of_another_version"] = other
    spec.loader.exec_module(other)
    other.PROTOCOL_VERSION = number
    return other


# ---------------------------------------------------------------- in


async def test_two_that_know_the_secret_learn_each_others_ids(world) -> None:
    async with world.pair() as pair:
        assert await shake(pair) == [LISTENER.peer_id, (DIALLER.peer_id, "link")]


async def test_the_expected_peer_is_let_in(world) -> None:
    async with world.pair() as pair:
        assert (await shake(pair, expected=LISTENER.peer_id))[0] == LISTENER.peer_id


async def test_afterwards_each_may_send_what_a_peer_may(world) -> None:
    async with world.pair() as pair, within(10):
        await shake(pair)
        for here, there in ((pair.near, pair.far), (pair.far, pair.near)):
            await here.send(b"h" * 5000, bytes(100_000))
            assert len((await there.receive())[1]) == 100_000


async def test_neither_end_is_held_to_a_strangers_limits_by_the_others_haste(world, monkeypatch) -> None:
    """A peer's first frame may come together with the end of the handshake: both trust before their last word."""
    told: list[str] = []
    async with world.pair() as pair:
        for name, channel in (("dialler", pair.near), ("listener", pair.far)):

            async def send(header: bytes, payload: bytes = b"", *, name=name, send=channel.send) -> None:
                told.append(f"{name} sends {next(word for word in WORDS if word.encode() in header)}")
                await send(header, payload)

            def trust(*, name=name, trust=channel.trust) -> None:
                told.append(f"{name} trusts")
                trust()

            monkeypatch.setattr(channel, "send", send)
            monkeypatch.setattr(channel, "trust", trust)
        await shake(pair)
    assert told == [
        "dialler sends hello", "listener sends challenge",
        "dialler trusts", "dialler sends proof", "listener trusts", "listener sends accepted",
    ]  # fmt: skip


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("other", [(RUN, "another-secret"), ("fish", SECRET)], ids=["secret", "run"])
async def test_another_secret_or_run_is_refused(world, other) -> None:
    async with world.pair() as pair:
        results = await shake(pair, ours=handshake.run_key(*other))
        assert_refused(results, "credentials", "the run's name or its secret is not the same")


async def test_a_listener_that_does_not_know_the_secret_learns_nothing_and_is_refused(world) -> None:
    """It accepts anybody, with an HMAC under a key of its own."""
    async with world.pair() as pair, within(1):
        greeting = asyncio.create_task(handshake.greet(pair.near, DIALLER, KEY, b"d" * 16, None, "link"))
        await pair.far.receive()
        await pair.far.send(ENCODE(handshake.Challenge(handshake.PROTOCOL_VERSION, b"l" * 16)))
        await pair.far.receive()
        await pair.far.send(ENCODE(handshake.Accepted(b"m" * 32)))
        with pytest.raises(RefusedError, match="secret") as refused:
            await greeting
        told = msgspec.msgpack.decode((await pair.far.receive())[0], type=handshake.Refusal)
        assert (told.code, told.reason) == ("credentials", refused.value.reason)


async def test_another_peer_than_the_expected_one_is_refused(world) -> None:
    async with world.pair() as pair:
        results = await shake(pair, expected=identity(77).peer_id)
        assert_refused(results, "identity", f"answers peer {LISTENER.peer_id}, not {identity(77).peer_id}")


async def test_this_peer_itself_is_refused(world) -> None:
    async with world.pair() as pair:
        assert_refused(await shake(pair, me=LISTENER), "self", "this address is this peer's own")


@pytest.mark.parametrize("version", [0, handshake.PROTOCOL_VERSION + 1])
async def test_another_protocol_version_is_refused(world, version) -> None:
    other = of_version(version)
    async with world.pair() as pair:
        assert_refused_by(await shake(pair, dialler=other), version)
    async with world.pair() as pair:
        assert_refused_by(await shake(pair, listener=other), version)


def assert_refused_by(results: list[Any], version: int) -> None:
    reasons = [getattr(result, "reason", repr(result)) for result in results]
    assert [getattr(result, "code", None) for result in results] == ["version", "version"], reasons
    assert all(str(version) in reason for reason in reasons)
    assert reasons[0] == reasons[1]


async def test_a_public_key_without_its_private_key_is_refused(world) -> None:
    """Mallory shows another peer's key, and signs with her own."""

    class Mallory(Identity):
        def __init__(self) -> None:
            super().__init__(bytes(31) + b"\x4d")
            self.public_key, self.peer_id = identity(9).public_key, identity(9).peer_id

    async with world.pair() as pair:
        assert_refused(await shake(pair, me=Mallory()), "identity", f"peer {identity(9).peer_id} did not prove")


async def test_a_proof_for_one_connection_is_worth_nothing_on_another(world) -> None:
    """Somebody between two peers passes on what the dialler says, to a connection of their own."""
    async with world.pair() as pair, within(5):
        onward = await pair.dialler.dial(pair.endpoint)
        onward_far = await pair.accepted.get()
        onward.binding = b"the other connection"  # as it is where each connection has a certificate of its own
        dialling = asyncio.create_task(handshake.greet(onward, DIALLER, KEY, b"d" * 16, None, "link"))
        answering = asyncio.create_task(handshake.answer(pair.far, LISTENER, KEY, b"l" * 16))
        await pair.near.send((await onward_far.receive())[0])
        await onward_far.send((await pair.near.receive())[0])
        await pair.near.send((await onward_far.receive())[0])
        with pytest.raises(RefusedError, match="did not prove its identity"):
            await answering
        await onward_far.send((await pair.near.receive())[0])
        with pytest.raises(RefusedError, match="did not prove its identity"):
            await dialling


# ---------------------------------------------------------------- no handshake at all

GARBAGE = {
    "random": bytes(range(256)),
    "no text": b"\x81\xa4type\xa2\xff\xff",
    "an unknown message": ENCODE({"type": "open sesame"}),
    "a wrong one": ENCODE(handshake.Accepted(b"")),
    "an unknown field": ENCODE({"type": "hello", "version": 1, "nonce": b"", "key": b"", "more": 1}),
    "a wrong type": ENCODE({"type": "hello", "version": "1", "nonce": b"", "key": b""}),
    "deeply nested": b"\x81\xa1x" + b"\x91" * 1000 + b"\xc0",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_a_protocol_error_at_the_listener(world, garbage) -> None:
    async with world.pair() as pair, within(2):
        await pair.near.send(garbage)
        with pytest.raises(ProtocolError):
            await handshake.answer(pair.far, LISTENER, KEY, b"l" * 16)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_a_protocol_error_at_the_dialler(world, garbage) -> None:
    async with world.pair() as pair, within(2):
        await pair.far.send(garbage)
        with pytest.raises(ProtocolError):
            await handshake.greet(pair.near, DIALLER, KEY, b"d" * 16, None, "link")


async def test_a_key_that_is_no_key_is_refused(world) -> None:
    async with world.pair() as pair, within(2):
        await pair.near.send(ENCODE(handshake.Hello(handshake.PROTOCOL_VERSION, b"", b"no key")))
        await pair.near.send(ENCODE(handshake.Proof(b"", b"", "link")))
        with pytest.raises(RefusedError, match="did not prove its identity"):
            await handshake.answer(pair.far, LISTENER, KEY, b"l" * 16)


# ---------------------------------------------------------------- the door


async def opened(world, pair: Pair) -> Any:
    """The listener's door, where one more connection has come: the pair's."""
    guard = world.door(LISTENER, pair.listener)
    guard._key = KEY
    return guard


async def test_the_door_turns_garbage_away_with_an_event_and_closes(world) -> None:
    async with world.pair() as pair, within(2):
        guard = await opened(world, pair)
        await pair.near.send(b"GET / HTTP/1.1")
        assert await guard.admit(pair.far) is None
        assert guard._log.counts == {"refused": 1}
        with pytest.raises(PeerLost):
            await pair.near.receive()


async def test_the_door_tells_whom_it_refuses_why(world) -> None:
    """The reason arrives before the connection closes, and both logs show it."""
    async with world.pair() as pair, within(2):
        guard = await opened(world, pair)
        admitting = asyncio.create_task(guard.admit(pair.far))
        stranger = handshake.run_key(RUN, "another-secret")
        with pytest.raises(RefusedError, match="secret") as refused:
            await handshake.greet(pair.near, DIALLER, stranger, b"d" * 16, None, "link")
        assert await admitting is None
        assert refused.value.reason in guard._log.recent[-1].reason


async def test_the_door_waits_for_a_silent_stranger_only_so_long(world, monkeypatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.4)
    async with world.pair() as pair, within(5):
        guard, began = await opened(world, pair), now()
        assert await guard.admit(pair.far) is None
        assert 0.39 <= now() - began < 1.4
        assert "silent in the handshake" in guard._log.recent[-1].reason
        with pytest.raises(PeerLost):
            await pair.near.receive()


async def test_a_silent_listener_is_given_up(world, monkeypatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.4)
    async with world.pair() as pair, within(5):
        seeker, began = world.door(DIALLER, pair.dialler), now()
        seeker._key = KEY
        with pytest.raises(PeerLost, match="silent in the handshake"):
            await seeker.dial([pair.endpoint], None, "link")
        assert 0.39 <= now() - began < 1.4


async def test_of_a_crowd_in_the_door_few_shake_hands_and_the_oldest_make_room(world, monkeypatch) -> None:
    monkeypatch.setattr(crowd, "INSIDE", 3)
    async with world.pair() as pair, within(10):
        guard, began = await opened(world, pair), now()
        channels: list[tuple[Channel, Channel]] = [(pair.near, pair.far)]
        while len(channels) < 4:
            near = await pair.dialler.dial(pair.endpoint)
            channels.append((near, await pair.accepted.get()))
        waiting = [asyncio.create_task(guard.admit(far)) for _, far in channels]
        greeting = handshake.greet(channels[3][0], DIALLER, KEY, b"d" * 16, None, "link")
        assert await greeting == LISTENER.peer_id, "the newest waits only until one has been there for a while"
        assert crowd.SETTLED_SECONDS <= now() - began < 3
        assert await waiting[3] == (DIALLER.peer_id, "link")
        assert [task.done() for task in waiting] == [True, False, False, True]
        with pytest.raises(PeerLost):
            await channels[0][0].receive()
        assert "too many connections stand in the door" in guard._log.recent[-1].reason
        for near, _ in channels:
            near.abort()
        assert await asyncio.gather(*waiting[:3]) == [None] * 3


async def test_a_peer_with_a_penalty_is_refused_at_either_end_until_it_is_over(memory) -> None:
    async with memory.hosts(2) as (a, b), within(10):
        a.host.punish(b.id, "it sent nonsense")
        a.host.drop(b.id, "it sent nonsense")
        await soon(lambda: not b.host.linked(a.id))
        for here, there in ((a, b), (b, a)):
            with pytest.raises(RefusedError, match=f"{b.id[:8]} broke the protocol, no new connection") as refused:
                await here.host.link(there.host.endpoints, there.id)
            assert refused.value.code == handshake.PENALTY
        with pytest.raises(RefusedError):
            await a.host.link(b.host.endpoints, None)
        await asyncio.sleep(1.0)
        await link(b, a)
        assert a.events("refused")[0] == "it sent nonsense; no new connection for 1 s"


async def test_an_address_whose_handshakes_fail_is_turned_away_for_a_moment(memory) -> None:
    async with memory.hosts(2, linked=False) as (a, b), within(60):
        nonsense = memory.new_transport(identity(500))

        async def knock() -> None:
            channel = await nonsense.dial(a.host.endpoints[0])
            with contextlib.suppress(PeerLost):
                await channel.send(b"GET / HTTP/1.1")
            await asyncio.sleep(0.02)
            channel.abort()

        def read() -> int:
            return sum("no handshake message" in event for event in a.events("refused"))

        for _ in range(door.FAILURES_AT_ONCE + 10):
            await knock()
        await asyncio.sleep(0.1)
        assert door.FAILURES_AT_ONCE <= read() <= door.FAILURES_AT_ONCE + 2
        await link(b, a)  # another address
        await asyncio.sleep(5)
        before = read()
        for _ in range(10):
            await knock()
        await asyncio.sleep(0.1)
        assert 5 <= read() - before <= 6
        assert a.host.log.counts["refused"] == door.FAILURES_AT_ONCE + 20
