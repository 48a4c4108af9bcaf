"""Streams of the peer host over every transport: bulk both ways, the pool, and every way in which one can end."""

from __future__ import annotations

import asyncio

import pytest
from worlds import Trial, link, raw_link, soon, within

from shoal.core.address import Endpoint
from shoal.core.errors import PeerLost, ProtocolError, RefusedError
from shoal.net.envelope import End, Message, Open, encode, raw
from shoal.net.host import IDLE_STREAMS_PER_PEER
from shoal.net.stream import Stream, StreamEnded

MIB = 1 << 20


class Mirror(Message, frozen=True):
    """Opens a stream whose other end sends everything back."""


class Flood(Message, frozen=True):
    """Opens a stream whose other end sends `count` blocks at once, and reads what comes."""

    count: int


class Strict(Message, frozen=True):
    """Opens a stream whose other end fails in some way."""

    how: str


class Block(Message, frozen=True):
    number: int


async def receive_all(stream: Stream) -> list[tuple[int, int]]:
    """(number, bytes) of each block until the other end has said its last."""
    blocks = []
    try:
        while True:
            block, data = await stream.receive(Block)
            assert bytes(data) == bytes([block.number % 256]) * len(data)
            blocks.append((block.number, len(data)))
    except StreamEnded:
        return blocks


async def send_blocks(stream: Stream, count: int, size: int = MIB) -> None:
    for number in range(count):
        await stream.send(Block(number), bytes([number % 256]) * size)
    await stream.end()


def serve_streams(trial: Trial) -> list[list[tuple[int, int]]]:
    """All kinds of streams; returns what the floods received."""
    received = []

    async def mirror(stream: Stream, request: Mirror) -> None:
        try:
            while True:
                block, data = await stream.receive(Block)
                await stream.send(block, data)
        except StreamEnded:
            return

    async def flood(stream: Stream, request: Flood) -> None:
        async with asyncio.TaskGroup() as both_ways:
            both_ways.create_task(send_blocks(stream, request.count))
            reading = both_ways.create_task(receive_all(stream))
        received.append(reading.result())

    async def strict(stream: Stream, request: Strict) -> None:
        if request.how == "refuse at once":
            raise RefusedError("not today", "closed")
        if request.how == "return at once":
            return
        block, _ = await stream.receive(Block)
        if request.how == "refuse":
            raise RefusedError(f"block {block.number} is not wanted", "unwanted")
        if request.how == "raise":
            raise ZeroDivisionError("a defect of the handler")

    trial.host.serve_stream(Mirror, mirror)
    trial.host.serve_stream(Flood, flood)
    trial.host.serve_stream(Strict, strict)
    return received


async def mirror_once(here: Trial, there: Trial, numbers: range = range(3)) -> None:
    async with here.host.stream(there.id, Mirror()) as stream:
        for number in numbers:
            await stream.send(Block(number), bytes([number]) * 1000)
            block, data = await stream.receive(Block)
            assert (block.number, bytes(data)) == (number, bytes([number]) * 1000)


# ---------------------------------------------------------------- both ways


async def test_items_come_back_in_order_with_their_payloads(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        await mirror_once(a, b)
        async with a.host.stream(b.id, Mirror()) as stream:
            for size in (0, 1, 7, 64 * 1024, 5 * MIB):
                await stream.send(Block(0), bytes(size))
                assert len((await stream.receive(Block))[1]) == size
        assert not a.host.faults and not b.host.faults


async def test_both_directions_carry_bulk_at_once(world) -> None:
    """Far more than any buffer holds: whoever would first send all and then read could never end."""
    async with world.hosts(2) as (a, b), within(40):
        received = serve_streams(b)
        async with a.host.stream(b.id, Flood(16)) as stream, asyncio.TaskGroup() as both_ways:
            both_ways.create_task(send_blocks(stream, 16))
            reading = both_ways.create_task(receive_all(stream))
        await soon(lambda: received, 5)
        assert reading.result() == received[0] == [(number, MIB) for number in range(16)]


async def test_either_end_may_open_streams(world) -> None:
    async with world.hosts(2) as (a, b), within(20):
        serve_streams(a)
        serve_streams(b)
        await asyncio.gather(mirror_once(a, b), mirror_once(b, a), mirror_once(a, b))


async def test_bulk_does_not_hold_up_calls(world) -> None:
    """They have a connection of their own. With 5 MiB ahead of it a call would take .4 s on this link."""
    async with world.hosts(2) as (a, b), within(20):
        serve_streams(b)

        async def answer(peer_id: str, request: Block) -> Message:
            return request

        b.host.serve(Block, answer)
        async with a.host.stream(b.id, Flood(0)) as stream:
            sending = asyncio.create_task(send_blocks(stream, 8, 5 * MIB))
            await soon(lambda: a.host.sent.total_bytes > MIB)
            await a.host.call(b.id, Block(1), Block, timeout_seconds=2)
            assert not sending.done()
            await sending


# ---------------------------------------------------------------- the pool


async def test_a_stream_that_ended_well_serves_the_next(world) -> None:
    async with world.hosts(2) as (a, b), within(20):
        serve_streams(b)
        assert a.dials == 1
        for _ in range(10):
            await mirror_once(a, b)
        assert (a.dials, b.dials) == (2, 0)


async def test_streams_at_once_have_a_connection_each_and_the_pool_is_small(world) -> None:
    async with world.hosts(2) as (a, b), within(20):
        serve_streams(b)
        await asyncio.gather(*(mirror_once(a, b) for _ in range(5)))
        assert a.dials == 1 + 5
        assert len(a.host.remotes[b.id].idle_streams) == IDLE_STREAMS_PER_PEER
        await asyncio.gather(*(mirror_once(a, b) for _ in range(IDLE_STREAMS_PER_PEER)))
        assert a.dials == 1 + 5
        await soon(lambda: b.host.remotes[a.id].connections == 1 + IDLE_STREAMS_PER_PEER, 3)


async def test_a_pooled_connection_that_died_meanwhile_is_replaced(world) -> None:
    async with world.hosts(2) as (a, b), within(20):
        serve_streams(b)
        await mirror_once(a, b)
        for _, channel in a.host.remotes[b.id].idle_streams:
            channel.abort()
            with pytest.raises(PeerLost):
                await channel.receive()
        await mirror_once(a, b)
        assert a.dials == 3


async def test_what_the_other_end_did_not_read_is_dropped_and_the_connection_serves_on(world) -> None:
    """`Stream.drain`: read, and drop, what still comes; then the connection is free for another use."""
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        async with a.host.stream(b.id, Strict("return at once")) as stream:
            await send_blocks(stream, 3, 1000)
        async with a.host.stream(b.id, Flood(3)):
            pass  # nothing is read of what comes
        assert not b.events("refused") and not a.events("refused")
        await mirror_once(a, b)
        assert a.dials == 2


# ---------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize("how", ["refuse at once", "refuse"])
async def test_a_refusal_comes_with_code_and_reason(world, how) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        with pytest.raises(RefusedError) as refused:
            async with a.host.stream(b.id, Strict(how)) as stream:
                await stream.send(Block(5))
                await stream.receive(Block)
        expected = ("closed", "not today") if how == "refuse at once" else ("unwanted", "block 5 is not wanted")
        assert (refused.value.code, refused.value.reason) == expected
        assert not b.host.faults
        assert a.host.linked(b.id)
        await mirror_once(a, b)


async def test_a_refusal_arrives_though_the_sender_sent_much_more(world) -> None:
    """A sender that streams and a reducer that says no: the reason must not get lost with the connection."""
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        with pytest.raises(RefusedError) as refused:
            async with a.host.stream(b.id, Strict("refuse")) as stream:
                for number in range(20):
                    await stream.send(Block(number), bytes(10_000))
                await stream.receive(Block)
        assert refused.value.code == "unwanted"


async def test_a_stream_of_an_unknown_kind_is_closed(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        async with within(2):
            with pytest.raises((PeerLost, RefusedError)):
                async with a.host.stream(b.id, Mirror()) as stream:
                    await stream.receive(Block)
        assert b.events("refused") and not b.host.faults
        assert a.host.linked(b.id)


async def test_a_handler_that_raises_closes_only_that_stream_and_is_recorded(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        async with a.host.stream(b.id, Mirror()) as other:
            async with within(2):
                with pytest.raises(PeerLost):
                    async with a.host.stream(b.id, Strict("raise")) as stream:
                        await stream.send(Block(1))
                        await stream.receive(Block)
            await soon(lambda: b.host.faults)
            assert [type(fault) for fault in b.host.faults] == [ZeroDivisionError]
            await other.send(Block(1))
            await other.receive(Block)
        assert a.host.linked(b.id) and b.host.linked(a.id)


@pytest.mark.parametrize("error", [TimeoutError, PeerLost, ValueError, StreamEnded])
async def test_an_error_of_the_body_is_not_swallowed(world, error) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        with pytest.raises(error, match="of the body"):
            async with a.host.stream(b.id, Mirror()) as stream:
                await stream.send(Block(1))
                raise error("of the body")
        await mirror_once(a, b)
        assert a.dials == 3  # a connection in an unknown state is never used again
        await soon(lambda: b.host.remotes[a.id].connections == 2, 3)


async def test_a_timeout_around_a_stream_ends_it(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), a.host.stream(b.id, Mirror()) as stream:
                await stream.receive(Block)
        await mirror_once(a, b)


async def test_an_item_of_another_type_is_a_protocol_error(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_streams(b)
        async with within(2):
            with pytest.raises(PeerLost):
                async with a.host.stream(b.id, Mirror()) as stream:
                    await stream.send(Strict("no block"))
                    await stream.receive(Block)
        assert any("no valid Block" in event for event in b.events("refused"))
        assert not b.host.faults


@pytest.mark.parametrize("frame", [b"\xc1", encode(End()), encode(Open("Nobody", raw(Block(1))))])
async def test_a_stream_that_begins_with_nonsense_is_closed(world, frame) -> None:
    async with world.hosts(1) as (a,), within(10), raw_link(world, a, "stream") as (_, channel):
        await channel.send(frame)
        async with within(2):
            with pytest.raises(PeerLost):
                await channel.receive()
        assert a.events("refused") and not a.host.faults


async def test_a_stream_within_a_stream_is_a_protocol_error(world) -> None:
    async with world.hosts(1) as (a,), within(10), raw_link(world, a, "stream") as (_, channel):
        serve_streams(a)
        await channel.send(encode(Open("Mirror", raw(Mirror()))))
        await channel.send(encode(Open("Mirror", raw(Mirror()))))
        async with within(2):
            with pytest.raises(PeerLost):
                await channel.receive()
        assert a.events("refused") == ["a stream was opened within a stream; no new connection for 1 s"]


async def test_the_death_of_the_other_end_is_noticed_at_once_in_the_middle_of_bulk(world) -> None:
    async with world.hosts(2) as (a, b), within(20):
        serve_streams(b)
        with pytest.raises((PeerLost, ProtocolError)):
            async with a.host.stream(b.id, Mirror()) as stream:
                await stream.send(Block(0), bytes(MIB))
                await stream.receive(Block)
                world.kill(b.transport)
                async with within(1):
                    while True:
                        await stream.send(Block(0), bytes(MIB))
                        await stream.receive(Block)
        await soon(lambda: a.lost)


async def test_a_stream_to_somebody_unknown_says_so(world) -> None:
    async with world.hosts(1) as (a,), within(5):
        with pytest.raises(PeerLost, match="no endpoint is known"):
            async with a.host.stream("a" * 32, Mirror()):
                pass


async def test_a_stream_to_another_peer_than_the_one_meant_is_refused(world) -> None:
    async with world.hosts(3) as (a, b, c), within(10):
        serve_streams(b)
        a.host.know(c.id, b.host.endpoints)
        with pytest.raises(RefusedError, match=f"answers peer {b.id}, not {c.id}"):
            await mirror_once(a, c)
        await link(a, c)
        serve_streams(c)
        await mirror_once(a, c)


async def test_a_peer_that_dials_us_but_can_not_be_dialled_is_told_once(world) -> None:
    """Its firewall is closed: the link stands, and every averaging would fail for a reason that nobody sees."""
    async with world.hosts(2) as (a, b), within(15):
        await link(a, b)
        await soon(lambda: b.host.linked(a.id))
        serve_streams(a)
        places = a.host.endpoints
        b.host.know(a.id, [Endpoint(places[0].host, 9)])
        for _ in range(2):
            with pytest.raises(PeerLost):
                await mirror_once(b, a)
        (advice,) = [event for event in b.host.log.recent if event.kind == "advice"]
        assert advice.peer_id == a.id
        assert advice.reason.startswith("it is connected, but can't be dialled: ")
        assert "Averagings need its port to be open" in advice.reason
        b.host.know(a.id, places)
        await mirror_once(b, a)
