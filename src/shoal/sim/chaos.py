"""The scenario `chaos`: a small swarm in which, by the seed, anything fails at any time, with all checkers on.

First the faults, for a while; then they end, and what lives must find together: one swarm, whose averagings are exact.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch

from shoal.overlay.member_record import TRAINING
from shoal.protocols.taking_part import Strategy
from shoal.sim.checkers import Disturbance
from shoal.sim.replica import VirtualReplica
from shoal.sim.world import Machine, SimPeer, World, digest_of
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

FAULTS_SECONDS, CALM_SECONDS = 15.0, 60.0
FEWEST = 3
"""Peers that are left alive: fewer would have nobody to take over from."""
AFTERMATH_SECONDS = 4.0
"""For so long after a fault a peer may not yet know what it missed."""


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Everything is drawn by the seed: how many peers, their strategy, lines and steps, and what happens to them."""

    name: ClassVar[str] = "chaos"

    def run(self, seed: int) -> dict[str, Any]:
        """Raises AssertionError where something does not hold that must."""
        random = Random(f"chaos {seed}")
        world = World(
            seed=seed, latency_seconds=random.uniform(0.002, 0.08), bytes_per_second=10 ** random.uniform(4.7, 7)
        )
        figures = world.run(_Story(world, random).live)
        rounds = len(world.checkers.seen)
        return {"seed": seed, **figures, "group_rounds": rounds, "trace_digest": world.digest()}

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Totals over the seeds."""
        faults: Counter[str] = Counter()
        for run in runs:
            faults.update(run["faults"])
        return {
            "seeds": len(runs),
            "peers": sum(run["peers"] for run in runs),
            "averagings": sum(run["averagings"] for run in runs),
            "group_rounds": sum(run["group_rounds"] for run in runs),
            **dict(sorted(faults.items())),
            "longest_reunion_seconds": max(run["reunion_seconds"] for run in runs),
            "trace_digest": digest_of(runs),
        }


class _Story:
    """One swarm's life."""

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random = world, random
        self.faults: Counter[str] = Counter()
        self.size = random.randint(20, 400)
        self.count = random.randint(FEWEST, 8)
        self._serial = 0
        self._busy: dict[str, None] = {}  # names of peers to which something is happening
        self._is_parted = False

    async def live(self, world: World) -> dict[str, Any]:
        strategy = self._strategy()
        world.checkers.longest_round_seconds = strategy.timeout_seconds
        first = await self._join(strategy)
        await first.attached.wait()
        await asyncio.gather(*(self._join() for _ in range(self.count - 1)))
        until = _now() + FAULTS_SECONDS
        async with asyncio.TaskGroup() as tasks:
            while (pause := self.random.expovariate(0.7)) < until - _now():
                await asyncio.sleep(pause)
                tasks.create_task(self._something(), name="fault")
        calm_at = _now()
        while not self._is_one_swarm(calm_at):
            assert _now() < calm_at + CALM_SECONDS, self._who_is_apart(calm_at)
            await asyncio.sleep(0.5)
        return {
            "peers": len(world.peers),
            "faults": dict(self.faults),
            "averagings": sum(len(peer.peer.history.applied) for peer in world.peers),
            "reunion_seconds": _now() - calm_at,
        }

    def _strategy(self) -> AllReduce | Moshpit:
        random = self.random
        options: dict[str, Any] = {
            "every_seconds": random.uniform(0.5, 3.0),
            "timeout_seconds": random.uniform(8.0, 20.0),
            "part_bytes": random.choice([1024, 4096, 524_288]),
        }
        return AllReduce(**options) if random.random() < 0.4 else Moshpit(group_size=random.randint(3, 5), **options)

    # -- peers

    async def _join(self, strategy: Strategy | None = None) -> SimPeer:
        random, self._serial = self.random, self._serial + 1
        machine = Machine(
            bytes_per_second=10 ** random.uniform(4.7, 7) if random.random() < 0.3 else None,
            skew_seconds=random.uniform(-20, 20) if random.random() < 0.3 else 0.0,
        )
        peers = [peer.address for peer in self._settled()]
        return await self.world.start(
            f"p{self._serial}", peers=peers, strategy=strategy, replica=self._replica(), machine=machine
        )

    def _replica(self) -> VirtualReplica:
        random = self.random
        values = torch.randn(self.size, generator=torch.Generator().manual_seed(random.getrandbits(30)))
        return VirtualReplica(values, drift=random.uniform(-0.01, 0.01), step_seconds=random.uniform(0.05, 0.6))

    def _settled(self) -> list[SimPeer]:
        """Who trains, and to whom nothing is happening just now."""
        return [peer for peer in self.world.alive() if peer.attached.is_set() and peer.name not in self._busy]

    # -- faults

    async def _something(self) -> None:
        """One fault, from its beginning to its end."""
        kinds: list[Callable[[], Awaitable[bool]]] = [
            self._crash, self._leave, self._restart, self._newcomer, self._pause, self._slow_down, self._break,
            self._damage, self._partition,
        ]  # fmt: skip
        kind = self.random.choice(kinds)
        if await kind():
            self.faults[kind.__name__.removeprefix("_")] += 1

    def _victims(self, count: int = 1) -> list[SimPeer]:
        """So many settled peers, none where too few would be left."""
        settled = self._settled()
        return self.random.sample(settled, count) if len(settled) >= FEWEST + count else []

    def _disturbed(self, start: float, *peers: SimPeer, cut: bool = False) -> None:
        names = frozenset(peer.id for peer in peers)
        self.world.checkers.disturbances.append(Disturbance(start, _now() + AFTERMATH_SECONDS, names, cut))

    async def _crash(self) -> bool:
        for peer in self._victims():
            self._disturbed(_now(), peer)
            await peer.crash()
            return True
        return False

    async def _leave(self) -> bool:
        for peer in self._victims():
            self._disturbed(_now(), peer)
            await peer.leave()
            return True
        return False

    async def _restart(self) -> bool:
        for peer in self._victims():
            self._disturbed(_now(), peer)
            await peer.crash()
            await asyncio.sleep(self.random.uniform(0.1, 5.0))
            peers = [other.address for other in self._settled()]
            again = await self.world.start(
                peer.name, peers=peers, replica=self._replica(), key=peer.key, port=peer.port, machine=peer.machine
            )
            self._disturbed(_now(), again)
            return True
        return False

    async def _newcomer(self) -> bool:
        if self._is_parted or len(self.world.alive()) > 10:
            return False
        await self._join()
        return True

    async def _pause(self) -> bool:
        for peer in self._victims():
            began_at, self._busy[peer.name] = _now(), None
            peer.pause()
            await asyncio.sleep(self.random.uniform(0.2, 8.0))
            peer.resume()
            del self._busy[peer.name]
            self._disturbed(began_at, peer)
            return True
        return False

    async def _slow_down(self) -> bool:
        for peer in self._victims():
            peer.slow_down(self.random.uniform(1.0, 4.0))
            return True
        return False

    async def _break(self) -> bool:
        if victims := self._victims(2):
            self.world.network.break_connection(victims[0].name, victims[1].name)
        return bool(victims)

    async def _damage(self) -> bool:
        if victims := self._victims(2):
            self.world.network.corrupt(victims[0].name, victims[1].name)
        return bool(victims)

    async def _partition(self) -> bool:
        settled = self._settled()
        if self._is_parted or len(settled) < 2:
            return False
        began_at, self._is_parted = _now(), True
        side = self.random.sample(settled, self.random.randint(1, len(settled) - 1))
        self.world.network.partition([[peer.name for peer in side]])
        await asyncio.sleep(self.random.uniform(0.5, 10.0))
        self.world.network.heal()
        self._disturbed(began_at, *side, cut=True)
        self._is_parted = False
        return True

    # -- the end

    def _is_one_swarm(self, since: float) -> bool:
        """Everybody who lives trains, and was in one exact averaging of all, begun after the last fault."""
        alive = self.world.alive()
        lasts = [peer.peer.history.applied[-1] if peer.peer.history.applied else None for peer in alive]
        everybody = {peer.id for peer in alive}
        return all(
            last is not None
            and last.exact
            and set(last.members) == everybody
            and peer.born_at + last.at_seconds > since + 1.0
            for peer, last in zip(alive, lasts, strict=True)
        )

    def _who_is_apart(self, since: float) -> str:
        lines = [f"{CALM_SECONDS:g} s after the last fault the swarm is not one:"]
        for peer in self.world.alive():
            applied, failures = peer.peer.history.applied, peer.peer.history.failures
            last = applied[-1] if applied else None
            state = peer.peer.members.me.state
            knows = f"is {state}, knows {len(peer.peer.members.others(TRAINING))} others that train"
            lines.append(f"{peer.name} {peer.id[:6]} {knows}")
            if last:
                at = peer.born_at + last.at_seconds
                lines[-1] += f"; averaged at {at:.1f} s with {len(last.members)}, exact: {last.exact}"
            if failures:
                lines[-1] += f"; failed at {peer.born_at + failures[-1].at_seconds:.1f} s: {failures[-1].reason}"
        return "\n".join(lines)


def _now() -> float:
    return asyncio.get_running_loop().time()
