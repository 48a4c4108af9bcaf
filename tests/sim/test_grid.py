"""Moshpit All-Reduce through the real stack: exact after the planned rounds for every number of peers.

Moshpit reference, section 8.0. Up to 40 peers meet in a world and call for the averaging; beyond that the roll is
given, and links are made as the groups form: nobody knows everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
import torch
from crowd import call_for_average, crowd, next_collector, now
from on_demand import average_on_demand, inputs_of

from shoal.core.errors import PeerLost
from shoal.planning.grid import grid_groups, plan_grid
from shoal.protocols.outcome import Outcome
from shoal.sim import SimPeer, World
from shoal.strategies import AnyStrategy
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit
from shoal.tensors.flat import Vectors

SIX = Moshpit(group_size=6, every_seconds=3600.0)


def random_weights(count: int, seed: int = 0) -> list[float]:
    """A third of them 0, but not all."""
    random = Random(f"{count} {seed}")
    weights = [random.choice([0.0, 1.0, random.uniform(0.1, 50)]) for _ in range(count)]
    weights[random.randrange(count)] = 2.5
    return weights


def check_mean(outcomes: Sequence[Outcome], inputs: Sequence[Vectors], weights: Sequence[float]) -> None:
    """The weighted mean at everybody, computed here in float64 over what was given."""
    for vector, tolerance in ((0, 1e-6), (1, 1e-12)):
        rows = np.stack([given[vector].double().numpy() for given in inputs])
        mean = np.average(rows, axis=0, weights=weights)
        for outcome in outcomes:
            distance = np.abs(outcome.vectors[vector].double().numpy() - mean).max()
            assert distance <= tolerance * np.abs(rows).max()


def same_bits(outcomes: Sequence[Outcome]) -> bool:
    return len({b"".join(vector.numpy().tobytes() for vector in outcome.vectors) for outcome in outcomes}) == 1


def check_grid(
    ids: Sequence[str], outcomes: Sequence[Outcome], inputs: Sequence[Vectors], weights: Sequence[float], limit: int
) -> None:
    """Exact at everybody after the planned rounds, no group above the limit, each last group equal bit for bit."""
    count = len(inputs)
    planned = len(plan_grid(count, limit))
    check_mean(outcomes, inputs, weights)
    last_groups: dict[tuple[str, ...], list[Outcome]] = {}
    for who, outcome in zip(ids, outcomes, strict=True):
        assert outcome.exact
        assert outcome.rounds_done == outcome.rounds_planned == planned
        assert not outcome.failures
        for report in outcome.rounds:
            assert who in report.members
            assert len(report.members) <= limit
            assert not report.lost
            assert not report.left_out
        last_groups.setdefault(outcome.rounds[-1].members, []).append(outcome)
    for members, group in last_groups.items():
        assert len(group) == len(members)
        assert same_bits(group)


async def averaged(
    peers: Sequence[SimPeer], strategy: AnyStrategy, inputs: Sequence[Vectors], weights: Sequence[float]
) -> list[Outcome]:
    results = await call_for_average(peers, strategy, inputs, weights)
    assert all(isinstance(result, Outcome) for result in results), results
    return [result for result in results if isinstance(result, Outcome)]


def test_what_the_plans_are_that_follow() -> None:
    """One round up to 6; three where two would make a group of 7 (reference, section 8.0)."""
    rounds = {count: len(plan_grid(count, 6)) for count in range(2, 41)}
    assert {count for count in rounds if rounds[count] == 1} == set(range(2, 7))
    assert {count for count in rounds if rounds[count] == 3} == {*range(31, 36), *range(37, 41)}
    assert set(rounds.values()) == {1, 2, 3}
    assert [len(plan_grid(count, 32)) for count in (97, 512, 1000)] == [2, 2, 3]


@pytest.mark.parametrize("count", range(2, 41))
def test_exact_for_every_number_of_peers(count: int) -> None:
    async def scenario(world: World) -> None:
        peers = await crowd(world, count, SIX)
        inputs, weights = inputs_of(count), random_weights(count)
        outcomes = await averaged(peers, SIX, inputs, weights)
        check_grid([peer.id for peer in peers], outcomes, inputs, weights, 6)

    World(seed=count).run(scenario)


@pytest.mark.parametrize(
    "count",
    [
        97,
        pytest.param(512, marks=[pytest.mark.acceptance, pytest.mark.timeout(900)]),
        pytest.param(1000, marks=[pytest.mark.acceptance, pytest.mark.timeout(1800)]),
    ],
)
def test_exact_for_hundreds_of_peers_of_which_nobody_knows_all(count: int) -> None:
    inputs, weights = inputs_of(count, size=40), random_weights(count)
    ids, outcomes = average_on_demand(Moshpit(group_size=32), inputs, weights)
    check_grid(ids, outcomes, inputs, weights, 32)


@pytest.mark.parametrize("seed", range(5))
def test_one_group_of_all_is_equal_bit_for_bit(seed: int) -> None:
    async def scenario(world: World) -> None:
        count = world.random.randint(5, 12)
        strategy = AllReduce(every_seconds=3600.0)
        peers = await crowd(world, count, strategy)
        inputs, weights = inputs_of(count), random_weights(count, seed)
        outcomes = await averaged(peers, strategy, inputs, weights)
        check_mean(outcomes, inputs, weights)
        assert same_bits(outcomes)
        assert all(outcome.exact and outcome.rounds_done == 1 for outcome in outcomes)

    World(seed=seed).run(scenario)


@pytest.mark.parametrize("count", [7, 31])
def test_where_nobody_has_weight_every_value_stays(count: int) -> None:
    async def scenario(world: World) -> None:
        peers = await crowd(world, count, SIX)
        inputs = inputs_of(count)
        for outcome, given in zip(await averaged(peers, SIX, inputs, [0.0] * count), inputs, strict=True):
            assert all(torch.equal(now_, before) for now_, before in zip(outcome.vectors, given, strict=True))
            assert outcome.rounds_done == len(plan_grid(count, 6))

    World(seed=count).run(scenario)


def part(one: SimPeer, other: SimPeer, knows: bool) -> Callable[[], None]:
    """`one` has no link to the other, does not count it as a member, and can't dial it until the answer is called."""
    host, link = one.peer.host, one.peer.host.link

    async def refuse(endpoints, expected):
        if expected == other.id:
            raise PeerLost("not now")
        return await link(endpoints, expected)

    host.link = refuse
    one.peer.members._redialling[other.id] = None
    one.peer.members.members.pop(other.id, None)
    host.drop(other.id, "they part")
    if not knows:
        host.remotes.pop(other.id, None)
    return lambda: setattr(host, "link", link)


@pytest.mark.parametrize("knowing", ["both know its place", "one knows it", "nobody knows it"])
@pytest.mark.parametrize("count", [4, 9])
def test_a_peer_averages_with_another_that_it_has_never_met(count: int, knowing: str) -> None:
    """They are in one group of the first round; the collector has met both, and the roll says where they are."""

    async def scenario(world: World) -> None:
        peers = await crowd(world, count, SIX)
        ids = sorted(peer.id for peer in peers)
        groups = [[ids[number] for number in group] for group in grid_groups(count, plan_grid(count, 6), 0)]
        collector = next_collector(peers).id
        pair = next([who for who in group if who != collector][:2] for group in groups if len(group) > 2)
        one, other = (next(peer for peer in peers if peer.id == who) for who in pair)
        let_dial = [
            part(one, other, knows=not knowing.startswith("nobody")),
            part(other, one, knows=knowing.startswith("both")),
        ]
        await asyncio.sleep(0.5)
        assert not one.peer.host.linked(other.id)
        assert not other.peer.host.linked(one.id)
        for dial in let_dial:
            dial()
        inputs, weights = inputs_of(count), random_weights(count)
        began = now()
        outcomes = await averaged(peers, SIX, inputs, weights)
        check_grid([peer.id for peer in peers], outcomes, inputs, weights, 6)
        assert now() < began + 3

    World(seed=count).run(scenario)
