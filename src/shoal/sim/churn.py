"""The scenario `churn`: in every group round some peers die, and as many join before the next averaging.

The squared error to the true mean after each round should be that of the scenario `averaging` at the same failure rate,
with as many peers as the roll has members (255 have another grid than 256), of those who were there all the time. But
here peers really die, in a round, and the others must notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch

from shoal.core.options import check_number
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_state import Round
from shoal.sim.averaging import Averaging
from shoal.sim.checkers import Disturbance, RoundSeen
from shoal.sim.replica import VirtualReplica
from shoal.sim.world import SimPeer, World, digest_of
from shoal.strategies.moshpit import Moshpit

SIZE, RESTARTS = 200, 100
STEP_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Churn:
    """`averagings` of `peers` in groups of `group_size`; at the beginning of each group round every peer dies with
    chance `failure_rate`. Before each averaging all values are drawn anew from N(0, 1).
    """

    name: ClassVar[str] = "churn"

    peers: int = 256
    group_size: int = 16
    failure_rate: float = 0.01
    averagings: int = 4
    every_seconds: float = 20.0

    def __post_init__(self) -> None:
        check_number("peers", self.peers, 4, 1024, whole=True)
        check_number("failure_rate", self.failure_rate, 0, 0.5)
        check_number("averagings", self.averagings, 1, 1000, whole=True)
        self._strategy()

    def _strategy(self) -> Moshpit:
        return Moshpit(group_size=self.group_size, every_seconds=self.every_seconds)

    def run(self, seed: int) -> dict[str, Any]:
        """`error_by_round`: for each roll of `members`, the mean squared error after each round of those who lived."""
        world = World(seed=seed)
        strategy = self._strategy()
        world.checkers.longest_round_seconds = strategy.timeout_seconds
        figures = world.run(lambda world: _live(self, world, strategy))
        rolls = _by_roll(world.checkers.seen)
        died_at = {peer: one.start for one in world.checkers.disturbances for peer in one.peers}
        return {
            "seed": seed,
            **figures,
            "members": [len(rounds[0].group.roll.members) for rounds in rolls],
            "error_by_round": [_errors(rounds, died_at) for rounds in rolls],
            "trace_digest": world.digest(),
        }

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The options, and medians over all averagings of all seeds of the error after each round.

        `times_averaging`: that error divided by what `averaging` has with as many peers.
        """
        rolls = [one for run in runs for one in zip(run["members"], run["error_by_round"], strict=True)]
        rounds = max(len(errors) for _, errors in rolls)
        expected = {members: self._expected_errors(members, rounds) for members, _ in rolls}
        times = [[one / expected[members][t] for t, one in enumerate(errors)] for members, errors in rolls]
        return {
            "peers": self.peers,
            "group_size": self.group_size,
            "failure_rate": self.failure_rate,
            "seeds": len(runs),
            "averagings": len(rolls),
            "died": sum(run["died"] for run in runs),
            "joined": sum(run["joined"] for run in runs),
            "failed_averagings": sum(run["failed_averagings"] for run in runs),
            "median_error_by_round": [median(one[t] for _, one in rolls if len(one) > t) for t in range(rounds)],
            "times_averaging": [median(one[t] for one in times if len(one) > t) for t in range(rounds)],
            "trace_digest": digest_of(runs),
        }

    def _expected_errors(self, peers: int, rounds: int) -> list[float]:
        averaging = Averaging(
            method="moshpit_weighted", peers=peers, group_size=self.group_size, failure_rate=self.failure_rate
        )
        curves = [averaging.run(seed)["error_of_present_by_iteration"] for seed in range(RESTARTS)]
        return [median(curve[t] for curve in curves) for t in range(rounds)]


def _replica(number: int) -> VirtualReplica:
    return VirtualReplica(torch.zeros(SIZE), drift=0.0, step_seconds=STEP_SECONDS)


def _draw_values(world: World) -> None:
    draw = torch.Generator().manual_seed(world.random.getrandbits(40))
    for peer in world.alive():
        if peer.replica is not None:
            peer.replica.tensors[0].normal_(generator=draw)


async def _live(scenario: Churn, world: World, strategy: Moshpit) -> dict[str, Any]:
    random, dying = world.random, asyncio.Queue[SimPeer]()
    joined = 0

    def watch(peer: SimPeer) -> None:
        def opens(round_: Round) -> None:
            if random.random() < scenario.failure_rate:
                dying.put_nowait(peer)

        peer.peer.rounds.on_open.append(opens)

    async def bury() -> None:
        while True:
            peer = await dying.get()
            if peer.ended_at is None:
                world.checkers.disturbances.append(Disturbance(_now(), np.inf, frozenset([peer.id])))
                await peer.crash()

    for peer in await world.swarm(scenario.peers, strategy, _replica):
        watch(peer)
    burying = asyncio.create_task(bury(), name="bury")
    for _ in range(scenario.averagings):
        _draw_values(world)
        numbers = {one.number for peer in world.alive() for one in peer.peer.history.applied}
        await _after_the_next(world, max(numbers, default=0), 3 * scenario.every_seconds)
        entrance = world.alive()
        fresh = await asyncio.gather(
            *(
                world.start(f"n{joined + number}", peers=[random.choice(entrance).address], replica=_replica(0))
                for number in range(scenario.peers - len(entrance))
            )
        )
        joined += len(fresh)
        for peer in fresh:
            watch(peer)
            await peer.attached.wait()
    burying.cancel()
    await asyncio.gather(burying, return_exceptions=True)
    failed = sum(len(peer.peer.history.failures) for peer in world.peers)
    return {"died": len(world.peers) - len(world.alive()), "joined": joined, "failed_averagings": failed}


async def _after_the_next(world: World, number: int, within_seconds: float) -> None:
    """Until everybody who lives has done an averaging beyond this number. Raises AssertionError."""
    until = _now() + within_seconds
    while True:
        waited_for = [
            peer for peer in world.alive() if not any(one.number > number for one in peer.peer.history.applied)
        ]
        if not waited_for:
            return
        assert _now() < until, f"{len(waited_for)} peers have not averaged within {within_seconds:g} s"
        await asyncio.sleep(0.25)


def _by_roll(seen: Sequence[RoundSeen]) -> list[list[RoundSeen]]:
    """Without those that got no further than their collector, which died."""
    rolls: dict[str, list[RoundSeen]] = {}
    for one in seen:
        rolls.setdefault(one.group.roll.roll_id, []).append(one)
    return [rounds for rounds in rolls.values() if len({one.peer for one in rounds}) > 1]


def _errors(rounds: Sequence[RoundSeen], died_at: dict[str, float]) -> list[float]:
    """After each round, of the members that lived to the end of the roll's last one."""
    roll = rounds[0].group.roll
    last = max(one.group.round_index for one in rounds)
    ended = {one.peer: one.ended_at for one in rounds if one.group.round_index == last and one.ended_at is not None}
    lived = {peer for peer, ended_at in ended.items() if ended_at < died_at.get(peer, np.inf)}
    true_mean = _true_mean(roll, rounds)
    return [
        float(
            np.mean(
                [
                    np.square((one.before if one.after is None else one.after)[0] - true_mean).mean()
                    for one in rounds
                    if one.group.round_index == index and one.peer in lived
                ]
            )
        )
        for index in range(last + 1)
    ]


def _true_mean(roll: Roll, rounds: Sequence[RoundSeen]) -> Any:
    weight = dict(zip(roll.members, roll.weights, strict=True))
    first = [one for one in rounds if one.group.round_index == 0]
    total = sum(weight[one.peer] for one in first)
    return sum(weight[one.peer] / total * one.before[0].astype(np.float64) for one in first)


def _now() -> float:
    return asyncio.get_running_loop().time()
