"""A peer that knows the secret and sends what it likes, frame by frame, to a host of a memory network."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import msgspec

from fuzzing import NOTICES, Fuzzer
from shoal.core.clock import Clock, virtual_wall
from shoal.core.errors import RemoteError
from shoal.core.events import EventLog
from shoal.net.channel import Channel
from shoal.net.door import Door
from shoal.net.envelope import Ask, End, Fail, Item, Message, Open, Ping, encode
from shoal.net.handshake import run_key
from shoal.net.host import Host
from shoal.net.identity import Identity
from shoal.net.memory import MemoryNetwork

_serials = itertools.count(1_000_000)


class Attacker:
    """It comes again under a new identity whenever it is turned out, `identities` counts them."""

    def __init__(self, network: MemoryNetwork, fuzzer: Fuzzer, *, run: str = "r", secret: str = "a-secret") -> None:
        self._network, self.fuzzer, self._secrets = network, fuzzer, (run, secret)
        self.identities = 0

    async def enter(self, host: Host, purpose: str) -> Channel:
        me = Identity(next(_serials).to_bytes(32, "big"))
        self.identities += 1
        self.fuzzer.me = me.peer_id
        clock = Clock(virtual_wall)
        transport = self._network.transport(f"attacker-{me.peer_id}", me)
        run, secret = self._secrets
        door = Door(me, transport, run=run, secret=secret, random=random.Random(1), log=EventLog(clock.now))
        door._key = run_key(run, secret)
        channel, _ = await door.dial(host.endpoints, host.peer_id, purpose)
        return channel

    async def call(self, host: Host, kind: type[Message], inputs: int) -> None:
        """So many calls of this kind on links, valid and not; each link is used until it is cut."""
        sent = 0
        while sent < inputs:
            channel = await self.enter(host, "link")
            reading = asyncio.create_task(self._read(channel))
            with contextlib.suppress(RemoteError):
                while sent < inputs:
                    sent += 1
                    body = msgspec.Raw(self.fuzzer.body(kind))
                    number = 0 if kind in NOTICES else self.fuzzer.choose.choice([0, sent, 2**63])
                    frame = encode(Ask(number, kind.__name__, body)) if body else encode(Ping(0.5))
                    await channel.send(frame, self.fuzzer.choose.choice([b"", b"", b"", b"payload"]))
                    await asyncio.sleep(self.fuzzer.choose.choice([0, 0.01, 0.1]))
            channel.abort()
            await reading

    async def stream(self, host: Host, kind: type[Message], item: type[Message], inputs: int) -> None:
        """So many streams of this kind, with some items on each."""
        for _ in range(inputs):
            channel = await self.enter(host, "stream")
            reading = asyncio.create_task(self._read(channel))
            choose = self.fuzzer.choose
            with contextlib.suppress(RemoteError):
                await channel.send(encode(Open(kind.__name__, msgspec.Raw(self.fuzzer.body(kind)))))
                for _ in range(choose.randrange(5)):
                    await channel.send(encode(Item(msgspec.Raw(self.fuzzer.body(item)))), self.fuzzer.payload())
                    await asyncio.sleep(choose.choice([0, 0, 0.02]))
                await channel.send(choose.choice([encode(End()), encode(Fail(0, "x" * 1000, "y")), b"\xc1", b"\x93"]))
                await asyncio.sleep(choose.choice([0, 0.1, 1]))
            channel.abort()
            await reading

    async def _read(self, channel: Channel) -> None:
        with contextlib.suppress(RemoteError):
            while True:
                await channel.receive()
