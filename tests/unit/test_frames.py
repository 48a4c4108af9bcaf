"""FrameReader: the same frames however the bytes are chopped, and limits before any memory is taken."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.core.errors import ProtocolError
from shoal.net.channel import (
    HEADER_BYTES,
    PAYLOAD_BYTES,
    PREFIX,
    STRANGER_HEADER_BYTES,
    STRANGER_PAYLOAD_BYTES,
    FrameReader,
)


def trusting() -> FrameReader:
    reader = FrameReader()
    reader.max_header_bytes, reader.max_payload_bytes = HEADER_BYTES, PAYLOAD_BYTES
    return reader


def feed(reader: FrameReader, data: bytes, chunks: list[int]) -> list[tuple[bytes, bytes]]:
    """Offer the bytes in chunks of these sizes (the last one repeats), as a transport does."""
    frames, at = [], 0
    while at < len(data):
        want = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        room = reader.buffer()
        assert len(room) > 0, "a transport would wait for ever"
        taken = min(want, len(room), len(data) - at)
        room[:taken] = data[at : at + taken]
        if frame := reader.advance(taken):
            frames.append((frame[0], bytes(frame[1])))
        at += taken
    return frames


frames = st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.binary(max_size=200)), max_size=6)


@given(frames, st.lists(st.integers(1, 100), min_size=1, max_size=30))
@example([(b"h", b""), (b"h", b"p"), (b"hh", b"")], [1])
def test_any_chopping_of_the_bytes_gives_the_same_frames(sent, chunks) -> None:
    data = b"".join(PREFIX.pack(len(header), len(payload)) + header + payload for header, payload in sent)
    assert feed(trusting(), data, chunks) == sent


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_a_payload_comes_into_its_place_if_it_fits(chunks) -> None:
    """One place for each frame, whether its payload fits or there is none: the next frame's place is its own."""
    reader, memory = trusting(), [bytearray(4) for _ in range(4)]
    reader.places = deque(memoryview(place) for place in memory)
    sent = [(b"h", b"abcd"), (b"h", b""), (b"h", b"other"), (b"h", b"wxyz"), (b"h", b"more")]
    data = b"".join(PREFIX.pack(len(header), len(payload)) + header + payload for header, payload in sent)
    assert feed(reader, data, chunks) == sent
    assert [bytes(place) for place in memory] == [b"abcd", bytes(4), bytes(4), b"wxyz"]


def test_a_frame_is_not_changed_by_the_next() -> None:
    reader = trusting()
    room = reader.buffer()
    first = None
    for byte in PREFIX.pack(1, 3) + b"habc":
        room = reader.buffer()
        room[0] = byte
        first = reader.advance(1) or first
    feed(reader, PREFIX.pack(1, 3) + b"Hxyz", [1])
    assert first is not None
    assert (first[0], bytes(first[1])) == (b"h", b"abc")


def test_a_payload_is_received_where_it_stays() -> None:
    """Its bytes go straight into the buffer that the receiver gets: no copy in between."""
    reader = trusting()
    feed(reader, PREFIX.pack(1, 1000) + b"h", [9])
    room = reader.buffer()
    assert len(room) == 1000
    frame = reader.advance(1000)
    assert frame is not None
    room[:] = b"x" * 1000
    assert bytes(frame[1]) == b"x" * 1000


@pytest.mark.parametrize(
    ("reader", "header", "payload"),
    [
        (FrameReader(), STRANGER_HEADER_BYTES + 1, 0),
        (FrameReader(), 1, STRANGER_PAYLOAD_BYTES + 1),
        (FrameReader(), 2**32 - 1, 2**32 - 1),
        (FrameReader(), 0, 0),
        (trusting(), HEADER_BYTES + 1, 0),
        (trusting(), 1, PAYLOAD_BYTES + 1),
        (trusting(), 2**32 - 1, 0),
        (trusting(), 1, 2**32 - 1),
        (trusting(), 0, 1),
    ],
)
def test_limits_are_checked_before_anything_is_allocated(reader, header, payload) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=rf"a frame of {header} \+ {payload} bytes; allowed are \d+ \+ \d+"):
            feed(reader, PREFIX.pack(header, payload), [8])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reader", [FrameReader(), trusting()], ids=["stranger", "peer"])
@pytest.mark.parametrize("zero", [False, True])
def test_the_largest_allowed_frame_passes(reader, zero) -> None:
    header, payload = reader.max_header_bytes, 0 if zero else reader.max_payload_bytes
    data = PREFIX.pack(header, payload) + bytes(header + payload)
    assert [(len(one), len(other)) for one, other in feed(reader, data, [1 << 20])] == [(header, payload)]


@given(st.binary(max_size=3000), st.lists(st.integers(1, 500), min_size=1, max_size=10), st.booleans())
def test_random_bytes_give_frames_or_a_protocol_error(data, chunks, trusted) -> None:
    try:
        feed(trusting() if trusted else FrameReader(), data, chunks)
    except ProtocolError:
        pass


def test_random_streams_of_small_frames_never_break_anything_else() -> None:
    """Prefixes with small numbers get further than plain noise does."""
    choose = random.Random(7)
    for _ in range(500):
        data = b"".join(
            PREFIX.pack(choose.choice([0, 1, 5, 1024, 1025]), choose.choice([0, 0, 1, 2**31])) + choose.randbytes(20)
            for _ in range(5)
        )
        try:
            feed(FrameReader(), data, [choose.randrange(1, 40)])
        except ProtocolError:
            pass
