"""Elasticity, in the whole protocol stack on virtual time: Moshpit reference, section 8.0 and check 28.

Peers come and go while all of them train. Each averaging is planned from its own roll, and its result is the weighted
mean of what its members brought, whatever their number.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.planning.grid import plan_grid
from shoal.protocols.outcome import Outcome
from shoal.protocols.replica import Snapshot
from shoal.sim import SimPeer, VirtualReplica, World
from shoal.strategies.moshpit import Moshpit

GROUP_SIZE = 6
STRATEGY = Moshpit(group_size=GROUP_SIZE, every_seconds=1.5)


class Recorded(VirtualReplica):
    """Keeps the snapshot of the averaging that is under way."""

    snapshot_taken: Snapshot | None = None

    async def snapshot(self) -> Snapshot:
        self.snapshot_taken = await super().snapshot()
        return self.snapshot_taken


@dataclass
class Averagings:
    """By roll: what each member brought, and what each of those who applied it got."""

    brought: dict[str, dict[str, Snapshot]] = field(default_factory=dict)
    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)

    def watch(self, peer: SimPeer) -> None:
        """From now on; before, none of its averagings counts."""
        history = peer.peer.history
        averaged = history.averaged

        def watched(outcome: Outcome, stale_steps: int) -> None:
            self.brought.setdefault(outcome.roll.roll_id, {})[peer.id] = peer.replica.snapshot_taken
            self.outcomes.setdefault(outcome.roll.roll_id, {})[peer.id] = outcome
            averaged(outcome, stale_steps)

        history.averaged = watched

    def is_whole(self, roll_id: str) -> bool:
        """Whether all members have applied it by now."""
        outcomes = self.outcomes[roll_id]
        return outcomes.keys() == {*next(iter(outcomes.values())).roll.members}

    def check(self, roll_id: str) -> int:
        """One averaging of which all members are watched. Returns how many they were."""
        outcomes, brought = self.outcomes[roll_id], self.brought[roll_id]
        roll = next(iter(outcomes.values())).roll
        count, dims = len(roll.members), plan_grid(len(roll.members), GROUP_SIZE)
        rows = np.stack([brought[who].vectors[0].double().numpy() for who in roll.members])
        mean = np.average(rows, axis=0, weights=roll.weights)
        for who, outcome in outcomes.items():
            assert outcome.roll == roll
            assert roll.weights[roll.members.index(who)] == brought[who].weight
            assert outcome.rounds_planned == outcome.rounds_done == len(dims)
            assert all(len(report.members) <= GROUP_SIZE for report in outcome.rounds)
            assert outcome.exact
            assert not outcome.failures
            assert np.abs(outcome.vectors[0].double().numpy() - mean).max() <= 1e-6 * np.abs(rows).max()
        return count


def test_check_28_from_16_to_40_to_24_peers_each_averaging_is_planned_anew_and_exact() -> None:
    """Unequal drifts and paces: unequal values and weights. Nobody is told how many there are."""

    async def scenario(world: World) -> None:
        watched = Averagings()

        async def start(number: int) -> SimPeer:
            replica = Recorded(torch.full((300,), 5.0), drift=1 + number % 7, step_seconds=0.2 + 0.05 * (number % 5))
            named = [] if number == 0 else [world.peers[0].address]
            peer = await world.start(f"p{number}", peers=named, replica=replica, strategy=STRATEGY)
            watched.watch(peer)
            return peer

        async def counts_while(seconds: float) -> list[int]:
            """How many members had the averagings that all of them applied in this time."""
            before = set(watched.outcomes)
            await asyncio.sleep(seconds)
            new = [roll_id for roll_id in watched.outcomes if roll_id not in before]
            whole = [roll_id for roll_id in new if watched.is_whole(roll_id)]
            return [watched.check(roll_id) for roll_id in whole]

        first = await start(0)
        await first.attached.wait()
        await asyncio.gather(*(start(number) for number in range(1, 16)))
        for peer in world.peers:
            await peer.attached.wait()
        await asyncio.sleep(2.5)
        assert (await counts_while(4))[-2:] == [16] * 2
        await asyncio.gather(*(start(number) for number in range(16, 40)))
        for peer in world.peers:
            await peer.attached.wait()
        await asyncio.sleep(2.5)
        assert (await counts_while(4))[-2:] == [40] * 2
        gone = world.peers[5:37:2]
        await asyncio.gather(*(peer.leave() if number % 2 else peer.crash() for number, peer in enumerate(gone)))
        await asyncio.sleep(2.5)
        assert (await counts_while(4))[-2:] == [24] * 2
        assert {len(plan_grid(count, GROUP_SIZE)) for count in (16, 24)} == {2}
        assert len(plan_grid(40, GROUP_SIZE)) == 3

    World(seed=28).run(scenario)
