"""The network and the hosts of the simulated world: latency, bandwidth and faults on virtual time.

There is no TLS: the world vouches for the listener's key. Everything above (handshake, calls, streams, limits) is the
same code as on the wire. What passes on a connection is in `net/memory_channel.py`, how bulk shares lines in
`net/flows.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass, field

from shoal.core.address import Endpoint
from shoal.core.errors import OptionError, PeerLost
from shoal.net.channel import Channel
from shoal.net.flows import Flows
from shoal.net.identity import Identity
from shoal.net.lines import Line
from shoal.net.memory_channel import MemoryChannel

MAX_WAITING = 2048
SYN_PAUSES_SECONDS = (1, 2, 4, 8, 16, 32, 64)
"""When nothing answers, the kernel asks again after these, and gives up (Linux: tcp_syn_retries = 6)."""


@dataclass
class MemoryNetwork:
    """All links between the hosts of a world, and what goes wrong with them.

    A connection takes `latency_seconds()` one way, drawn as it begins; or what `pair_latency_seconds` says for the two
    hosts, the one that dials first. Payloads count as `payload_scale` x their bytes on the lines, in windows and in
    `on_traffic`: a small vector can stand for a large one. Limits of a frame are about its real bytes.
    """

    latency_seconds: Callable[[], float] = lambda: 0.01
    bytes_per_second: float = 12.5e6
    payload_scale: float = 1.0
    pair_latency_seconds: Callable[[str, str], float] | None = None
    frames: int = 0
    """How many arrived."""
    flows: Flows = field(default_factory=Flows)
    transports: list[MemoryTransport] = field(default_factory=list)
    _listeners: dict[Endpoint, MemoryTransport] = field(default_factory=dict)
    _behind_nat: set[str] = field(default_factory=set)
    _sides: dict[str, int] = field(default_factory=dict)
    _to_damage: set[tuple[str, str]] = field(default_factory=set)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        if not 0 < self.payload_scale < math.inf:
            raise OptionError("payload_scale", self.payload_scale, "above 0 and finite")

    def transport(
        self, host: str, identity: Identity, bytes_per_second: float | None = None, *,
        down_bytes_per_second: float | None = None, inbound: bool = True,
    ) -> MemoryTransport:  # fmt: skip
        """A transport for the host of this name, with a line of its own rates.

        Without `inbound` it is behind a NAT: it dials out, and whoever dials it gets no answer.
        """
        (self._behind_nat.discard if inbound else self._behind_nat.add)(host)
        up = bytes_per_second or self.bytes_per_second
        self.transports.append(MemoryTransport(self, host, identity, up, down_bytes_per_second or up))
        return self.transports[-1]

    def latency_between(self, dialler: str, listener: str) -> float:
        """Of a new connection, one way."""
        pairwise = self.pair_latency_seconds
        return pairwise(dialler, listener) if pairwise else self.latency_seconds()

    # -- faults

    def break_connection(self, one: str, other: str) -> None:
        """Every connection between these two hosts breaks: both ends learn of it now."""
        for channel in self._channels():
            if channel.hosts == (one, other):
                channel.fail("connection reset")

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """From now on nothing passes between hosts of different groups; those in none are one more group.

        Nobody is told. What is on its way is held back, and arrives after `heal`, in order, on connections that were
        not given up meanwhile. Who dials across waits.
        """
        self._sides = {host: number for number, group in enumerate(groups) for host in group}
        for channel in self._channels():
            channel.set_cut(self.is_cut(*channel.hosts))

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        self.partition(())

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a partition lies between these two hosts."""
        return self._sides.get(one) != self._sides.get(other)

    def corrupt(self, sender: str, receiver: str) -> None:
        """Damage the next frame that comes from one host to the other. Encryption notices: that connection breaks."""
        self._to_damage.add((sender, receiver))

    def damages(self, sender: str, receiver: str) -> bool:
        """Whether the frame that has just come is damaged."""
        if (sender, receiver) not in self._to_damage:
            return False
        self._to_damage.remove((sender, receiver))
        return True

    def _channels(self) -> list[MemoryChannel]:
        return [channel for transport in self.transports for channel in transport.channels]

    # -- connections

    async def connect(self, dialler: MemoryTransport, endpoint: Endpoint) -> MemoryChannel:
        """Raises PeerLost as the wire does: at once where nobody listens, late where nothing answers."""
        for pause_seconds in SYN_PAUSES_SECONDS:
            if not (self.is_cut(dialler.host, endpoint.host) or self._drops(dialler, endpoint)):
                break
            await asyncio.sleep(pause_seconds)
        else:
            raise PeerLost("can't be reached (Connection timed out)")
        latency_seconds = self.latency_between(dialler.host, endpoint.host)
        await asyncio.sleep(2 * latency_seconds)
        there = self._listeners.get(endpoint)
        if there is None:
            raise PeerLost("connection refused: nobody listens there")
        key = there.identity.public_key
        binding = hashlib.sha256(key + next(self._serial).to_bytes(8, "big")).digest()
        near = MemoryChannel(dialler, there, key, binding, str(endpoint), latency_seconds)
        far = MemoryChannel(there, dialler, key, binding, dialler.host, latency_seconds)
        near.meet(far)
        far.meet(near)
        there.accept(far)
        return near

    def _drops(self, dialler: MemoryTransport, endpoint: Endpoint) -> bool:
        return endpoint.host in self._behind_nat and endpoint.host != dialler.host


class MemoryTransport:
    """One host of the network."""

    max_waiting = MAX_WAITING

    def __init__(self, network: MemoryNetwork, host: str, identity: Identity, up: float, down: float) -> None:
        self.network, self.host, self.identity = network, host, identity
        self.uplink, self.downlink = Line(network.flows, up), Line(network.flows, down)
        self._is_dead = False
        self.channels: dict[MemoryChannel, None] = {}
        self._endpoint: Endpoint | None = None

    async def start(self, listen: Endpoint, accept: Callable[[Channel], None]) -> list[Endpoint]:
        endpoint = Endpoint(self.host, listen.port or 1)
        if endpoint in self.network._listeners:
            raise OptionError("listen", str(endpoint), "a free port")
        self._accept, self._context, self._endpoint = accept, copy_context(), endpoint
        self.network._listeners[endpoint] = self
        self.network.flows.attach(asyncio.get_running_loop())
        return [endpoint]

    def accept(self, channel: MemoryChannel) -> None:
        """Somebody dialled; what comes of it belongs to this host, not to who dialled."""
        self._context.run(self._accept, channel)

    async def dial(self, endpoint: Endpoint) -> Channel:
        if self._is_dead:
            raise PeerLost("this machine is dead")
        return await self.network.connect(self, endpoint)

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
