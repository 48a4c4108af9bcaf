"""A group of hosts in one memory network, each with a link to each other one, that average with the real butterfly."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.core.address import Endpoint
from shoal.core.clock import Clock, virtual_wall
from shoal.core.events import EventLog
from shoal.net.host import Host
from shoal.net.identity import Identity
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.protocols.butterfly import butterfly
from shoal.protocols.outcome import Outcome, is_exact
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import whole_group
from shoal.protocols.rounds import Rounds

BYTES_PER_SECOND = 12.5e6


@dataclass
class Member:
    host: Host
    transport: MemoryTransport
    rounds: Rounds

    @property
    def traffic(self) -> tuple[int, int]:
        return self.host.sent.total_bytes, self.host.received.total_bytes


@contextlib.asynccontextmanager
async def members(
    count: int, strangers: Iterable[tuple[int, int]] = (), latency_seconds: Callable[[], float] = lambda: 0.01
) -> AsyncIterator[list[Member]]:
    """`strangers`: pairs that have never met."""
    network, clock = MemoryNetwork(latency_seconds, BYTES_PER_SECOND), Clock(virtual_wall)
    async with contextlib.AsyncExitStack() as stack:
        group = []
        for number in range(count):
            identity = Identity(number.to_bytes(32, "big"))
            transport = network.transport(f"host-{number}", identity)
            log = EventLog(clock.now)
            options = {"clock": clock, "random": random.Random(number), "log": log}
            host = await stack.enter_async_context(Host(identity, transport, run="r", secret="a-secret", **options))
            await host.start(Endpoint("any", 0))
            group.append(Member(host, transport, Rounds(host)))
        for one in range(count):
            for other in range(one + 1, count):
                if (one, other) not in strangers:
                    await meet(group[one].host, group[other].host)
        yield group
        assert not any(member.host.faults for member in group)


async def meet(one: Host, other: Host) -> None:
    await one.link(other.endpoints, other.peer_id)
    one.know(other.peer_id, other.endpoints)
    other.know(one.peer_id, one.endpoints)


async def average(
    group: Sequence[Member],
    vectors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[float],
    bandwidths: Sequence[float | None],
    *,
    part_bytes: int = 1 << 16,
    absent: Sequence[int] = (),
    deaths: Mapping[int, float] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    timeout_seconds: float = 60.0,
) -> list[Outcome | Exception | None]:
    """What each member's butterfly returned or raised; None for those who are in the roll and do not come.

    `deaths`: after how many seconds a member dies.
    """
    ids = [member.host.peer_id for member in group]
    roll = Roll(f"roll-{weights}", "call", 1, ids, list(weights), list(bandwidths))

    async def one(number: int, member: Member) -> Outcome:
        result = await butterfly(
            member.rounds, whole_group(roll), vectors[number], source=member.host.peer_id, mass=weights[number],
            part_bytes=part_bytes, timeout_seconds=timeout_seconds,
        )  # fmt: skip
        return Outcome(result.vectors, roll, 1, (result.report,), (), is_exact(roll, result))

    running = {
        number: asyncio.create_task(one(number, member)) for number, member in enumerate(group) if number not in absent
    }
    for number, after_seconds in (deaths or {}).items():
        asyncio.get_running_loop().call_later(after_seconds, _die, group[number], running[number])
    watching = asyncio.create_task(_call_often(meanwhile))
    try:
        results = await asyncio.gather(*running.values(), return_exceptions=True)
    finally:
        watching.cancel()
    by_number = dict(zip(running, results, strict=True))
    return [by_number.get(number) for number in range(len(group))]


def _die(member: Member, averaging: asyncio.Task[Outcome]) -> None:
    member.transport.crash()
    averaging.cancel()


async def _call_often(work: Callable[[], object]) -> None:
    while True:
        work()
        await asyncio.sleep(0.005)
