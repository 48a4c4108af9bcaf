"""What every transport promises its channels, whatever is below: real sockets and the simulated network alike."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from worlds import now, soon, within

from shoal.core.errors import OptionError, PeerLost, ProtocolError
from shoal.net.channel import HEADER_BYTES, PAYLOAD_BYTES, STRANGER_HEADER_BYTES, Channel

MIB = 1 << 20
SIZES = (0, 1, 7, 64 * 1024, 5 * MIB)


def payload(size: int, seed: int) -> bytes:
    """Bytes that differ from place to place."""
    return bytes((at + seed) % 251 for at in range(min(size, 1000))) * (size // 1000 + 1)


async def send_all(channel: Channel, seed: int) -> None:
    for number, size in enumerate(SIZES):
        await channel.send(b"frame %d" % number, payload(size, seed)[:size])


async def check_all(channel: Channel, seed: int) -> None:
    for number, size in enumerate(SIZES):
        header, data = await channel.receive()
        assert header == b"frame %d" % number
        assert len(data) == size
        assert data == payload(size, seed)[:size]


async def assert_ended(channel: Channel, seconds: float = 1.0) -> None:
    async with within(seconds):
        with pytest.raises(PeerLost):
            await channel.receive()


# ---------------------------------------------------------------- frames


async def test_frames_arrive_whole_and_in_order_both_ways_at_once(world) -> None:
    async with world.pair() as pair, within(30), asyncio.TaskGroup() as tasks:
        pair.trust()
        tasks.create_task(send_all(pair.near, 1))
        tasks.create_task(send_all(pair.far, 2))
        tasks.create_task(check_all(pair.far, 1))
        tasks.create_task(check_all(pair.near, 2))


async def test_frames_of_the_largest_size_follow_each_other(world) -> None:
    async with world.pair() as pair, within(40), asyncio.TaskGroup() as tasks:
        pair.trust()
        tasks.create_task(fill(pair.near, Counter(), bytes(PAYLOAD_BYTES), limit=4))
        for number in range(4):
            header, data = await pair.far.receive()
            assert (header, len(data)) == (b"%d" % number, PAYLOAD_BYTES)


async def test_frames_of_several_senders_of_one_channel_never_mix(world) -> None:
    async with world.pair() as pair, within(30), asyncio.TaskGroup() as tasks:
        pair.trust()
        for number in range(20):
            tasks.create_task(pair.near.send(b"%d" % number, bytes([number]) * (number * 10_000)))
        for number in range(20):
            header, data = await pair.far.receive()
            assert (header, bytes(data)) == (b"%d" % number, bytes([number]) * (number * 10_000))


async def test_any_buffer_can_be_a_payload(world) -> None:
    async with world.pair() as pair, within(10):
        pair.trust()
        for data in (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], memoryview(b"abcabc").cast("B")[:3]):
            await pair.near.send(b"h", data)
            assert (await pair.far.receive())[1] == b"abc"


async def test_a_payload_may_be_changed_once_send_returned(world) -> None:
    async with world.pair() as pair, within(10):
        pair.trust()
        data = bytearray(b"a" * 100_000)
        await pair.near.send(b"h", data)
        data[:] = b"b" * 100_000
        assert (await pair.far.receive())[1] == b"a" * 100_000


async def test_every_byte_is_seen_by_both_ends(world) -> None:
    async with world.pair() as pair, within(10):
        pair.trust()
        sent, received = [], []
        pair.near.on_traffic = lambda out, into: sent.append(out)
        pair.far.on_traffic = lambda out, into: received.append(into)
        await pair.near.send(b"header", b"x" * 100_000)
        await pair.far.receive()
        assert sum(sent) == sum(received) == 8 + 6 + 100_000


# ---------------------------------------------------------------- limits


async def test_a_stranger_may_send_a_small_header(world) -> None:
    async with world.pair() as pair, within(10):
        await pair.near.send(b"h" * STRANGER_HEADER_BYTES)
        assert (await pair.far.receive())[0] == b"h" * STRANGER_HEADER_BYTES


@pytest.mark.parametrize(("header", "data"), [(STRANGER_HEADER_BYTES + 1, 0), (1, 1)], ids=["header", "payload"])
async def test_a_stranger_that_sends_more_is_cut_off(world, header, data) -> None:
    async with world.pair() as pair, within(10):
        await pair.near.send(b"h" * header, b"p" * data)
        with pytest.raises(ProtocolError, match=f"a frame of {header} . {data} bytes"):
            await pair.far.receive()
        await assert_ended(pair.near)


async def test_a_frame_without_a_header_is_no_frame(world) -> None:
    async with world.pair() as pair, within(10):
        await pair.near.send(b"")
        with pytest.raises(ProtocolError):
            await pair.far.receive()
        await assert_ended(pair.near)


async def test_trust_raises_the_limits_to_a_peers(world) -> None:
    async with world.pair() as pair, within(20), asyncio.TaskGroup() as tasks:
        pair.far.trust()
        tasks.create_task(pair.near.send(b"h" * HEADER_BYTES, bytes(PAYLOAD_BYTES)))
        header, data = await pair.far.receive()
        assert (len(header), len(data)) == (HEADER_BYTES, PAYLOAD_BYTES)


async def test_a_peer_that_sends_more_is_cut_off(world) -> None:
    async with world.pair() as pair, within(20):
        pair.far.trust()
        sending = asyncio.create_task(pair.near.send(b"h", bytes(PAYLOAD_BYTES + 1)))
        with pytest.raises(ProtocolError, match=f"a frame of 1 . {PAYLOAD_BYTES + 1} bytes"):
            await pair.far.receive()
        await asyncio.gather(sending, return_exceptions=True)
        await assert_ended(pair.near)


async def test_what_came_before_a_bad_frame_is_still_received(world) -> None:
    async with world.pair() as pair, within(10):
        await pair.near.send(b"good")
        await pair.near.send(b"bad" * 1000)
        assert (await pair.far.receive())[0] == b"good"
        with pytest.raises(ProtocolError):
            await pair.far.receive()


# ---------------------------------------------------------------- the end


async def test_close_sends_what_was_queued(world) -> None:
    async with world.pair() as pair, within(20):
        pair.trust()
        data = payload(700_000, 3)
        await pair.near.send(b"first", data)
        await pair.near.send(b"last")
        pair.near.close()
        assert await pair.far.receive() == (b"first", data)
        assert (await pair.far.receive())[0] == b"last"
        await assert_ended(pair.far)
        await assert_ended(pair.near, 3)


async def test_close_sends_what_was_queued_to_a_reader_that_comes_late_too(world) -> None:
    """Every send had returned, and the sender's end is gone, before the reader takes its first frame."""
    async with world.pair() as pair, within(30):
        pair.trust()
        sent = Counter()
        filling = asyncio.create_task(fill(pair.near, sent, bytes(16 * 1024)))
        await until_stalled(sent)
        whole = sent.total()
        pair.near.close()
        await assert_ended(pair.near, 10)
        received = 0
        with pytest.raises(PeerLost):
            while True:
                assert (await pair.far.receive())[0] == b"%d" % received
                received += 1
        await asyncio.gather(filling, return_exceptions=True)
        assert received >= whole, f"{whole} sends returned, {received} frames came"


async def test_abort_ends_both_ends_at_once(world) -> None:
    async with world.pair() as pair, within(10):
        pair.near.abort()
        await assert_ended(pair.far)
        await assert_ended(pair.near)
        for channel in (pair.near, pair.far):
            with pytest.raises(PeerLost):
                await channel.send(b"too late")


async def test_abort_wakes_whoever_waits_at_either_end(world) -> None:
    async with world.pair() as pair, within(10):
        pair.trust()
        sent = Counter()
        waiting = [
            asyncio.create_task(fill(pair.near, sent, bytes(MIB))),
            asyncio.create_task(pair.near.receive()),
        ]
        await until_stalled(sent)
        pair.far.abort()
        async with within(1):
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [PeerLost, PeerLost]


async def test_what_was_received_before_an_abort_can_still_be_read(world) -> None:
    async with world.pair() as pair, within(10):
        received = []
        pair.far.on_traffic = lambda out, into: received.append(into)
        await pair.near.send(b"hello")
        await soon(lambda: sum(received) == 13)
        pair.near.abort()
        assert (await pair.far.receive())[0] == b"hello"
        await assert_ended(pair.far)


async def test_after_close_nothing_can_be_sent(world) -> None:
    async with world.pair() as pair, within(10):
        pair.near.close()
        with pytest.raises(PeerLost):
            await pair.near.send(b"too late")
        await assert_ended(pair.far)


async def test_a_transport_that_closes_ends_every_channel_at_both_ends(world) -> None:
    async with world.pair() as pair, within(10):
        second = await pair.dialler.dial(pair.endpoint)
        second_far = await pair.accepted.get()
        await pair.listener.close()
        for channel in (pair.near, pair.far, second, second_far):
            await assert_ended(channel, 2)
        with pytest.raises(PeerLost, match="nobody listens there"):
            await pair.dialler.dial(pair.endpoint)


async def test_a_killed_process_is_noticed_at_once(world) -> None:
    async with world.pair() as pair, within(10):
        world.kill(pair.listener)
        await assert_ended(pair.near)


async def test_dialling_where_nobody_listens_says_so_at_once(world) -> None:
    async with world.pair() as pair, within(10):
        await pair.listener.close()
        began = now()
        with pytest.raises(PeerLost, match="connection refused: nobody listens there"):
            await pair.dialler.dial(pair.endpoint)
        assert now() - began < 1


async def test_the_place_of_another_listener_is_refused(world) -> None:
    async with world.pair() as pair, within(10):
        other = world.transport()
        other.host = getattr(pair.listener, "host", "")  # in the simulated network a place belongs to a host's name
        with pytest.raises(OptionError, match="listen"):
            await other.start(pair.endpoint, lambda channel: None)


async def test_only_the_two_ends_share_a_binding_and_the_listeners_key(world) -> None:
    async with world.pair() as pair, within(10):
        assert pair.near.server_key == pair.far.server_key != b""
        assert pair.near.binding == pair.far.binding
        async with world.pair() as other:
            assert other.near.server_key != pair.near.server_key
            assert other.near.binding != pair.near.binding


# ---------------------------------------------------------------- a slow reader


async def test_a_slow_reader_slows_the_sender_down_and_memory_stays_bounded(world) -> None:
    async with world.pair() as pair, within(40):
        pair.trust()
        sent = Counter()
        sending = asyncio.create_task(fill(pair.near, sent, bytes(MIB), limit=48))
        await until_stalled(sent)
        assert sent.total() < 24, "the sender ran far ahead of a reader that reads nothing"
        for number in range(48):
            assert sent.total() - number < 24
            assert (await pair.far.receive())[0] == b"%d" % number
        await sending


async def test_a_send_that_is_cancelled_half_way_ends_the_connection(world) -> None:
    """Half a frame would make the rest unreadable; whole frames before it are not lost."""
    async with world.pair() as pair, within(20):
        pair.trust()
        sent = Counter()
        sending = asyncio.create_task(fill(pair.near, sent, bytes(MIB)))
        await until_stalled(sent)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(PeerLost):
            await pair.near.send(b"next")
        async with within(5):
            with pytest.raises(PeerLost):
                while True:
                    await pair.far.receive()


async def fill(channel: Channel, sent: Counter, data: bytes, limit: int = 1 << 30) -> None:
    """Send numbered frames; `sent` counts those whose send returned."""
    for number in range(limit):
        await channel.send(b"%d" % number, data)
        sent["frames"] += 1


async def until_stalled(sent: Counter) -> None:
    """Until nothing more was sent for a while: only time can show that nothing happens."""
    before = -1
    while sent.total() != before:
        before = sent.total()
        await asyncio.sleep(0.3)
