"""Limits of the peer host: floods, and readers that take nothing. What takes long runs in virtual time only."""

from __future__ import annotations

import asyncio

import pytest
from worlds import now, raw_link, soon, within

from shoal.core.errors import PeerLost
from shoal.net import host as host_under_test
from shoal.net.channel import SLOW_READER_SECONDS
from shoal.net.envelope import Ask, Done, Message, Ping, encode, raw
from shoal.net.remote import MAX_TELLING, MESSAGES_AT_ONCE
from shoal.net.serving import MAX_CALLS_PER_PEER


class Long(Message, frozen=True):
    text: str


async def test_a_flood_of_messages_ends_the_link_and_has_a_penalty(memory) -> None:
    async with memory.hosts(2) as (a, b), raw_link(memory, a) as (peer_id, channel), within(60):
        await soon(lambda: a.host.linked(peer_id))
        for _ in range(int(MESSAGES_AT_ONCE) + 1500):
            await channel.send(encode(Ping(0.5)))
        await soon(lambda: not a.host.linked(peer_id), 30)
        assert "more than 1000 messages a second; no new connection for 1 s" in a.events("refused")[0]
        assert a.host.linked(b.id)


async def test_as_many_messages_as_are_allowed_do_no_harm(memory) -> None:
    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, channel):
        await soon(lambda: a.host.linked(peer_id))
        for _ in range(100):
            for _ in range(90):
                await channel.send(encode(Ping(0.5)))
            await asyncio.sleep(0.1)
        assert a.host.linked(peer_id)
        assert not a.events("refused")


async def test_who_takes_no_answers_is_cut_off_and_what_waits_is_bounded(memory) -> None:
    """Its calls count until their answers are sent: one that reads nothing has so many and no more."""

    async def long(peer_id: str, request: Done) -> Message:
        return Long("x" * 1_000_000)

    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, channel):
        a.host.serve(Done, long)
        await soon(lambda: a.host.linked(peer_id))
        for number in range(MAX_CALLS_PER_PEER - 1):
            await channel.send(encode(Ask(number + 1, "Done", raw(Done()))))
        began = now()
        while a.host.linked(peer_id) and now() < began + 60:
            await asyncio.sleep(1)
            if a.host.linked(peer_id):
                await channel.send(encode(Ping(0.5)))  # it is alive, it only reads nothing
                assert a.host.sent.total_bytes < 6e6
        assert SLOW_READER_SECONDS <= now() - began <= SLOW_READER_SECONDS + 3
        ((_, reason, _),) = a.lost
        assert "took nothing of what was sent to it for 30 s" in reason
        await soon(lambda: a.host.remotes[peer_id].calls_running == 0)


async def test_messages_without_answer_do_not_pile_up(memory) -> None:
    async with memory.hosts(1) as (a,), raw_link(memory, a) as (peer_id, _):
        await soon(lambda: a.host.linked(peer_id))
        for _ in range(3 * MAX_TELLING):
            a.host.tell([peer_id], Long("x" * 1_000_000))
            await asyncio.sleep(0)
        assert a.host.remotes[peer_id].telling == MAX_TELLING


async def test_connections_are_bounded_in_all(memory, monkeypatch) -> None:
    monkeypatch.setattr(host_under_test, "MAX_CONNECTIONS", 2)
    async with memory.hosts(3) as (a, b, c):
        with pytest.raises(PeerLost):
            async with raw_link(memory, a) as (_, channel):
                while True:
                    await channel.receive()
        assert any("more than 2 connections with all peers" in event for event in a.events("refused"))
        assert a.host.linked(b.id) and a.host.linked(c.id)


async def test_peers_that_are_gone_are_forgotten_beyond_so_many(memory, monkeypatch) -> None:
    monkeypatch.setattr(host_under_test, "MAX_REMOTES", 5)
    async with memory.hosts(2) as (a, b):
        for number in range(50):
            a.host.know(f"peer {number}", [])
            await asyncio.sleep(1)
        assert set(a.host.remotes) == {b.id, *(f"peer {number}" for number in range(46, 50))}
