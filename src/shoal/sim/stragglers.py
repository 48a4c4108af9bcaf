"""The scenario `stragglers`: how long unequal peers take to learn together, in virtual seconds, with real gradients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from shoal.core.errors import OptionError
from shoal.core.options import check_number
from shoal.sim.learners import Learner, log_normal, teacher_task
from shoal.sim.world import SimPeer, World, digest_of
from shoal.strategies import AnyStrategy
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

MOSHPIT, ALLREDUCE, ALONE = "moshpit", "allreduce", "alone"
EVERY_SECONDS, LOOK_SECONDS = 2.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """`slow_peers` of `peers` are `slowness` times slower; the time of a step is log-normal, `sigma` around the peer's
    median. `strategy`: moshpit, allreduce, or alone (one peer of ordinary speed by itself).
    """

    name: ClassVar[str] = "stragglers"

    strategy: str = MOSHPIT
    peers: int = 8
    slow_peers: int = 2
    slowness: float = 4.0
    step_seconds: float = 0.1
    sigma: float = 0.3
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.strategy not in (MOSHPIT, ALLREDUCE, ALONE):
            raise OptionError("strategy", self.strategy, f"one of {MOSHPIT}, {ALLREDUCE}, {ALONE}")
        check_number("peers", self.peers, 2, 256, whole=True)
        check_number("slow_peers", self.slow_peers, 0, self.peers - 1, whole=True)
        check_number("slowness", self.slowness, 1, 1000)
        check_number("step_seconds", self.step_seconds, 0.001, 60)
        check_number("sigma", self.sigma, 0, 3)
        check_number("seconds", self.seconds, 5, 10_000)

    def run(self, seed: int) -> dict[str, Any]:
        """`accuracy_by_second`: the mean over the peers, of each one's own test accuracy."""
        world = World(seed=seed)
        accuracies = world.run(self._live)
        return {
            "seed": seed,
            "accuracy_by_second": accuracies,
            "averagings": sum(len(peer.peer.history.applied) for peer in world.peers),
            "trace_digest": world.digest(),
        }

    async def _live(self, world: World) -> list[float]:
        task = teacher_task(0)
        count = 1 if self.strategy == ALONE else self.peers
        strategy: AnyStrategy = Moshpit(group_size=4, every_seconds=EVERY_SECONDS)
        if self.strategy == ALLREDUCE:
            strategy = AllReduce(every_seconds=EVERY_SECONDS)
        learners = []
        for number in range(count):
            slowness = self.slowness if number >= self.peers - self.slow_peers else 1.0
            cost = log_normal(world.random, self.step_seconds * slowness, self.sigma)
            learners.append(Learner(task, world.random.getrandbits(40), cost))
        began_at = asyncio.get_running_loop().time()
        starting = asyncio.create_task(world.swarm(count, strategy, lambda number: learners[number].replica))
        accuracies = []
        while asyncio.get_running_loop().time() < began_at + self.seconds:
            await asyncio.sleep(LOOK_SECONDS)
            accuracies.append(fmean(learner.accuracy() for learner in learners))
        peers: list[SimPeer] = await starting
        assert len(peers) == count
        return accuracies

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The options, and means over the seeds."""
        curves = [run["accuracy_by_second"] for run in runs]
        curve = [fmean(at) for at in zip(*curves, strict=True)]
        return {
            "strategy": self.strategy,
            "peers": self.peers,
            "slow_peers": self.slow_peers,
            "slowness": self.slowness,
            "seeds": len(runs),
            "seconds_to_80_percent": _first(curve, 0.8),
            "seconds_to_90_percent": _first(curve, 0.9),
            "last_accuracy": curve[-1],
            "accuracy_by_second": curve,
            "trace_digest": digest_of(runs),
        }

    @staticmethod
    def plot(summaries: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the mean accuracy over virtual time, one curve per summary, into a PNG file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for one in summaries:
            label = f"{one['strategy']}, {one['peers']} peers, {one['slow_peers']} of them {one['slowness']:g} x slower"
            curve = one["accuracy_by_second"]
            axes.plot(range(1, len(curve) + 1), curve, label="one peer alone" if one["strategy"] == ALONE else label)
        axes.set(xlabel="virtual seconds", ylabel="test accuracy", title="Learning with unequal peers")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        FigureCanvasAgg(figure).print_png(path)


def _first(curve: Sequence[float], bound: float) -> float | None:
    return next((float(second) for second, accuracy in enumerate(curve, 1) if accuracy >= bound), None)
