"""A stream: messages with bulk payloads, both ways at once, on a connection of its own."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import ProtocolError, RefusedError
from shoal.net.channel import Buffer, Channel
from shoal.net.envelope import (
    MAX_CODE,
    MAX_REASON,
    Body,
    End,
    Fail,
    Item,
    Message,
    Ping,
    decode_body,
    decode_stream,
    encode,
    raw,
)


class StreamEnded(Exception):
    """`receive` came to the end of the other side's messages."""


class Stream:
    """One use of a connection between two peers. Either end may send and receive at any time."""

    def __init__(self, channel: Channel, peer_id: str) -> None:
        self._channel = channel
        self.peer_id = peer_id
        self._ended_here = self._ended_there = False

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """Send a message; returns when the connection can take more. Raises PeerLost."""
        await self._channel.send(encode(Item(raw(message))), payload)

    def place(self, buffers: Sequence[memoryview]) -> None:
        """The payloads of the next messages belong here, one for each: where it can, `receive` gives them in place."""
        self._channel.place(buffers)

    async def receive(self, kind: type[Body]) -> tuple[Body, memoryview]:
        """The next message and its payload. Raises StreamEnded, RefusedError, ProtocolError or PeerLost."""
        header, payload = await self._channel.receive()
        while isinstance(frame := decode_stream(header), Ping):
            header, payload = await self._channel.receive()
        if isinstance(frame, Item):
            return decode_body(frame.body, kind), payload
        self._ended_there = True
        if isinstance(frame, End):
            raise StreamEnded
        if isinstance(frame, Fail):
            raise RefusedError(frame.reason[:MAX_REASON], frame.code[:MAX_CODE])
        raise ProtocolError("a stream was opened within a stream")

    def give_sign_of_life(self) -> None:
        """Tell the other end, which waits, that this one has not forgotten it."""
        self._channel.post(encode(Ping(0.0)))

    async def end(self) -> None:
        """Say that nothing more comes from this end."""
        if not self._ended_here:
            self._ended_here = True
            await self._channel.send(encode(End()))

    async def fail(self, code: str, reason: str) -> None:
        """Refuse to go on; the other end's `receive` raises RefusedError."""
        self._ended_here = True
        await self._channel.send(encode(Fail(0, code, reason[:MAX_REASON])))

    async def drain(self) -> None:
        """Read, and drop, what the other end still sends: then the connection is free for another use."""
        while not self._ended_there:
            header, _ = await self._channel.receive()
            self._ended_there = not isinstance(decode_stream(header), Item | Ping)
