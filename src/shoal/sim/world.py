"""A world of peers in one process, in virtual time, from one seed.

    def scenario(world):
        ...
    World(seed=1).run(scenario)

Every random choice of a peer comes from the world's seed, every second from its clock, every byte over its links: two
runs of one seed are the same run. What would be an event on the wire (a fault inside shoal) fails the run here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import torch

from shoal.core.address import Address, Endpoint, parse_address
from shoal.core.clock import Clock, virtual_wall
from shoal.core.compute import VirtualCompute
from shoal.core.events import EventLog
from shoal.core.loop import OWNER, VirtualLoop, run_virtual
from shoal.net.host import Host
from shoal.net.identity import KEY_BYTES, Identity
from shoal.net.memory import MemoryNetwork
from shoal.overlay.charter import Options
from shoal.overlay.joining import enter
from shoal.overlay.member_record import TRAINER
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.protocols.peer import Peer
from shoal.protocols.taking_part import Strategy, take_part
from shoal.sim.checkers import Checkers
from shoal.sim.replica import VirtualReplica
from shoal.strategies import build_strategy
from shoal.strategies.moshpit import Moshpit
from shoal.strategies.options import options_of

Result = TypeVar("Result")
JOIN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a peer runs on. Its line is the world's where no rate is given; `down_bytes_per_second` is as up by default.

    Without `inbound` it is behind a NAT. `skew_seconds`: how far its wall clock is ahead.
    """

    bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    inbound: bool = True
    skew_seconds: float = 0.0


class SimPeer:
    """One process of the world, and its faults.

    `crash` ends it as SIGKILL would, `leave` says goodbye, `pause` stops it as SIGSTOP would until `resume`.
    """

    peer: Peer

    def __init__(self, world: World, name: str, key: bytes, port: int, machine: Machine) -> None:
        self.name, self.key, self.port, self.machine = name, key, port, machine
        self.born_at = asyncio.get_running_loop().time()
        self.ended_at: float | None = None
        self.replica: VirtualReplica | None = None
        self._world = world
        self._joined = asyncio.Event()
        self._stop = asyncio.Event()
        self.attached = asyncio.Event()
        self.error: BaseException | None = None

    @property
    def address(self) -> str:
        """Where it can be joined; the secret is the world's."""
        return str(Address(self.peer.id, self.peer.host.endpoints))

    @property
    def id(self) -> str:
        """Its peer id."""
        return self.peer.id

    async def joined(self) -> SimPeer:
        """Return when it is in the run; raises what kept it out."""
        await self._joined.wait()
        if self.error is not None:
            raise self.error
        return self

    async def crash(self) -> None:
        """The machine dies: no goodbye, its connections break."""
        self._ends()
        self.transport.crash()
        self._task.cancel()
        self.resume()
        await asyncio.gather(self._task, return_exceptions=True)

    async def leave(self) -> None:
        """End politely."""
        self._ends()
        self.resume()
        self._stop.set()
        await asyncio.gather(self._task, return_exceptions=True)

    def _ends(self) -> None:
        if self.ended_at is None:
            self.ended_at = asyncio.get_running_loop().time()

    def pause(self) -> None:
        """It stands still: what is sent to it waits, its connections stay, its clock goes on."""
        _virtual_loop().pause(self.name)

    def resume(self) -> None:
        """It goes on, late."""
        _virtual_loop().resume(self.name)

    def slow_down(self, factor: float) -> None:
        """Its training steps take so many times as long from now on."""
        assert self.replica is not None
        self.replica.slow_down(factor)

    def start(self, peers: Sequence[str], remembered: Sequence[str], strategy: Strategy | None) -> None:
        """Begin its life in a task of its own."""
        identity, machine = Identity(self.key), self.machine
        self.transport = self._world.network.transport(
            self.name, identity, machine.bytes_per_second,
            down_bytes_per_second=machine.down_bytes_per_second, inbound=machine.inbound,
        )  # fmt: skip
        self._task = asyncio.create_task(self._live(identity, peers, remembered, strategy), name=self.name)

    async def _live(
        self, identity: Identity, peers: Sequence[str], remembered: Sequence[str], strategy: Strategy | None
    ) -> None:
        OWNER.set(self.name)
        world, clock = self._world, Clock(lambda: virtual_wall() + self.machine.skew_seconds)
        log = EventLog(clock.now)
        random = Random(world.random.getrandbits(64))
        host = Host(
            identity, self.transport, run="world", secret="a-world-of-peers", clock=clock, random=random, log=log
        )
        wanted = options_of(strategy) if strategy else None
        world.hosts.append((self.name, host))
        try:
            async with host:
                members = Membership(host, role=TRAINER, strategy=wanted)
                register = Register(members)
                self.peer = Peer(host, members, register, VirtualCompute())
                world.checkers.watch(self)
                await host.start(Endpoint(self.name, self.port))
                members.start()
                host.spawn(register.keep(), "register")
                named, known = [parse_address(text) for text in peers], [parse_address(text) for text in remembered]
                await enter(members, "world", named, known, JOIN_SECONDS)
                self._joined.set()
                if self.replica is not None:
                    self._attach(members, wanted)
                await self._stop.wait()
                await host.goodbye("it left")
        except Exception as error:  # noqa: BLE001  told to whoever waits for this peer
            self.error = error
            self._joined.set()

    def _attach(self, members: Membership, wanted: Options | None) -> None:
        assert self.replica is not None
        replica, host = self.replica, self.peer.host
        members.refresh = lambda: {
            **replica.figures(),
            "averagings": self.peer.history.applied_count,
        }

        def training() -> None:
            replica.begin()
            self.attached.set()

        schema = [
            (f"theta{number or ''}", tuple(tensor.shape), "float32") for number, tensor in enumerate(replica.tensors)
        ]
        default = options_of(Moshpit())
        host.spawn(replica.train(host.clock), "train")
        host.spawn(take_part(self.peer, replica, schema, wanted, default, self._world.build, training), "take part")


ORDINARY = Machine()


def _virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "a world runs on the virtual loop: World.run"
    return loop


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A world is one thread of many small objects: no threads of torch's, and the collector of cycles comes rarely."""
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(1_000_000, 20, 100)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)


def digest_of(runs: Sequence[dict[str, Any]]) -> str:
    """One digest for the `trace_digest` of several runs, in their order."""
    return hashlib.sha256("".join(run["trace_digest"] for run in runs).encode()).hexdigest()


class World:
    """Hosts on one virtual clock; `latency_seconds` and `bytes_per_second` are those of an ordinary access line."""

    def __init__(self, *, seed: int, latency_seconds: float = 0.01, bytes_per_second: float = 12.5e6) -> None:
        self.random = Random(seed)
        self.network = MemoryNetwork(lambda: latency_seconds, bytes_per_second)
        self.hosts: list[tuple[str, Host]] = []
        self.peers: list[SimPeer] = []
        self.checkers = Checkers()
        self._own: dict[str, Callable[..., Strategy]] = {}

    def run(self, scenario: Callable[[World], Awaitable[Result]], *, limit_seconds: float = 1e5) -> Result:
        """Run a scenario to its end, then end all peers. Raises what the scenario raised, or a fault inside a peer."""

        async def main() -> Result:
            try:
                result = await scenario(self)
            finally:
                for peer in self.peers:
                    await peer.leave()
            self.checkers.check(asyncio.get_running_loop().time())
            return result

        with _undisturbed():
            result = run_virtual(main(), limit_seconds=limit_seconds)
        for name, host in self.hosts:
            if host.faults:
                raise AssertionError(f"a fault inside {name}: {host.faults[0]!r}") from host.faults[0]
        return result

    async def start(
        self,
        name: str,
        *,
        peers: Sequence[str] = (),
        remembered: Sequence[str] = (),
        strategy: Strategy | None = None,
        replica: VirtualReplica | None = None,
        key: bytes | None = None,
        port: int = 1,
        machine: Machine = ORDINARY,
    ) -> SimPeer:
        """Start a peer and wait until it is in the run. `key`: the 32 bytes of an identity that it kept."""
        if strategy is not None:
            self._own[type(strategy).__name__] = type(strategy)
        peer = SimPeer(self, name, key or self.random.randbytes(KEY_BYTES), port, machine)
        peer.replica = replica
        self.peers.append(peer)
        peer.start(peers, remembered, strategy)
        return await peer.joined()

    async def swarm(
        self, count: int, strategy: Strategy, replica: Callable[[int], VirtualReplica],
        machine: Callable[[int], Machine] = lambda number: ORDINARY,
    ) -> list[SimPeer]:  # fmt: skip
        """So many peers that train together: the first founds the run, the others come through it, 50 at a time."""
        first = await self.start("p0", strategy=strategy, replica=replica(0), machine=machine(0))
        await first.attached.wait()
        peers = [first]
        for begin in range(1, count, 50):
            peers += await asyncio.gather(
                *(
                    self.start(f"p{number}", peers=[first.address], replica=replica(number), machine=machine(number))
                    for number in range(begin, min(count, begin + 50))
                )
            )
        for peer in peers:
            await peer.attached.wait()
        return peers

    def build(self, options: Options) -> Strategy:
        """The strategy that a charter names: one that was given to `start`, or one of shoal's."""
        kind = self._own.get(str(options.get("name")))
        if kind is None:
            return build_strategy(options)
        return kind(**{field: value for field, value in options.items() if field != "name"})

    def alive(self) -> list[SimPeer]:
        """The peers that have neither crashed nor left."""
        return [peer for peer in self.peers if peer.ended_at is None]

    def digest(self) -> str:
        """A hash of every event of every peer, in order: equal for two runs of one seed."""
        text = "\n".join(f"{name} {event}" for name, host in self.hosts for event in host.log.recent)
        return hashlib.sha256(text.encode()).hexdigest()
