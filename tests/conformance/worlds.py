"""The worlds that the suite runs in, behind one face: transports, hosts, a clock, and a sudden death."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shoal.core.address import Endpoint
from shoal.core.clock import Clock, virtual_wall
from shoal.core.events import EventLog
from shoal.core.loop import run_virtual
from shoal.net.channel import Channel, Transport
from shoal.net.door import Door
from shoal.net.handshake import run_key
from shoal.net.host import Host
from shoal.net.identity import Identity
from shoal.net.memory import MemoryNetwork
from shoal.net.tcp import TcpTransport

RUN, SECRET = "birds", "a-secret-of-the-suite"
LIMIT_SECONDS = 60.0


def identity(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


def now() -> float:
    return asyncio.get_running_loop().time()


async def soon(condition: Callable[[], Any], seconds: float = 1.0, what: str = "the condition") -> Any:
    """Wait until `condition()` is true and return it; an AssertionError at the deadline."""
    until = now() + seconds
    while not (value := condition()):
        assert now() < until, f"{what} did not come true within {seconds} s"
        await asyncio.sleep(0.005)
    return value


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """An AssertionError if the body has not ended by then."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise AssertionError(f"not done within {seconds} s") from None
        raise


class World:
    """One of two; `network` counts who was dialled in it."""

    clock: Clock
    listen: Endpoint

    def __init__(self) -> None:
        self.serial = 0

    def new_transport(self, me: Identity) -> Transport:
        raise NotImplementedError

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        raise NotImplementedError

    def kill(self, transport: Any) -> None:
        """The process behind this transport is gone: no goodbye, its connections break."""
        raise NotImplementedError

    def transport(self) -> Transport:
        """A transport for a new identity."""
        self.serial += 1
        return self.new_transport(identity(self.serial))

    def door(self, me: Identity, transport: Transport, **options: Any) -> Door:
        return Door(me, transport, **self._common(run=RUN, secret=SECRET) | options)

    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        """Two transports with one channel between them, still strangers."""
        dialler, listener = self.transport(), self.transport()
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        securing: dict[asyncio.Task[None], None] = {}

        async def secure(channel: Channel) -> None:
            await channel.secure()
            accepted.put_nowait(channel)

        def accept(channel: Channel) -> None:
            securing[asyncio.get_running_loop().create_task(secure(channel))] = None

        endpoints = await listener.start(self.listen, accept)
        near = await dialler.dial(endpoints[0])
        pair = Pair(near, await accepted.get(), dialler, listener, endpoints[0], accepted)
        try:
            yield pair
        finally:
            pair.near.abort()
            pair.far.abort()
            await asyncio.gather(*securing, return_exceptions=True)
            await dialler.close()
            await listener.close()

    @contextlib.asynccontextmanager
    async def hosts(self, count: int, *, linked: bool = True) -> AsyncIterator[list[Trial]]:
        """Hosts that listen; the first has a link to each other one."""
        async with contextlib.AsyncExitStack() as stack:
            trials = []
            for _ in range(count):
                self.serial += 1
                me = identity(self.serial)
                transport = self.new_transport(me)
                host = Host(me, transport, clock=self.clock, **self._common(run=RUN, secret=SECRET))
                trial = Trial(await stack.enter_async_context(host), transport)
                await host.start(self.listen)
                trials.append(trial)
            if linked:
                for other in trials[1:]:
                    await link(trials[0], other)
            yield trials

    def _common(self, **options: Any) -> dict[str, Any]:
        return {"random": random.Random(self.serial), "log": EventLog(self.clock.now), **options}


class TcpWorld(World):
    """Real sockets on the loopback, real time."""

    clock = Clock()
    listen = Endpoint("127.0.0.1", 0)

    def new_transport(self, me: Identity) -> Transport:
        return TcpTransport(me)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(main, LIMIT_SECONDS))

    def kill(self, transport: Any) -> None:
        transport._server.close()
        for channel in list(transport._channels):
            channel.abort()


class MemoryWorld(World):
    """The simulated network, virtual time."""

    clock = Clock(virtual_wall)
    listen = Endpoint("anywhere", 0)

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork()

    def new_transport(self, me: Identity) -> Transport:
        return self.network.transport(f"host-{me.peer_id[:6]}", me)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        run_virtual(main, limit_seconds=10 * LIMIT_SECONDS)

    def kill(self, transport: Any) -> None:
        transport.crash()


@dataclass
class Pair:
    """Both ends of one channel. `accepted` gets the listener's end of each further dial."""

    near: Channel
    far: Channel
    dialler: Transport
    listener: Transport
    endpoint: Endpoint
    accepted: asyncio.Queue[Channel]

    def trust(self) -> None:
        self.near.trust()
        self.far.trust()


@dataclass
class Trial:
    """A host, its transport, how often it dialled, and whom it lost: (peer id, reason, polite)."""

    host: Host
    transport: Any
    dials: int = 0
    lost: list[tuple[str, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        dial = self.transport.dial

        async def counted(endpoint: Endpoint) -> Channel:
            self.dials += 1
            return await dial(endpoint)

        self.transport.dial = counted
        self.host.on_lost.append(lambda *loss: self.lost.append(loss))

    @property
    def id(self) -> str:
        return self.host.peer_id

    def events(self, kind: str) -> list[str]:
        return [event.reason for event in self.host.log.recent if event.kind == kind]


async def link(one: Trial, other: Trial) -> None:
    """A link from one to the other, and each knows where the other listens."""
    assert await one.host.link(other.host.endpoints, other.id) == other.id
    one.host.know(other.id, other.host.endpoints)
    other.host.know(one.id, one.host.endpoints)
    await soon(lambda: other.host.linked(one.id), what="the link at its other end")


@contextlib.asynccontextmanager
async def raw_link(world: World, trial: Trial, purpose: str = "link") -> AsyncIterator[tuple[str, Channel]]:
    """A peer that knows the secret and speaks for itself, frame by frame; it sends no signs of life."""
    me = identity(1000)
    transport = world.new_transport(me)
    door = world.door(me, transport)
    door._key = run_key(RUN, SECRET)
    channel, _ = await door.dial(trial.host.endpoints, trial.id, purpose)
    try:
        yield me.peer_id, channel
    finally:
        channel.abort()
        await transport.close()
