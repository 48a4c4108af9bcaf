"""The transport of the simulated world: hosts in one process, latency and bandwidth on virtual time.

There is no TLS: the world vouches for the listener's key. Everything above (handshake, calls, streams, limits) is the
same code as on the wire. Each host has one uplink and one downlink that its channels share in order of arrival.

What is on the way belongs to the wire, not to the process that sent it: it runs in a context of its own, so that a
paused process's bytes arrive (its machine still sends them) and wait unread where the receiver is paused.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial

from shoal.core.address import Endpoint
from shoal.core.errors import OptionError, PeerLost, ProtocolError
from shoal.net.channel import (
    FRAME_BYTES,
    HEADER_BYTES,
    PAYLOAD_BYTES,
    PREFIX,
    SLOW_READER_SECONDS,
    STRANGER_HEADER_BYTES,
    STRANGER_PAYLOAD_BYTES,
    TOOK_NOTHING,
    Buffer,
    Channel,
    Frame,
)
from shoal.net.identity import Identity

WIRE = Context()
HANGING_SECONDS = 120.0
"""How long a dial hangs where nothing answers, as TCP's own: whoever dials gives up before."""
SLICE_BYTES = 64 * 1024
WINDOW_BYTES = 4 << 20
MAX_WAITING = 2048


@dataclass
class Line:
    """One direction of a host's access line: `bytes_per_second`, and until when it is taken."""

    bytes_per_second: float
    free_at: float = 0.0

    def pass_through(self, now: float, count_bytes: int) -> float:
        """When the last of `count_bytes` that arrive at `now` is through."""
        self.free_at = max(now, self.free_at) + count_bytes / self.bytes_per_second
        return self.free_at


@dataclass
class MemoryNetwork:
    """All links between the hosts of a world. Each connection takes `latency_seconds()` one way, drawn as it begins."""

    latency_seconds: Callable[[], float] = lambda: 0.01
    bytes_per_second: float = 12.5e6
    _listeners: dict[Endpoint, MemoryTransport] = field(default_factory=dict)
    _serial: itertools.count[int] = field(default_factory=itertools.count)
    _sides: dict[str, int] = field(default_factory=dict)
    _held: list[tuple[str, str, Callable[[], None]]] = field(default_factory=list)
    _healed: asyncio.Event = field(default_factory=asyncio.Event)

    def transport(
        self, host: str, identity: Identity, bytes_per_second: float | None = None, *,
        down_bytes_per_second: float | None = None, inbound: bool = True,
    ) -> MemoryTransport:  # fmt: skip
        """A transport for the host of this name, with a line of its own rates.

        Without `inbound` it is behind a NAT: it dials, and nobody reaches it.
        """
        up = bytes_per_second or self.bytes_per_second
        return MemoryTransport(self, host, identity, up, down_bytes_per_second or up, inbound)

    # -- faults

    def partition(self, *sides: Iterable[str]) -> None:
        """Nothing passes between hosts of different sides until `heal`: it waits on the way, and nobody is told.

        Hosts that are on no side stay together.
        """
        self._sides = {host: number for number, side in enumerate(sides, 1) for host in side}
        self._healed.clear()

    def heal(self) -> None:
        """One network again: what waited arrives, in its order, unless its connection was given up meanwhile."""
        self._sides = {}
        held, self._held = self._held, []
        for sender, receiver, arrive in held:
            asyncio.get_running_loop().call_soon(self._arrive, sender, receiver, arrive, context=WIRE)
        self._healed.set()

    def break_connections(self, one: MemoryTransport, other: MemoryTransport) -> None:
        """Every connection between two hosts breaks; both ends see it."""
        for channel in _between(one, other):
            channel.abort()

    def damage(self, sender: MemoryTransport, receiver: MemoryTransport) -> None:
        """The next frame of every connection from one to the other arrives with a wrong byte. As TLS does, the
        receiver notices, and that is the end of the connection."""
        for channel in _between(sender, receiver):
            channel.is_damaged = True

    def parted(self, one: str, other: str) -> bool:
        """Whether nothing passes between these hosts now."""
        return self._sides.get(one, 0) != self._sides.get(other, 0)

    async def joined(self, one: str, other: str) -> None:
        """Return when something can pass between them."""
        while self.parted(one, other):
            await self._healed.wait()

    def send(self, at: float, sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        """`arrive` is called at that time, or when the two sides are one again."""
        asyncio.get_running_loop().call_at(at, self._arrive, sender, receiver, arrive, context=WIRE)

    def _arrive(self, sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        if self._sides and self.parted(sender, receiver):
            self._held.append((sender, receiver, arrive))
        else:
            arrive()


def _between(sender: MemoryTransport, receiver: MemoryTransport) -> list[MemoryChannel]:
    return [channel for channel in sender.channels if channel._far._transport is receiver]


class MemoryChannel:
    """One end of a connection; `_far` is the other end."""

    _far: MemoryChannel

    def __init__(
        self, transport: MemoryTransport, server_key: bytes, binding: bytes, remote: str, latency_seconds: float
    ) -> None:
        self._transport, self._latency_seconds = transport, latency_seconds
        self.server_key, self.binding, self.remote = server_key, binding, remote
        self.address = remote
        self.on_traffic: Callable[[int, int], None] = lambda sent, received: None
        self._limits = STRANGER_HEADER_BYTES, STRANGER_PAYLOAD_BYTES
        self._frames: deque[Frame] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._on_the_way_bytes = 0
        self._lost: Exception | None = None
        self.is_damaged = False
        self._sending = asyncio.Lock()
        transport.channels[self] = None

    async def secure(self) -> None:
        return

    def trust(self) -> None:
        self._limits = HEADER_BYTES, PAYLOAD_BYTES

    async def send(self, header: bytes, payload: Buffer = b"") -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            frame = header, memoryview(bytearray(payload))
            left = PREFIX.size + len(header) + len(frame[1])
            try:
                await self._wait_for_room()
                if self._lost:
                    raise self._lost
                self._on_the_way_bytes += _window(frame)
                if self._on_the_way_bytes > WINDOW_BYTES:
                    self._room.clear()
                while left > 0:
                    size = min(left, SLICE_BYTES)
                    left -= size
                    sent_at = self._transport.uplink.pass_through(loop.time(), size)
                    self.on_traffic(size, 0)
                    self._send(sent_at, partial(self._far._enter, size, frame if left == 0 else None))
                    if len(frame[1]):  # bulk goes at the line's pace; a call is queued behind it
                        await asyncio.sleep(sent_at - loop.time())
                    if self._lost:
                        raise self._lost
            except asyncio.CancelledError:
                self.abort()  # half a frame would make the rest unreadable
                raise

    def post(self, header: bytes) -> bool:
        if self._lost or self._sending.locked() or not self._room.is_set():
            return False
        loop, frame = asyncio.get_running_loop(), (header, memoryview(b""))
        size = PREFIX.size + len(header)
        self._on_the_way_bytes += _window(frame)
        if self._on_the_way_bytes > WINDOW_BYTES:
            self._room.clear()
        sent_at = self._transport.uplink.pass_through(loop.time(), size)
        self.on_traffic(size, 0)
        self._send(sent_at, partial(self._far._enter, size, frame))
        return True

    def _send(self, sent_at: float, arrive: Callable[[], None]) -> None:
        transport = self._transport
        arrives_at = sent_at + self._latency_seconds
        transport.network.send(arrives_at, transport.host, self._far._transport.host, arrive)

    async def _wait_for_room(self) -> None:
        while not self._room.is_set():
            before = self._on_the_way_bytes
            try:
                async with asyncio.timeout(SLOW_READER_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                if self._on_the_way_bytes >= before:
                    self._lost = self._lost or PeerLost(f"{self.remote} {TOOK_NOTHING}")
                    self.abort()

    def _enter(self, size: int, frame: Frame | None) -> None:
        """A slice came to this end's line; it is read once the downlink let it through."""
        loop = asyncio.get_running_loop()
        through_at = self._transport.downlink.pass_through(loop.time(), size)
        loop.call_at(through_at, self._deliver, size, frame, context=WIRE)

    def _deliver(self, size: int, frame: Frame | None) -> None:
        if self._lost:
            return
        self.on_traffic(0, size)
        if self._far.is_damaged:
            self._lost = PeerLost(f"the connection to {self.remote} closed: what came was damaged on the way")
            self.abort()
            return
        if frame is None:
            return
        if not 0 < len(frame[0]) <= self._limits[0] or len(frame[1]) > self._limits[1]:
            self._lost = ProtocolError(
                f"a frame of {len(frame[0])} + {len(frame[1])} bytes; allowed are {self._limits}"
            )
            self.abort()
            return
        self._frames.append(frame)
        self._arrived.set()

    def place(self, buffers: Sequence[memoryview]) -> None:
        return

    async def receive(self) -> Frame:
        while not self._frames:
            if self._lost:
                raise self._lost
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        self._far._on_the_way_bytes -= _window(frame)
        if self._far._on_the_way_bytes <= WINDOW_BYTES:
            self._far._room.set()
        return frame

    def close(self) -> None:
        """What was sent before still arrives: the end travels behind it on the same lines."""
        if self._lost:
            return
        loop = asyncio.get_running_loop()
        self._send(self._transport.uplink.pass_through(loop.time(), PREFIX.size), self._far._end_behind_data)
        self._end()

    def _end_behind_data(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(self._transport.downlink.pass_through(loop.time(), PREFIX.size), self._end, context=WIRE)

    def abort(self) -> None:
        self._send(asyncio.get_running_loop().time(), self._far._end)
        self._end()

    def _end(self) -> None:
        self._lost = self._lost or PeerLost(f"the connection to {self.remote} closed")
        self._transport.channels.pop(self, None)
        self._arrived.set()
        self._room.set()


def _window(frame: Frame) -> int:
    return len(frame[0]) + len(frame[1]) + FRAME_BYTES


class MemoryTransport:
    """One host of the network."""

    max_waiting = MAX_WAITING

    def __init__(
        self, network: MemoryNetwork, host: str, identity: Identity, up: float, down: float, inbound: bool
    ) -> None:
        self.network, self.host, self.identity, self._inbound = network, host, identity, inbound
        self.uplink, self.downlink = Line(up), Line(down)
        self._is_dead = False
        self.channels: dict[MemoryChannel, None] = {}
        self._accept: Callable[[Channel], None] | None = None
        self._endpoint: Endpoint | None = None

    async def start(self, listen: Endpoint, accept: Callable[[Channel], None]) -> list[Endpoint]:
        endpoint = Endpoint(self.host, listen.port or 1)
        if endpoint in self.network._listeners:
            raise OptionError("listen", str(endpoint), "a free port")
        self._accept, self._endpoint, self._context = accept, endpoint, copy_context()
        self.network._listeners[endpoint] = self
        return [endpoint]

    async def dial(self, endpoint: Endpoint) -> Channel:
        latency_seconds = self.network.latency_seconds()
        await asyncio.sleep(2 * latency_seconds)
        await self.network.joined(self.host, endpoint.host)
        there = self.network._listeners.get(endpoint)
        if self._is_dead or (there is not None and not there._inbound):
            await asyncio.sleep(HANGING_SECONDS)
            raise PeerLost("no answer")
        if there is None or there._accept is None:
            raise PeerLost("connection refused: nobody listens there")
        key = there.identity.public_key
        binding = hashlib.sha256(key + next(self.network._serial).to_bytes(8, "big")).digest()
        near = MemoryChannel(self, key, binding, str(endpoint), latency_seconds)
        far = MemoryChannel(there, key, binding, self.host, latency_seconds)
        near._far, far._far = far, near
        there._context.run(there._accept, far)
        return near

    async def close(self) -> None:
        self._stop_listening()
        for channel in list(self.channels):
            channel.close()

    def crash(self) -> None:
        """The machine dies: nothing more is sent, and the others see their connections break."""
        self._is_dead = True
        self._stop_listening()
        for channel in list(self.channels):
            channel.abort()

    def _stop_listening(self) -> None:
        if self._endpoint is not None and self.network._listeners.get(self._endpoint) is self:
            del self.network._listeners[self._endpoint]
        self._accept = None
