"""The world's own faults and checkers: each is shown a world that must trip it, or that it must leave in peace."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import JoinError
from shoal.sim import Machine, SimPeer, VirtualReplica, World
from shoal.sim.learners import Learner, constant, log_normal, teacher_task, trace
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

EVERY_SECONDS = 2.0


def replica(number: int) -> VirtualReplica:
    return VirtualReplica(torch.full((50,), float(number)), drift=0.0, step_seconds=0.2)


async def three(world: World) -> list[SimPeer]:
    return await world.swarm(3, AllReduce(every_seconds=EVERY_SECONDS), replica)


def members_of_last(peer: SimPeer) -> set[str]:
    return set(peer.peer.history.applied[-1].members)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_paused_peer_stands_still_and_goes_on_late() -> None:
    async def scenario(world: World) -> None:
        peers = await three(world)
        await asyncio.sleep(5)
        assert peers[2].replica is not None
        steps = peers[2].replica.steps
        peers[2].pause()
        await asyncio.sleep(8)
        assert peers[2].replica.steps == steps
        assert members_of_last(peers[0]) == {peers[0].id, peers[1].id}
        peers[2].resume()
        await asyncio.sleep(8)
        assert peers[2].replica.steps > steps
        assert members_of_last(peers[0]) == {peer.id for peer in peers}

    World(seed=1).run(scenario)


def test_a_peer_behind_a_nat_dials_and_is_never_reached() -> None:
    async def scenario(world: World) -> None:
        first = await world.start("a", strategy=AllReduce(), replica=replica(0))
        await first.attached.wait()
        hidden = await world.start("b", peers=[first.address], machine=Machine(inbound=False))
        began_at = now()
        with pytest.raises(JoinError):
            await world.start("c", peers=[hidden.address])
        assert now() - began_at >= 5

    World(seed=1).run(scenario)


def test_lines_may_be_asymmetric() -> None:
    """4 MB between two: each sends half of it twice, over uplinks of 0.5 MB/s and downlinks of 5."""

    async def scenario(world: World) -> None:
        def large(number: int) -> VirtualReplica:
            return VirtualReplica(torch.full((1_000_000,), float(number)), drift=0.0, step_seconds=0.2)

        machine = Machine(bytes_per_second=5e5, down_bytes_per_second=5e6)
        await world.swarm(2, AllReduce(every_seconds=20.0), large, lambda _: machine)
        await asyncio.sleep(60)

    world = World(seed=1)
    world.run(scenario)
    seconds = [one.ended_at - one.began_at for one in world.checkers.seen if one.ended_at is not None]
    assert len(seconds) >= 2
    assert np.median(seconds) == pytest.approx(4e6 / 5e5, rel=0.1)


def test_a_slowed_peer_takes_its_steps_more_slowly() -> None:
    async def scenario(world: World) -> None:
        peers = await three(world)
        mine = peers[1].replica
        assert mine is not None
        before = mine.steps
        peers[1].slow_down(4.0)
        await asyncio.sleep(8)
        assert mine.steps - before == pytest.approx(8 / 0.8, abs=1)

    World(seed=1).run(scenario)


def test_the_clocks_of_peers_may_differ() -> None:
    async def scenario(world: World) -> None:
        first = await world.start("a", strategy=AllReduce(), replica=replica(0))
        ahead = await world.start("b", peers=[first.address], machine=Machine(skew_seconds=30.0))
        assert ahead.peer.clock.wall() - first.peer.clock.wall() == pytest.approx(30.0)
        assert ahead.peer.clock.now() == first.peer.clock.now()

    World(seed=1).run(scenario)


def test_the_story_of_an_averaging_names_its_rounds() -> None:
    async def scenario(world: World) -> str:
        peers = await world.swarm(6, Moshpit(group_size=3, every_seconds=EVERY_SECONDS), replica)
        await asyncio.sleep(6)
        last = peers[1].peer.history.applied[-1]
        return world.checkers.story(peers[1], last.number)

    story = World(seed=1).run(scenario)
    assert "round 1 begins with" in story
    assert "round 2 succeeds, attempts [0" in story


def test_the_how_to_runs_with_a_strategy_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Both pieces of code in docs/how-to/simulate.md, the second one's strategy in the first one's world."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md").read_text()
    world_code, strategy_code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(world_code, {})
    assert re.match(r"\d+ 6 True\n", capsys.readouterr().out)
    shown = world_code.replace("shoal.Moshpit(group_size=3, every_seconds=2.0)", "NowAndThen()")
    shown = (
        shown[: shown.index("    last = ")]
        + "    print(len(peers[3].peer.rounds.last('train').versions))\n\nWorld(seed=1).run(scenario)\n"
    )
    exec("import shoal\n" + strategy_code + shown, {})
    assert int(capsys.readouterr().out) > 0


# ---------------------------------------------------------------- checkers


def a_healthy_world() -> World:
    async def scenario(world: World) -> None:
        await world.swarm(6, Moshpit(group_size=3, every_seconds=EVERY_SECONDS), replica)
        await asyncio.sleep(5)

    world = World(seed=1)
    world.run(scenario)
    return world


def test_checkers_trip_over_what_must_not_be() -> None:
    """What was seen in a healthy world, changed at one place."""
    world = a_healthy_world()
    checkers = world.checkers
    healthy = list(checkers.seen)
    place = next(n for n, one in enumerate(healthy) if one.group.round_index == 1 and one.after is not None)
    one = healthy[place]
    assert one.versions is not None
    assert one.after is not None
    other_values = one.after[0] + np.float32(0.01), one.after[1]
    wrong = {
        "ended with different versions": {"versions": ((1, b"x"), *one.versions[1:])},
        "is not the mean of its contributors": {"versions": ((0, b"y"),), "after": other_values},
        "has the whole weight of the roll, and not its mean": {"after": other_values},
        "brings something else|bring something else": {"mass": one.mass + 1.0},
        "lasted": {"ended_at": one.began_at + 100.0},
    }
    checkers.longest_round_seconds = 30.0
    for complaint, change in wrong.items():
        checkers.seen = [*healthy[:place], dataclasses.replace(one, **change), *healthy[place + 1 :]]
        with pytest.raises(AssertionError, match=complaint):
            checkers.check(200.0)
    checkers.seen = healthy
    checkers.check(200.0)


# ---------------------------------------------------------------- learners


def test_costs_of_steps() -> None:
    from random import Random

    assert [constant(0.5)() for _ in range(2)] == [0.5, 0.5]
    measured = trace([1.0, 2.0])
    assert [measured() for _ in range(3)] == [1.0, 2.0, 1.0]
    drawn = log_normal(Random(1), 0.1, 0.5)
    seconds = sorted(drawn() for _ in range(2001))
    assert seconds[1000] == pytest.approx(0.1, rel=0.1)
    assert seconds[-1] > 0.3


def test_learners_learn_together_what_one_alone_learns_more_slowly() -> None:
    def accuracy(count: int) -> float:
        async def scenario(world: World) -> float:
            await world.swarm(count, Moshpit(every_seconds=1.0), lambda number: learners[number].replica)
            await asyncio.sleep(15)
            return float(np.mean([learner.accuracy() for learner in learners]))

        learners = [Learner(teacher_task(0), seed, constant(0.1)) for seed in range(count)]
        return World(seed=1).run(scenario)

    alone, together = accuracy(1), accuracy(6)
    assert together > alone + 0.01
