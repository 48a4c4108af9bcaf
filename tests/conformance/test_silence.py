"""Silence and stalls of the peer host. They take seconds, so they run in virtual time only."""

from __future__ import annotations

import asyncio

from worlds import link, now, raw_link, soon

from shoal.core.errors import PeerLost
from shoal.net.envelope import Ask, Done, Message, encode, raw


async def test_a_silent_peer_is_lost_after_3_seconds(memory) -> None:
    async with memory.hosts(2) as (a, b), raw_link(memory, a) as (peer_id, _):
        await soon(lambda: a.host.linked(peer_id))
        began = now()
        await soon(lambda: a.lost, 10)
        assert 2.9 <= now() - began <= 3.6
        ((who, reason, polite),) = a.lost
        assert (who, polite) == (peer_id, False)
        assert reason.startswith("silent for 3.")
        assert a.host.linked(b.id)
        assert set(a.host.silent) == {peer_id}


async def test_whoever_waits_for_a_silent_peer_is_told(memory) -> None:
    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, _):
        await soon(lambda: a.host.linked(peer_id))
        try:
            await a.host.call(peer_id, Done(), Done, timeout_seconds=60)
        except PeerLost as error:
            assert "silent for 3." in str(error)
        assert now() < 10


async def test_any_frame_is_a_sign_of_life(memory) -> None:
    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, channel):
        await soon(lambda: a.host.linked(peer_id))
        for _ in range(10):
            await asyncio.sleep(2.5)
            await channel.send(encode(Ask(0, "Nothing", raw(Done()))))
        assert not a.lost


async def test_bytes_on_a_stream_are_a_sign_of_life_too(memory) -> None:
    """The link itself is silent, and the stream is so slow that a frame takes 8 s: no whole frame comes in time."""
    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, _):
        await soon(lambda: a.host.linked(peer_id))
        async with raw_link(memory, a, "stream") as (_, stream):
            a.transport.downlink.bytes_per_second = 125_000  # 1 Mbit/s
            sending = asyncio.create_task(stream.send(b"\xc1", bytes(1_000_000)))
            await asyncio.sleep(7)
            assert not a.lost and not sending.done()
            await sending


async def test_a_host_that_stalled_itself_declares_nobody_dead(memory) -> None:
    async with memory.hosts(3) as trials:
        for _ in range(3):
            await asyncio.sleep(1.23)
            asyncio.get_running_loop()._now += 10.0  # the loop did not run for 10 s: every timer is late at once
        await asyncio.sleep(5)
        assert [trial.lost for trial in trials] == [[], [], []]
        assert all(trials[0].host.linked(other.id) for other in trials[1:])


async def test_a_peer_that_is_silent_after_our_own_stall_is_lost_all_the_same(memory) -> None:
    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, _):
        await soon(lambda: a.host.linked(peer_id))
        asyncio.get_running_loop()._now += 10.0
        began = now()
        await soon(lambda: a.lost, 10)
        assert 2.9 <= now() - began <= 4.5


async def test_a_call_that_takes_longer_than_the_silence_allowed_is_answered(memory) -> None:
    async def slow(peer_id: str, request: Done) -> Message:
        await asyncio.sleep(30)
        return request

    async with memory.hosts(2, linked=False) as (a, b):
        b.host.serve(Done, slow)
        await link(a, b)
        assert await a.host.call(b.id, Done(), Done, timeout_seconds=60) == Done()
        assert not a.lost and not b.lost
