"""Peers that gather gradients of a quadratic on virtual time, and one process that replays what they report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.protocols.history import Given, GlobalStep
from shoal.sim import SimPeer, VirtualReplica, World
from shoal.strategies import AnyStrategy

SIZE, BATCH, RATE = 20, 8.0, 0.1


def gradient_of(name: str, values: Tensor, batch: int) -> Tensor:
    """Of the mean distance to BATCH random points: batch number `batch` of the peer `name`."""
    generator = torch.Generator().manual_seed(1000 * int(name[1:]) + batch)
    return values - (torch.randn(values.shape, generator=generator) + 1.0)


def learner(name: str, step_seconds: float, size: int = SIZE) -> VirtualReplica:
    return VirtualReplica(
        torch.zeros(size), drift=0.0, step_seconds=step_seconds, samples_per_step=BATCH,
        gradient=lambda values, batch: gradient_of(name, values, batch), learning_rate=RATE,
    )  # fmt: skip


async def start(world: World, paces: Sequence[float], strategy: AnyStrategy, size: int = SIZE) -> list[SimPeer]:
    """p0, p1, ... with these seconds per batch, all in the run."""
    founder = await world.start("p0", strategy=strategy, replica=learner("p0", paces[0], size))
    rest = [
        world.start(f"p{number}", peers=[founder.address], replica=learner(f"p{number}", pace, size))
        for number, pace in enumerate(paces[1:], start=1)
    ]
    peers = [founder, *await asyncio.gather(*rest)]
    for peer in peers:
        await peer.attached.wait()
    return peers


def steps_of(peer: SimPeer) -> list[GlobalStep]:
    return list(peer.peer.history.steps)


def given_by_name(peers: Sequence[SimPeer], step: GlobalStep) -> dict[str, Given]:
    names = {peer.id: peer.name for peer in peers}
    return {names[who]: given for who, given in step.given.items()}


def events(peer: SimPeer, *kinds: str) -> list[str]:
    return [event.reason for event in peer.peer.log.recent if event.kind in kinds]


def replay(peers: Sequence[SimPeer], until_step: int, size: int = SIZE) -> Tensor:
    """One process that takes the reported batches, and no others, with plain SGD."""
    reported = {step.step: given_by_name(peers, step) for peer in peers for step in steps_of(peer)}
    values = torch.zeros(size)
    for step in range(1, until_step + 1):
        total = sum(given.samples for given in reported[step].values())
        mean = torch.zeros(size)
        for name, given in reported[step].items():
            batches = [batch for first, last in given.batches for batch in range(first, last + 1)]
            assert given.samples == BATCH * len(batches)
            for batch in batches:
                mean += gradient_of(name, values, batch) * (BATCH / total)
        values = values - RATE * mean
    return values
