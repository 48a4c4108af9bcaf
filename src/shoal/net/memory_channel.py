"""A connection of the simulated world: frames in order, a window, and what faults do to them.

A large frame flows through the lines of both hosts at a max-min fair rate (`net/flows.py`) and arrives a latency after
its last byte left. A small one is a packet: it takes its own time on both lines, behind the packets before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.core.errors import PeerLost, ProtocolError
from shoal.core.gauges import RateGauge
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
    Frame,
)
from shoal.net.flows import Pipe

if TYPE_CHECKING:
    from shoal.net.memory import MemoryTransport

WINDOW_BYTES = 4 << 20
BULK_BYTES = 4096
"""A frame of so many bytes is a flow; a smaller one is a packet."""
NO_PAYLOAD = memoryview(b"")


class MemoryChannel:
    """One end of a connection; `_far` is the other end. A frame leaves when the one before it has left."""

    _far: MemoryChannel
    _pipe: Pipe

    def __init__(
        self, transport: MemoryTransport, there: MemoryTransport, server_key: bytes, binding: bytes, remote: str,
        latency_seconds: float,
    ) -> None:  # fmt: skip
        self._loop, self._network = asyncio.get_running_loop(), transport.network
        self._transport, self._latency_seconds = transport, latency_seconds
        self.hosts = transport.host, there.host
        self.server_key, self.binding, self.remote = server_key, binding, remote
        self.address = remote
        self.on_traffic: Callable[[int, int], None] = lambda sent, received: None
        self._limits = STRANGER_HEADER_BYTES, STRANGER_PAYLOAD_BYTES
        self._lost: Exception | None = None
        self._is_cut = self._network.is_cut(*self.hosts)
        # what leaves
        self._flows, self._uplink, self._downlink = self._network.flows, transport.uplink, there.downlink
        self._leaving: Frame | None = None  # in the pipe
        self._behind: list[Frame | None] = []  # waits for the pipe; None is the end
        self._left_at = 0.0
        self._sending = asyncio.Lock()
        self._departure: asyncio.Future[None] | None = None
        self._on_the_way_bytes = 0
        self._room: asyncio.Event | None = None
        # what comes
        self._frames: list[Frame] = []
        self._held: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._wake_receiver: asyncio.Future[None] | None = None
        transport.channels[self] = None

    def meet(self, far: MemoryChannel) -> None:
        """The other end."""
        self._far = far
        self._pipe = Pipe(
            self._uplink, self._downlink, self._latency_seconds, self._left_in_part, far._arrive_in_part, self._left
        )

    def measure(self, sent: RateGauge, received: RateGauge) -> bool:
        self._uplink.gauge, self._transport.downlink.gauge = sent, received
        self._pipe.is_measured = self._far._pipe.is_measured = True
        return True

    async def secure(self) -> None:
        return

    def trust(self) -> None:
        self._limits = HEADER_BYTES, PAYLOAD_BYTES

    # -- sending

    async def send(self, header: bytes, payload: Buffer = b"") -> None:
        async with self._sending:
            frame = header, memoryview(bytearray(payload)) if len(payload) else NO_PAYLOAD
            try:
                if self._on_the_way_bytes > WINDOW_BYTES:
                    await self._wait_for_room()
                if self._lost:
                    raise self._reason()
                self._on_the_way_bytes += self._window(frame)
                self._put(frame)
                if len(frame[1]):  # bulk goes at the line's pace; a call is queued behind it
                    await self._departed()
            except asyncio.CancelledError:
                self.abort()  # half a frame would make the rest unreadable
                raise

    async def _departed(self) -> None:
        if self._pipe.is_busy:
            self._departure = self._loop.create_future()
            if self._is_cut:
                self._give_up_later()
            await self._departure
        elif self._left_at > self._loop.time():
            await asyncio.sleep(self._left_at - self._loop.time())
        if self._lost:
            raise self._reason()

    def post(self, header: bytes) -> bool:
        if self._lost or self._sending.locked() or self._on_the_way_bytes > WINDOW_BYTES:
            return False
        frame = header, NO_PAYLOAD
        self._on_the_way_bytes += self._window(frame)
        self._put(frame)
        return True

    async def _wait_for_room(self) -> None:
        while self._on_the_way_bytes > WINDOW_BYTES and not self._lost:
            before = self._on_the_way_bytes
            self._room = self._room or asyncio.Event()
            self._room.clear()
            try:
                async with asyncio.timeout(SLOW_READER_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                if self._on_the_way_bytes >= before:
                    self._take_nothing()

    def _take_nothing(self) -> None:
        self._lost = self._lost or PeerLost(f"{self.remote} {TOOK_NOTHING}")
        self.abort()

    def _give_up_later(self) -> None:
        """Bulk that nobody takes, since the network is cut, is given up as if its reader took nothing."""
        departure = self._departure

        def give_up() -> None:
            if self._is_cut and departure is self._departure and departure is not None and not departure.done():
                self._take_nothing()

        self._loop.call_later(SLOW_READER_SECONDS, give_up, context=self._flows.context)

    def _put(self, frame: Frame | None) -> None:
        """On its way, or behind what has not left yet."""
        if self._pipe.is_busy:
            self._behind.append(frame)
            return
        size = self._size(frame)
        if size >= BULK_BYTES:
            self._leaving = frame
            if self._is_cut:
                self._pipe.begin(self._loop.time(), size)
            else:
                self._flows.send(self._pipe, size)
            return
        now = self._loop.time()
        self._left_at = max(self._left_at, self._uplink.book(now, size), self._downlink.book(now, size))
        if frame is not None:
            self.on_traffic(size, 0)
        self._carry(self._far._arrive, size, frame)

    def _left_in_part(self, count_bytes: int) -> None:
        self.on_traffic(count_bytes, 0)

    def _left(self, count_bytes: int) -> None:
        """The last byte of what was in the pipe is on its way; the next may follow."""
        frame, self._leaving = self._leaving, None
        self.on_traffic(count_bytes, 0)
        self._carry(self._far._arrive, count_bytes, frame)
        while self._behind and not self._pipe.is_busy:
            self._put(self._behind.pop(0))
        if not self._pipe.is_busy and self._departure is not None and not self._departure.done():
            self._departure.set_result(None)

    def _carry(self, arrive: Callable[..., None], *what: object) -> None:
        """It arrives after the latency, and never before what left before it."""
        self._left_at = max(self._left_at, self._loop.time())
        self._loop.call_at(self._left_at + self._latency_seconds, arrive, *what, context=self._flows.context)

    def _size(self, frame: Frame | None) -> int:
        """On the lines, where an end is as small as can be."""
        if frame is None:
            return PREFIX.size
        return PREFIX.size + len(frame[0]) + int(len(frame[1]) * self._network.payload_scale)

    def _window(self, frame: Frame) -> int:
        return self._size(frame) + FRAME_BYTES

    # -- receiving

    def _arrive_in_part(self, count_bytes: int) -> None:
        if self._is_cut:
            self._held.append((self._arrive_in_part, (count_bytes,)))
        elif not self._lost:
            self.on_traffic(0, count_bytes)

    def _arrive(self, count_bytes: int, frame: Frame | None) -> None:
        """A whole frame is there, of which the last bytes have just come; None is the end."""
        if self._is_cut:
            self._held.append((self._arrive, (count_bytes, frame)))
            return
        if self._lost:
            return
        if self._network.damages(*self._far.hosts):
            self.fail("bad record mac")
            return
        if frame is None:
            self._end()
            return
        self.on_traffic(0, count_bytes)
        if not 0 < len(frame[0]) <= self._limits[0] or len(frame[1]) > self._limits[1]:
            self._lost = ProtocolError(
                f"a frame of {len(frame[0])} + {len(frame[1])} bytes; allowed are {self._limits}"
            )
            self.abort()
            return
        self._network.frames += 1
        self._frames.append(frame)
        self._wake()

    def place(self, buffers: Sequence[memoryview]) -> None:
        return

    async def receive(self) -> Frame:
        while not self._frames:
            if self._lost:
                raise self._reason()
            self._wake_receiver = self._loop.create_future()
            await self._wake_receiver
        frame = self._frames.pop(0)
        self._far._was_read(self._window(frame))
        return frame

    def _was_read(self, count_bytes: int) -> None:
        self._on_the_way_bytes -= count_bytes
        if self._room is not None and self._on_the_way_bytes <= WINDOW_BYTES:
            self._room.set()

    def _wake(self) -> None:
        if self._wake_receiver is not None and not self._wake_receiver.done():
            self._wake_receiver.set_result(None)

    # -- the end

    def close(self) -> None:
        """What was sent before still arrives: the end travels behind it."""
        if self._lost:
            return
        if self._departure is not None and not self._departure.done():
            self._stop_sending()  # its sender is still at it
        self._put(None)
        self._end()

    def abort(self) -> None:
        self._stop_sending()
        self._loop.call_later(self._latency_seconds, self._far._reset, context=self._flows.context)
        self._end()

    def fail(self, reason: str) -> None:
        """The connection breaks, and both ends learn of it now."""
        for end in (self, self._far):
            end._lost = end._lost or PeerLost(f"the connection to {end.remote} closed: {reason}")
            end._held.clear()
            end._reset()

    def set_cut(self, is_cut: bool) -> None:
        """Nothing comes or goes any more; or all that was held back does now."""
        if is_cut == self._is_cut:
            return
        self._is_cut = is_cut
        if self._pipe.is_busy:
            (self._flows.leave if is_cut else self._flows.join)(self._pipe)
            if is_cut:
                self._give_up_later()
        while self._held and not self._is_cut:
            arrive, what = self._held.pop(0)
            arrive(*what)

    def _reset(self) -> None:
        """The other end gave the connection up."""
        if self._is_cut and not self._lost:
            self._held.append((self._reset, ()))
            return
        self._stop_sending()
        self._end()

    def _stop_sending(self) -> None:
        self._leaving = None
        self._behind.clear()
        self._flows.drop(self._pipe)

    def _end(self) -> None:
        self._lost = self._lost or PeerLost(f"the connection to {self.remote} closed")
        self._transport.channels.pop(self, None)
        if self._departure is not None and not self._departure.done():
            self._departure.set_result(None)  # whoever waits for it finds that the connection is lost
        if self._room is not None:
            self._room.set()
        self._wake()

    def _reason(self) -> Exception:
        """A new one each time: one that was raised keeps the frames that it passed through."""
        return type(self._lost)(*self._lost.args) if self._lost else PeerLost("closed")
