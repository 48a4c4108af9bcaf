"""Nodes of a directory in one memory network, on virtual time: each is told of one entry node and finds the others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.core.address import Endpoint
from shoal.core.clock import Clock, virtual_wall
from shoal.core.events import EventLog
from shoal.core.loop import run_virtual
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.net.identity import Identity
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.overlay.directory import Directory
from shoal.overlay.records import Record, sign
from shoal.planning.distance import point_of

Result = TypeVar("Result")


@dataclass
class Node:
    """One peer. `calls`: (kind, whom) of each call it made."""

    host: Host
    transport: MemoryTransport
    directory: Directory
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        call = self.host.call

        async def counted(peer_id: str, request: Message, reply: Any, *, timeout_seconds: float) -> Any:
            self.calls.append((type(request).__name__, peer_id))
            return await call(peer_id, request, reply, timeout_seconds=timeout_seconds)

        self.host.call = counted

    @property
    def id(self) -> str:
        return self.host.peer_id

    @property
    def places(self) -> list[str]:
        return [str(endpoint) for endpoint in self.host.endpoints]

    def record(self, key: str, value: bytes, *, sequence: int = 1, ttl_seconds: float = 60.0) -> Record:
        """A record signed by this node."""
        return sign(self.host.identity, key, value, sequence, self.host.clock.wall() + ttl_seconds)

    def crash(self) -> None:
        self.transport.crash()


class Swarm:
    """The nodes. `digest` is a hash of who called whom about what, and of every event."""

    def __init__(self, stack: contextlib.AsyncExitStack, seed: int) -> None:
        self.nodes: list[Node] = []
        self._stack, self._seed = stack, seed
        self._network, self._serial = MemoryNetwork(), itertools.count()

    async def add(self, *, skew_seconds: float = 0.0) -> Node:
        """A node that listens and knows nobody."""
        number = next(self._serial)
        identity = Identity(hashlib.sha256(f"{self._seed} {number}".encode()).digest())
        transport = self._network.transport(f"host-{number}", identity)
        clock = Clock(lambda: virtual_wall() + skew_seconds)
        options = {"clock": clock, "random": random.Random(f"{self._seed} {number}"), "log": EventLog(clock.now)}
        host = Host(identity, transport, run="r", secret="a-secret", **options)
        await self._stack.enter_async_context(host)
        await host.start(Endpoint("any", 0))
        self.nodes.append(Node(host, transport, Directory(host)))
        return self.nodes[-1]

    async def enter(self, node: Node) -> None:
        """It meets the first node and finds the others."""
        entry = self.nodes[0]
        if node is not entry:
            await node.host.link(entry.host.endpoints, entry.id)
            node.directory.meet(entry.id, entry.places)
        await node.directory.bootstrap()

    async def grow(self, count: int) -> None:
        """So many nodes more, which enter fifty at a time."""
        fresh = [await self.add() for _ in range(count)]
        for begin in range(0, count, 50):
            await asyncio.gather(*map(self.enter, fresh[begin : begin + 50]))

    def nearest(self, key: str, count: int) -> list[Node]:
        """The truth."""
        return sorted(self.nodes, key=lambda node: point_of(node.id) ^ point_of(key))[:count]

    def digest(self) -> str:
        lines = [f"{node.id} {node.calls} {[*map(str, node.host.log.recent)]}" for node in self.nodes]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextlib.asynccontextmanager
async def swarm(count: int, seed: int = 1) -> AsyncIterator[Swarm]:
    async with contextlib.AsyncExitStack() as stack:
        made = Swarm(stack, seed)
        await made.grow(count)
        yield made
        faults = [fault for node in made.nodes for fault in node.host.faults]
        assert not faults, faults


def run(scenario: Callable[[Swarm], Awaitable[Result]], count: int, seed: int = 1) -> Result:
    """Run a scenario among `count` nodes that found each other."""

    async def main() -> Result:
        async with swarm(count, seed) as made:
            return await scenario(made)

    return run_virtual(main(), limit_seconds=1e4)
