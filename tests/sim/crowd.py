"""Peers of one world that all know each other, and averagings that they call for together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from shoal.planning.collector import collector_of
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL
from shoal.sim import SimPeer, VirtualReplica, World
from shoal.strategies import AnyStrategy
from shoal.tensors.flat import Shapes, Vectors

MEET_SECONDS = 10.0


def shapes_of_vectors(vectors: Vectors) -> Shapes:
    """As the two flat tensors that they are."""
    return [((len(vectors[0]),), "float32"), ((len(vectors[1]),), "float64")]


def now() -> float:
    return asyncio.get_running_loop().time()


async def crowd(
    world: World, count: int, strategy: AnyStrategy, replica: Callable[[], VirtualReplica | None] = lambda: None
) -> list[SimPeer]:
    """A founder, and the others through it, all at once; returns when everybody knows everybody."""
    founder = await world.start("p0", strategy=strategy, replica=replica())
    joining = [world.start(f"p{n}", peers=[founder.address], replica=replica()) for n in range(1, count)]
    peers = [founder, *await asyncio.gather(*joining)]
    began = now()
    while not all(len(peer.peer.members.members) == count - 1 for peer in peers):
        assert now() < began + MEET_SECONDS, [len(peer.peer.members.members) for peer in peers]
        await asyncio.sleep(0.05)
    return peers


def next_collector(peers: Sequence[SimPeer], series: str = CALL) -> SimPeer:
    """Who collects the next number of a series, where all have the same view."""
    charter = peers[0].peer.members.charter
    assert charter is not None
    number = 1 + max(peer.peer.rolls.newest.get(series, 0) for peer in peers)
    nearest = collector_of(charter.charter_id, series, number, [peer.id for peer in peers])
    return next(peer for peer in peers if peer.id == nearest)


async def call_for_average(
    peers: Sequence[SimPeer], strategy: AnyStrategy, inputs: Sequence[Vectors], weights: Sequence[float],
    timeout_seconds: float | None = None,
) -> list[Outcome | BaseException]:  # fmt: skip
    """All call at once; what each of them got or raised."""
    averaging = [
        strategy.all_reduce(
            peer.peer, CALL, vectors, weight, shapes_of_vectors(vectors), timeout_seconds=timeout_seconds
        )
        for peer, vectors, weight in zip(peers, inputs, weights, strict=True)
    ]
    return await asyncio.gather(*averaging, return_exceptions=True)
