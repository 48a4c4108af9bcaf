"""Averagings that are made to fail, again and again, in one process on real sockets, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import psutil
import torch

from shoal.core.address import Endpoint
from shoal.core.clock import Clock
from shoal.core.compute import ThreadCompute
from shoal.core.errors import AveragingError, TensorError
from shoal.core.events import EventLog
from shoal.net.host import Host
from shoal.net.identity import Identity
from shoal.net.tcp import TcpTransport
from shoal.overlay.member_record import TRAINER, TRAINING
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.protocols.outcome import Outcome
from shoal.protocols.peer import Peer
from shoal.protocols.roll_record import CALL
from shoal.strategies.allreduce import AllReduce

PEERS, SIZE = 3, 100_000
SHAPES = [((SIZE,), "float32")]


@dataclass
class Left:
    """Memory in bytes, open files and tasks, after so many failed averagings."""

    rss: int
    files: int
    tasks: int


@dataclass
class Soak:
    before: Left
    after: Left
    reasons: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    succeeded: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        return self.after.rss / self.before.rss - 1

    def __str__(self) -> str:
        return (
            f"{self.failed} averagings failed ({dict(self.reasons)}), {self.succeeded} did not; memory "
            f"{self.before.rss / 1e6:.1f} -> {self.after.rss / 1e6:.1f} MB ({self.growth:+.2%}), files "
            f"{self.before.files} -> {self.after.files}, tasks {self.before.tasks} -> {self.after.tasks}"
        )


@contextlib.asynccontextmanager
async def swarm() -> AsyncIterator[list[Peer]]:
    """Peers that know each other and train, in this process."""
    from concurrent.futures import ThreadPoolExecutor

    clock = Clock()
    async with contextlib.AsyncExitStack() as stack:
        compute = ThreadCompute(stack.enter_context(ThreadPoolExecutor(1)))
        peers: list[Peer] = []
        for number in range(PEERS):
            me = Identity(os.urandom(32))
            options = {"clock": clock, "random": random.Random(number), "log": EventLog(clock.now)}
            host = await stack.enter_async_context(Host(me, TcpTransport(me), run="soak", secret="a-secret", **options))
            members = Membership(host, role=TRAINER)
            peers.append(Peer(host, members, Register(members), compute))
            await host.start(Endpoint("127.0.0.1", 0))
            members.start()
        peers[0].members.found("soak")
        for number, peer in enumerate(peers):
            for other in peers[:number]:
                await peer.members.meet(list(other.host.endpoints), other.id)
            peer.members.update(state=TRAINING)
        yield peers


async def soak(count: int, warm_up: int) -> Soak:
    """So many averagings that fail at one peer at least, each in one of several ways."""
    async with swarm() as peers:
        result = Soak(Left(0, 0, 0), Left(0, 0, 0))
        ways = itertools.cycle([_too_little_time, _other_shapes] * 10 + [_connections_break])
        while result.failed < warm_up:
            await _fail(peers, next(ways), result)
        result.before = await _left(peers)
        result.failed = result.succeeded = 0
        while result.failed < count:
            await _fail(peers, next(ways), result)
        result.after = await _left(peers)
        result.faults = [str(fault) for peer in peers for fault in peer.host.faults]
        return result


async def _fail(peers: list[Peer], way, result: Soak) -> None:
    """One averaging of all, made to fail. It counts once, however many peers it failed at."""
    outcomes = await way(peers)
    unexpected = [one for one in outcomes if not isinstance(one, Outcome | AveragingError | TensorError)]
    assert not unexpected, unexpected
    errors = [one for one in outcomes if not isinstance(one, Outcome)]
    result.failed += bool(errors)
    result.succeeded += not errors
    result.reasons.update({type(error).__name__ for error in errors})
    for _ in range(200):  # until they are all linked again
        if all(len(peer.members.others(TRAINING)) == PEERS - 1 for peer in peers):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("they did not find each other again")


def _all_average(peers: list[Peer], timeout_seconds: float, sizes: tuple[int, ...] = (SIZE,) * PEERS) -> list:
    strategy = AllReduce(part_bytes=1 << 15)

    async def one(peer: Peer, size: int) -> Outcome:
        vectors = torch.ones(size), torch.empty(0, dtype=torch.float64)
        return await strategy.all_reduce(
            peer, CALL, vectors, 1.0, [((size,), "float32")], timeout_seconds=timeout_seconds
        )

    return [asyncio.create_task(one(peer, size)) for peer, size in zip(peers, sizes, strict=True)]


async def _too_little_time(peers: list[Peer]) -> list:
    return await asyncio.gather(*_all_average(peers, 0.008), return_exceptions=True)


async def _connections_break(peers: list[Peer]) -> list:
    """All connections of one peer, in the middle."""
    averaging = _all_average(peers, 5.0)
    await asyncio.sleep(0.02)
    for remote in list(peers[0].host.remotes.values()):
        for channel in [*remote.links, *remote.streams]:
            channel.abort()
    return await asyncio.gather(*averaging, return_exceptions=True)


async def _other_shapes(peers: list[Peer]) -> list:
    return await asyncio.gather(*_all_average(peers, 5.0, (SIZE, SIZE, SIZE - 1)), return_exceptions=True)


async def _left(peers: list[Peer]) -> Left:
    """Once what was under way has ended: the fewest tasks and files over a while, since streams rest in pools."""
    for peer in peers:
        for remote in peer.host.remotes.values():
            for _, channel in remote.idle_streams:
                channel.close()
            remote.idle_streams = []
    files, tasks = [], []
    for _ in range(30):
        await asyncio.sleep(0.1)
        files.append(psutil.Process().num_fds())
        tasks.append(len(asyncio.all_tasks()))
    gc.collect()
    return Left(psutil.Process().memory_info().rss, min(files), min(tasks))


def check(result: Soak, most_growth: float) -> None:
    assert not result.faults, result.faults
    assert result.growth < most_growth, result
    assert result.after.files <= result.before.files + 6, result
    assert result.after.tasks <= result.before.tasks + 6, result
    assert len(result.reasons) >= 2, "they fail in several ways"
