"""The scenario `partition`: a swarm falls into two halves for a while, and both must go on and find together again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch

from shoal.core.options import check_number
from shoal.sim.checkers import Disturbance
from shoal.sim.replica import VirtualReplica
from shoal.sim.world import SimPeer, World, digest_of
from shoal.strategies.moshpit import Moshpit

BEFORE_SECONDS, PATIENCE_SECONDS = 10.0, 120.0


@dataclass(frozen=True, kw_only=True)
class Partition:
    """`peers` average in groups of `group_size` every `every_seconds`; for `parted_seconds` every other one is cut off
    from the rest. Nobody is told: what is sent across waits on the way.
    """

    name: ClassVar[str] = "partition"

    peers: int = 16
    group_size: int = 4
    every_seconds: float = 3.0
    parted_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_number("peers", self.peers, 4, 1024, whole=True)
        check_number("parted_seconds", self.parted_seconds, 0, 3600)
        self._strategy()

    def _strategy(self) -> Moshpit:
        return Moshpit(group_size=self.group_size, every_seconds=self.every_seconds)

    def run(self, seed: int) -> dict[str, Any]:
        """`averagings_in_halves`: how many each half did while apart. `reunion_seconds`: from the end of the partition
        to the first averaging of all that is exact. `disagreement`: the largest difference of two peers after it."""
        world = World(seed=seed)
        figures = world.run(self._live)
        return {"seed": seed, **figures, "trace_digest": world.digest()}

    async def _live(self, world: World) -> dict[str, Any]:
        random = world.random

        def replica(number: int) -> VirtualReplica:
            drift, step_seconds = random.uniform(-0.01, 0.01), random.uniform(0.1, 0.5)
            return VirtualReplica(torch.full((100,), float(number)), drift=drift, step_seconds=step_seconds)

        peers = await world.swarm(self.peers, self._strategy(), replica)
        await asyncio.sleep(BEFORE_SECONDS)
        halves = peers[::2], peers[1::2]
        parted_at = _now()
        world.network.partition([[peer.name for peer in halves[1]]])
        await asyncio.sleep(self.parted_seconds)
        alone = [_averagings(half, parted_at) for half in halves]
        world.network.heal()
        healed_at = _now()
        cut = frozenset(peer.id for peer in halves[1])
        world.checkers.disturbances.append(Disturbance(parted_at, healed_at + self.every_seconds, cut, cut=True))
        while not _are_one(peers, healed_at):
            if _now() > healed_at + PATIENCE_SECONDS:
                raise AssertionError(f"{PATIENCE_SECONDS:g} s after the partition the halves are still two")
            await asyncio.sleep(0.1)
        reunion_seconds = _now() - healed_at
        values = np.stack([peer.replica.tensors[0].numpy() for peer in peers if peer.replica])
        return {
            "averagings_in_halves": alone,
            "reunion_seconds": reunion_seconds,
            "disagreement": float(np.ptp(values, axis=0).max()),
        }

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The options, and over the seeds the fewest averagings of a half, the mean and the longest reunion."""
        reunions = [run["reunion_seconds"] for run in runs]
        return {
            "peers": self.peers,
            "group_size": self.group_size,
            "parted_seconds": self.parted_seconds,
            "seeds": len(runs),
            "fewest_averagings_in_a_half": min(min(run["averagings_in_halves"]) for run in runs),
            "mean_reunion_seconds": fmean(reunions),
            "longest_reunion_seconds": max(reunions),
            "largest_disagreement": max(run["disagreement"] for run in runs),
            "trace_digest": digest_of(runs),
        }


def _averagings(half: Sequence[SimPeer], since: float) -> int:
    """How many exact averagings of just this half there were."""
    names = {peer.id for peer in half}
    done = {
        one.number
        for peer in half
        for one in peer.peer.history.applied
        if set(one.members) == names and one.exact and peer.born_at + one.at_seconds > since
    }
    return len(done)


def _are_one(peers: Sequence[SimPeer], since: float) -> bool:
    names = {peer.id for peer in peers}
    lasts = [(peer.born_at, peer.peer.history.applied[-1]) for peer in peers]
    return all(set(one.members) == names and one.exact and born_at + one.at_seconds > since for born_at, one in lasts)


def _now() -> float:
    return asyncio.get_running_loop().time()
