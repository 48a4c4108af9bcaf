"""The one interface of all transports: a channel carries frames, a transport listens and dials.

A frame is a short header (a msgpack message) and a payload of bulk bytes, in that order:

    header_bytes u32 | payload_bytes u32 | header | payload          (little endian)

Bulk bytes never pass through a stream reader: the payload is received straight into a buffer that was allocated, once,
when its length became known.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from shoal.core.address import Endpoint
from shoal.core.errors import ProtocolError
from shoal.core.gauges import RateGauge

PREFIX = struct.Struct("<II")
STRANGER_HEADER_BYTES, STRANGER_PAYLOAD_BYTES = 1024, 0
HEADER_BYTES, PAYLOAD_BYTES = 4 << 20, 8 << 20
"""What an authenticated peer may send in one frame."""
QUEUE_BYTES, UNREAD_BYTES = 4 << 20, 32 << 20
"""Whole frames that wait for a slow consumer before no more is read: of one channel, and of all of a transport's."""
FRAME_BYTES = 400
"""What a frame takes in memory besides its bytes: a million empty ones are not nothing."""
SLOW_READER_SECONDS = 30.0
TOOK_NOTHING = f"took nothing of what was sent to it for {SLOW_READER_SECONDS:g} s"

Buffer = bytes | bytearray | memoryview
Frame = tuple[bytes, memoryview]


class Channel(Protocol):
    """A connection that carries frames in order, both ways.

    `server_key` is the public key of the end that listens and `binding` a hash that only this connection's two ends
    share; the handshake builds on both. `remote` is a text for people, `address` the machine it comes from.
    """

    server_key: bytes
    binding: bytes
    remote: str
    address: str
    on_traffic: Callable[[int, int], None]
    """Called with (bytes sent, bytes received) as they pass: every byte is a sign of life."""

    def measure(self, sent: RateGauge, received: RateGauge) -> bool:
        """This connection carries bulk. Whether the transport feeds these gauges of its line itself from now on."""

    async def secure(self) -> None:
        """On an accepted channel, before all else: encrypt. Raises PeerLost, or ProtocolError on what is no TLS."""

    def trust(self) -> None:
        """The other end is authenticated: raise the limits from a stranger's to a peer's."""

    async def send(self, header: bytes, payload: Buffer = b"") -> None:
        """Send one frame; returns when the transport can take more. Raises PeerLost.

        Whoever takes nothing for SLOW_READER_SECONDS is cut off: what waits for it would fill the memory.
        """

    def post(self, header: bytes) -> bool:
        """Send a frame without a payload now, if that needs no waiting; False where nothing was sent."""

    def place(self, buffers: Sequence[memoryview]) -> None:
        """Where the payloads of the next frames are wanted, one for each. It saves a copy, and promises nothing."""

    async def receive(self) -> Frame:
        """The next frame. Raises PeerLost at the end and ProtocolError on what is no frame."""

    def close(self) -> None:
        """Send what is queued, to a reader that takes it within a second, then close."""

    def abort(self) -> None:
        """Close at once."""


class Transport(Protocol):
    """Listens and dials. `max_waiting`: of how many connections it can hold the other end unauthenticated."""

    max_waiting: int

    async def start(self, listen: Endpoint, accept: Callable[[Channel], None]) -> list[Endpoint]:
        """Listen; returns the endpoints others can dial. `accept` is called for each incoming channel."""

    async def dial(self, endpoint: Endpoint) -> Channel:
        """Connect. Raises PeerLost with a reason that a person understands."""

    async def close(self) -> None:
        """Stop listening and close every channel."""


class Intake:
    """What all channels of one transport hold unread.

    A channel reads on while it holds less than what is free in all: so there is always room for one more, and whoever
    hoards can not starve the others. One that holds nothing always reads its next frame: nothing waits for itself.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._held: dict[object, int] = {}
        self._waiting: dict[object, Callable[[], None]] = {}

    def hold(self, channel: object, count_bytes: int) -> None:
        """This channel holds so much now."""
        grown = count_bytes - self._held.pop(channel, 0)
        self.total_bytes += grown
        if count_bytes:
            self._held[channel] = count_bytes
        if grown < 0:
            for look_again in list(self._waiting.values()):
                look_again()

    def may_read(self, channel: object, look_again: Callable[[], None]) -> bool:
        """Whether it may read more now; if not, `look_again` is called when that may have changed."""
        held = self._held.get(channel, 0)
        if held == 0 or held <= UNREAD_BYTES - self.total_bytes:
            self._waiting.pop(channel, None)
            return True
        self._waiting[channel] = look_again
        return False

    def forget(self, channel: object) -> None:
        """This channel reads no more."""
        self._waiting.pop(channel, None)
        self.hold(channel, 0)


class FrameReader:
    """Cuts a byte stream into frames without copying payloads.

    `buffer()` says where the next bytes go, `advance(n)` that n of them arrived. Limits are checked before anything is
    allocated, so a stranger's length field costs nothing. `places`: where the next frames' payloads go, if they fit.
    """

    def __init__(self) -> None:
        self.max_header_bytes, self.max_payload_bytes = STRANGER_HEADER_BYTES, STRANGER_PAYLOAD_BYTES
        self.places: deque[memoryview] = deque()
        self._prefix = bytearray(PREFIX.size)
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._header: memoryview | None = None
        self._payload = memoryview(b"")
        self._target = memoryview(self._prefix)
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._target[self._filled :]

    def advance(self, count_bytes: int) -> Frame | None:
        """`count_bytes` were written to `buffer()`. Returns a frame when it is whole. Raises ProtocolError."""
        self._filled += count_bytes
        if self._filled < len(self._target):
            return None
        if self._header is None:
            self._allocate()
            return None
        if self._target is self._header and len(self._payload):
            self._target, self._filled = self._payload, 0
            return None
        frame = bytes(self._header), self._payload
        self._begin_frame()
        return frame

    def _allocate(self) -> None:
        header_bytes, payload_bytes = PREFIX.unpack(self._prefix)
        if not 0 < header_bytes <= self.max_header_bytes or payload_bytes > self.max_payload_bytes:
            raise ProtocolError(
                f"a frame of {header_bytes} + {payload_bytes} bytes; "
                f"allowed are {self.max_header_bytes} + {self.max_payload_bytes}"
            )
        self._header = _room_for(header_bytes)
        place = self.places.popleft() if self.places else None
        if payload_bytes:
            fits = place is not None and len(place) == payload_bytes
            self._payload = place if place is not None and fits else _room_for(payload_bytes)
        self._target, self._filled = self._header, 0


def _room_for(count_bytes: int) -> memoryview:
    """Large buffers are not zero-filled: until the bytes come, what is announced takes no memory."""
    return memoryview(np.empty(count_bytes, np.uint8).data if count_bytes > 65_536 else bytearray(count_bytes))
