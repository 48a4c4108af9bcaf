"""The scenario `swarm`: many peers of the full stack (directory, roll, butterfly) average a few times, all exactly.

Each holds a small vector that stands for `state_bytes` on the lines. The swarm gathers first, with small states: what
is measured is averaging, not joining.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import torch

from shoal.core.loop import VirtualLoop
from shoal.core.options import check_number
from shoal.sim.checkers import RoundSeen
from shoal.sim.replica import VirtualReplica
from shoal.sim.world import Machine, World, digest_of
from shoal.strategies.moshpit import Moshpit

SIZE, PART_BYTES = 8192, 1024
"""Of the small vector. A share is cut into as many parts as that of a state of 16 MB is by default."""
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """`averagings` of `peers` in groups of `group_size`, over lines of `bytes_per_second` up and down.

    `unequal`: the fastest line is so many times faster than the slowest; the rates between are drawn evenly by their
    logarithm, and `bytes_per_second` is the fastest.
    """

    name: ClassVar[str] = "swarm"

    peers: int = 256
    group_size: int = 16
    averagings: int = 5
    every_seconds: float = 15.0
    state_bytes: float = 16e6
    bytes_per_second: float = 12.5e6
    latency_seconds: float = 0.05
    unequal: float = 1.0

    def __post_init__(self) -> None:
        check_number("peers", self.peers, 2, 2048, whole=True)
        check_number("averagings", self.averagings, 1, 1000, whole=True)
        check_number("state_bytes", self.state_bytes, 4 * SIZE, 1e12)
        check_number("bytes_per_second", self.bytes_per_second, 1000, 1e12)
        check_number("latency_seconds", self.latency_seconds, 0, 10)
        check_number("unequal", self.unequal, 1, 1000)
        self._strategy()

    def _strategy(self) -> Moshpit:
        seconds = 60 + 100 * self.state_bytes / self.bytes_per_second
        return Moshpit(
            group_size=self.group_size, every_seconds=self.every_seconds, timeout_seconds=seconds, part_bytes=PART_BYTES
        )

    def run(self, seed: int) -> dict[str, Any]:
        """Figures of the averagings. `cpu_seconds`, and events and messages per second, are of this machine."""
        world = World(seed=seed, latency_seconds=self.latency_seconds, bytes_per_second=self.bytes_per_second)
        figures = world.run(self._live)
        return {"seed": seed, **figures, **self._of_rounds(world.checkers.seen), "trace_digest": world.digest()}

    async def _live(self, world: World) -> dict[str, Any]:
        def replica(number: int) -> VirtualReplica:
            values = torch.randn(SIZE, generator=torch.Generator().manual_seed(world.random.getrandbits(40)))
            return VirtualReplica(values, drift=0.001, step_seconds=world.random.uniform(0.5, 1.0))

        def machine(number: int) -> Machine:
            return Machine(bytes_per_second=self.bytes_per_second / self.unequal ** world.random.random())

        peers = await world.swarm(self.peers, self._strategy(), replica, machine)
        loop, network = asyncio.get_running_loop(), world.network
        assert isinstance(loop, VirtualLoop)
        network.payload_scale = self.state_bytes / (4 * SIZE)
        before = loop.events, network.frames, _carried_bytes(world), time.process_time()
        done_before = max((one.number for peer in peers for one in peer.peer.history.applied), default=0)
        until = loop.time() + self.averagings * (self.every_seconds + PATIENCE_SECONDS)
        while min(_done(peer.peer.history.applied, done_before) for peer in peers) < self.averagings:
            assert loop.time() < until, "the averagings take too long"
            await asyncio.sleep(1.0)
        after = loop.events, network.frames, _carried_bytes(world), time.process_time()
        events, messages, moved_bytes, cpu_seconds = (new - old for old, new in zip(before, after, strict=True))
        averagings = [one for peer in peers for one in peer.peer.history.applied if one.number > done_before]
        return {
            "averagings": len({one.number for one in averagings}),
            "exact": sum(one.exact and len(one.members) == self.peers for one in averagings) / len(averagings),
            "events_per_second": events / cpu_seconds,
            "messages_per_second": messages / cpu_seconds,
            "messages": messages,
            "moved_bytes": moved_bytes,
            "cpu_seconds": cpu_seconds,
        }

    def _of_rounds(self, seen: Sequence[RoundSeen]) -> dict[str, Any]:
        """The rounds of the last averaging that everybody did: none of them is from the time of gathering."""
        last = max(one.group.roll.number for one in seen if len(one.group.roll.members) == self.peers)
        rounds = [one for one in seen if one.group.roll.number == last and one.ended_at is not None]
        seconds = median((one.ended_at or 0.0) - one.began_at for one in rounds)
        members = fmean(len(one.group.members) for one in rounds)
        transfer_seconds = 2 * self.state_bytes * (members - 1) / members / self.bytes_per_second
        return {
            "group_rounds": max(one.group.round_index for one in rounds) + 1,
            "round_seconds": seconds,
            "transfer_share": transfer_seconds / seconds,
        }

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The options, and means over the seeds. `transfer_share`: what equal lines would need at least, of a round."""
        peer_rounds = [self.peers * run["averagings"] * run["group_rounds"] for run in runs]
        return {
            "peers": self.peers,
            "group_size": self.group_size,
            "seeds": len(runs),
            "averagings": min(run["averagings"] for run in runs),
            "exact": min(run["exact"] for run in runs),
            "round_seconds": fmean(run["round_seconds"] for run in runs),
            "transfer_share": fmean(run["transfer_share"] for run in runs),
            "messages_per_peer_round": fmean(run["messages"] / n for run, n in zip(runs, peer_rounds, strict=True)),
            "bytes_per_peer_round": fmean(run["moved_bytes"] / n for run, n in zip(runs, peer_rounds, strict=True)),
            "events_per_second": fmean(run["events_per_second"] for run in runs),
            "messages_per_second": fmean(run["messages_per_second"] for run in runs),
            "cpu_seconds": fmean(run["cpu_seconds"] for run in runs),
            "trace_digest": digest_of(runs),
        }

    @staticmethod
    def plot(summaries: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the run time over the number of peers into a PNG file, and what messages x log(peers) would give."""
        from math import log2

        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = sorted(summaries, key=lambda one: one["peers"])
        counts = [one["peers"] for one in rows]
        seconds = [one["cpu_seconds"] for one in rows]
        work = [one["cpu_seconds"] * one["messages_per_second"] * log2(one["peers"]) for one in rows]
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(counts, seconds, marker="o", label="measured")
        scaled = [seconds[0] * one / work[0] for one in work]
        axes.plot(counts, scaled, linestyle="--", color="0.5", label="messages x log(peers), from the first point")
        axes.set(
            xscale="log", yscale="log", xlabel="peers", ylabel="processor seconds", title="What a simulated swarm costs"
        )
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        FigureCanvasAgg(figure).print_png(path)


def _carried_bytes(world: World) -> int:
    return sum(peer.transport.uplink.carried_bytes for peer in world.peers)


def _done(applied: Any, beyond: int) -> int:
    return sum(one.number > beyond for one in applied)
