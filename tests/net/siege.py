"""What strangers, and a peer that knows the secret, can do to a listening peer on real sockets. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from typing import Any

import msgspec

from fuzzing import ITEMS, NOTICES, REPLIES, Fuzzer
from shoal.core.address import Address, Endpoint
from shoal.core.clock import Clock
from shoal.core.errors import RemoteError
from shoal.core.events import EventLog
from shoal.net import handshake
from shoal.net.channel import PREFIX, Channel
from shoal.net.door import Door
from shoal.net.envelope import Ask, End, Item, Open, Ping, encode
from shoal.net.identity import Identity
from shoal.net.tcp import TcpChannel, TcpTransport
from shoal.overlay.directory import Find

ABREAST = 16


class Siege:
    """Attacks one peer. All its connections are closed by `close`."""

    def __init__(self, address: Address, run: str, secret: str, seed: int) -> None:
        self.endpoint: Endpoint = address.endpoints[0]
        self.victim, self._secrets = address.peer_id, (run, secret)
        self.fuzzer = Fuzzer(seed, [address.peer_id, run])
        self.fuzzer.claims_runs = False
        self.choose = self.fuzzer.choose
        self._transport = TcpTransport(Identity(os.urandom(32)))
        self._held: list[socket.socket] = []
        self.sent = 0

    async def close(self) -> None:
        for held in self._held:
            held.close()
        await self._transport.close()

    async def abreast(self, count: int, work: Any) -> None:
        """`work()` so many times, some at once; connections that the victim closes are what is expected."""

        async def some(share: int) -> None:
            for _ in range(share):
                with contextlib.suppress(RemoteError, OSError, TimeoutError):
                    async with asyncio.timeout(10):
                        await work()

        await asyncio.gather(*(some(count // ABREAST + (number < count % ABREAST)) for number in range(ABREAST)))

    # -- strangers

    async def stranger_frames(self) -> None:
        """One connection: a few frames of a handshake, mutated, random, or announced far too long."""
        channel: Any = await self._transport.dial(self.endpoint)
        try:
            for _ in range(self.choose.choice([1, 1, 2, 3])):
                kind = self.choose.choice([handshake.Hello, handshake.Proof, handshake.Refusal, handshake.Accepted])
                value = self.fuzzer.plain(kind) | {"type": kind.__struct_config__.tag}
                data = msgspec.msgpack.encode(value)
                what = self.choose.random()
                if what < 0.6:
                    frame = data if what < 0.2 else self.fuzzer.other_bytes(data)
                    await channel.send(frame, self.choose.choice([b"", b"", b"x"]))
                elif what < 0.8:
                    lengths = self.choose.choice([(2**32 - 1, 0), (1, 2**32 - 1), (0, 0), (1025, 0), (8, 1)])
                    channel._write(PREFIX.pack(*lengths) + self.choose.randbytes(100))
                else:
                    channel._write(self.choose.randbytes(self.choose.choice([1, 7, 8, 1000])))
                self.sent += 1
            await asyncio.sleep(0)
        finally:
            channel.abort()

    async def no_tls(self) -> None:
        """Bytes that are no TLS, or the beginning of it."""
        with socket.create_connection((self.endpoint.host, self.endpoint.port), 5) as raw:
            raw.sendall(self.choose.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", os.urandom(200)]))
            self.sent += 1
            await asyncio.sleep(0)

    async def hold(self, count: int) -> None:
        """Connections that say nothing, or begin TLS and never end it; what the victim has closed is opened again."""
        loop = asyncio.get_running_loop()
        for number in range(count):
            raw = socket.socket()
            raw.setblocking(False)
            try:
                async with asyncio.timeout(5):
                    await loop.sock_connect(raw, (self.endpoint.host, self.endpoint.port))
                    if number % 2:
                        await loop.sock_sendall(raw, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
                self._held.append(raw)
            except (OSError, TimeoutError):
                raw.close()

    async def trickle(self) -> None:
        """Another byte on each connection that is held."""
        for held in self._held:
            with contextlib.suppress(OSError):
                held.send(b"\x00")

    # -- a peer that knows the secret

    async def enter(self, purpose: str) -> TcpChannel:
        me = Identity(os.urandom(32))
        self.fuzzer.me = me.peer_id
        run, secret = self._secrets
        clock = Clock()
        door = Door(me, self._transport, run=run, secret=secret, random=random.Random(1), log=EventLog(clock.now))
        door._key = handshake.run_key(run, secret)
        channel, _ = await door.dial([self.endpoint], self.victim, purpose)
        assert isinstance(channel, TcpChannel)
        return channel

    async def peer_frames(self) -> None:
        """Frames of links and streams, valid and not, until the victim closes."""
        purpose = self.choose.choice(["link", "link", "stream"])
        channel = await self.enter(purpose)
        reading = asyncio.create_task(_read(channel))
        try:
            for number in range(self.choose.randrange(1, 12)):
                self.sent += 1
                await channel.send(self._frame(purpose, number), self.choose.choice([b"", b"", b"", bytes(5000)]))
            await asyncio.sleep(0.01)
        finally:
            channel.abort()
            await reading

    def _frame(self, purpose: str, number: int) -> bytes:
        what = self.choose.random()
        if what < 0.1:
            return self.choose.randbytes(self.choose.randrange(1, 100))
        if purpose == "link":
            kind = self.choose.choice([*REPLIES, *NOTICES])
            frame = encode(Ask(number, kind.__name__, msgspec.Raw(self.fuzzer.body(kind))))
        else:
            kind = self.choose.choice(list(ITEMS))
            body = msgspec.Raw(self.fuzzer.body(kind if number == 0 else ITEMS[kind][0]))
            frame = encode(Open(kind.__name__, body) if number == 0 else Item(body) if number < 8 else End())
        return frame if what < 0.8 else self.fuzzer.other_bytes(frame)

    async def call_flood(self, count: int) -> int:
        """So many calls as fast as they go; returns how many were taken before the victim closed."""
        channel = await self.enter("link")
        reading = asyncio.create_task(_read(channel))
        sent = 0
        try:
            for number in range(count):
                await channel.send(
                    encode(Ask(number % 2, "Nothing", msgspec.Raw(b"\xc0"))) if number % 3 else encode(Ping(0.5))
                )
                sent += 1
                if number % 50 == 0:
                    await asyncio.sleep(0)
        except RemoteError:
            pass  # it was cut off
        finally:
            channel.abort()
            await reading
        return sent

    async def oversized(self) -> None:
        """A peer announces more than anybody may send, or as much as it may, and sends nothing of it."""
        channel = await self.enter(self.choose.choice(["link", "stream"]))
        lengths = self.choose.choice([(2**32 - 1, 0), (1, 2**32 - 1), (4 << 20, 8 << 20)])
        channel._write(PREFIX.pack(*lengths) + b"x" * 100)
        self.sent += 1
        await asyncio.sleep(0.02)
        channel.abort()

    async def read_nothing(self, count: int) -> Channel:
        """Calls with long answers, none of which is read."""
        channel = await self.enter("link")
        channel._transport.pause_reading()
        body = msgspec.msgpack.encode(Find([os.urandom(32) for _ in range(16)], True, ()))
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(5):
                for number in range(count):
                    await channel.send(encode(Ask(number + 1, "Find", msgspec.Raw(body))))
        return channel


async def _read(channel: Channel) -> None:
    with contextlib.suppress(RemoteError):
        while True:
            await channel.receive()
