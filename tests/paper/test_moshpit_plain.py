"""Plain Moshpit All-Reduce, groups by key: reference sections 2.1, 2.2 and 4.1, checks 1 to 3, 11 and 31.

The real meetings and group rounds, over memory hosts in virtual time. The key chain alone is in test_moshpit_keys.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from peers import Node, after_each_round, average, flat, held, nodes
from shoal.core.errors import MismatchError, NobodyThere, OptionError, RoundError
from shoal.core.loop import run_virtual
from shoal.planning.grid import plan_grid
from shoal.protocols.outcome import Outcome
from shoal.strategies import build_strategy
from shoal.strategies.moshpit import Moshpit
from shoal.strategies.options import options_of

FULL = [(2, 3), (3, 3), (4, 3)]


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main, limit_seconds=600)


def normal(count: int, seed: int, size: int = 5) -> np.ndarray:
    """(peers, size) of float64."""
    return np.random.default_rng(seed).normal(size=(count, size))


def seat(group: Sequence[Node], side: int, axes: int) -> None:
    """Section 2.1: the initial key has the digits of the peer's number, so no first group exceeds M."""
    for number, node in enumerate(group):
        node.peer.meetings.key = tuple(number // side**place % side for place in range(axes - 1))


# ---------------------------------------------------------------- checks 1 and 3: the full grid


@pytest.mark.parametrize(("side", "axes"), FULL)
def test_check_1_and_3_a_full_grid_is_exact_after_d_rounds_not_before_and_separates(side, axes) -> None:
    """Twice: the second averaging goes on with the keys of the first. All groups have M members, new to each other."""
    count = side**axes

    async def main() -> None:
        async with nodes(count) as group:
            seat(group, side, axes)
            for seed in range(1 if count > 50 else 2):
                rows = normal(count, seed)
                outcomes = await average(group, Moshpit(plain_rounds=axes, group_size=side), rows)
                after = after_each_round(group, outcomes, axes)
                assert all((one.var(0) > 1e-3).all() for one in after[:-1])
                assert (after[-1].var(0) < 1e-25).all()
                assert np.abs(after[-1] - rows.mean(0)).max() < 1e-12
                check_separation(outcomes, side, axes)
                keys = Counter(node.peer.meetings.key for node in group)
                assert keys == dict.fromkeys(itertools.product(range(side), repeat=axes - 1), side)

    run(main())


def check_separation(outcomes: Sequence[Outcome], side: int, axes: int) -> None:
    """Who met in one round does not meet in the next one, and in a full grid all groups have M members."""
    for before, after in itertools.pairwise(range(axes)):
        for outcome in outcomes:
            met, next_group = (set(outcome.rounds[index].members) for index in (before, after))
            assert len(met) == len(next_group) == side
            assert len(met & next_group) == 1, "only the peer itself"


@pytest.mark.parametrize("seed", range(4))
def test_check_3_crowded_keys_and_absent_peers_separate_too(seed) -> None:
    """Keys from the hash of the id, 14 peers in a grid of 3 x 3, four averagings, a third of the peers away each time:
    members of one group come with one key, leave with distinct ones, and do not meet in the next round."""

    async def main() -> None:
        random = np.random.default_rng(seed)
        async with nodes(14) as group:
            for _ in range(4):
                absent = np.flatnonzero(random.random(14) < 0.3).tolist()
                outcomes = await average(group, Moshpit(plain_rounds=2, group_size=3), normal(14, 1), absent=absent)
                reports = [report for outcome in results(outcomes) for report in outcome.rounds]
                first, last = ({r.members for r in reports if r.round_index == index} for index in (0, 1))
                assert first
                for members in last:
                    keys = {node.peer.meetings.key for node in group if node.id in members}
                    assert 2 <= len(members) == len(keys) <= 3
                assert all(len({*met} & {*again}) <= 1 for met in first for again in last)

    run(main())


def results(outcomes: Sequence[Outcome | BaseException | None]) -> list[Outcome]:
    for one in outcomes:
        assert one is None or isinstance(one, Outcome | RoundError | NobodyThere), repr(one)
    return [one for one in outcomes if isinstance(one, Outcome)]


# ---------------------------------------------------------------- check 2: the mean is kept, the spread never grows


@pytest.mark.parametrize("p", [0.0, 0.1, 0.4, 0.8])
def test_check_2_with_absent_peers_the_mean_is_kept_and_the_deviation_never_grows(p) -> None:
    async def main() -> None:
        random, rows = np.random.default_rng(int(10 * p)), normal(18, 3)
        first_mean, first_std = rows.mean(0), rows.std(0)
        async with nodes(18) as group:
            for _ in range(4):
                absent = np.flatnonzero(random.random(18) < p).tolist()
                outcomes = await average(group, Moshpit(plain_rounds=2, group_size=4), rows, absent=absent)
                assert p == 0.8 or results(outcomes)
                after = held(outcomes, rows)
                assert np.abs(after.mean(0) - first_mean).max() < 1e-12
                assert (after.std(0) <= rows.std(0) + 1e-15).all()
                rows = after
        assert (rows.std(0) < (1 if p == 0.8 else 0.4 if p else 0.02) * first_std).all()

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_check_2_where_peers_die_each_group_has_the_mean_of_its_reported_contributors(seed) -> None:
    """27 peers, three die at random moments; one group, one round is lost at most, and nobody fails for it."""

    async def main() -> None:
        random, rows = np.random.default_rng(seed), normal(27, seed, size=400)
        victims = random.choice(27, 3, replace=False)
        deaths = {int(victim): float(random.uniform(0.9, 3.5)) for victim in victims}
        async with nodes(27) as group:
            seat(group, 3, 3)
            began = asyncio.get_running_loop().time()
            strategy = Moshpit(plain_rounds=3, group_size=3, part_bytes=1024)
            outcomes = await average(group, strategy, rows, deaths=deaths)
            assert asyncio.get_running_loop().time() - began < max(deaths.values()) + 3
            alive = [number for number in range(27) if number not in deaths]
            assert len(results([outcomes[number] for number in alive])) == len(alive)
            for number in alive:
                check_rounds(group, number, outcomes[number], rows)
            after = held(outcomes, rows)[alive]
            assert (after.min(0) >= rows.min(0) - 1e-15).all()
            assert (after.max(0) <= rows.max(0) + 1e-15).all()
            assert (after.std(0) < 0.5 * rows.std(0)).all()

    run(main())


def check_rounds(group: Sequence[Node], number: int, outcome: Outcome, rows: np.ndarray) -> None:
    """Each part of each round at one peer: the mean of what its contributors brought into that round."""
    node = group[number]
    by_id = {one.id: one for one in group}
    values = rows[number]
    for index, report in enumerate(outcome.rounds):
        rest = outcome.rounds[index + 1 :]
        after = node.before[rest[0].round_index] if rest else flat(outcome.vectors)
        for part in report.parts:
            brought = np.stack([by_id[who].before[report.round_index] for who in part.contributors])
            mean = brought[:, part.start : part.stop].mean(0)
            assert np.abs(after[part.start : part.stop] - mean).max() < 1e-14
            assert part.weight == len(part.contributors)
        assert (node.before[report.round_index] == values).all(), "a failed round leaves every bit as it was"
        values = after


# ---------------------------------------------------------------- check 11: crowds


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(20, 4, [4] * 5), (5, 4, [3, 2]), (9, 4, [3, 3, 3]), (4, 3, [2, 2]), (7, 8, [7]), (6, 2, [2, 2, 2])],
)
def test_check_11_a_crowd_on_one_key_is_split_in_the_same_round(count, size, sizes) -> None:
    """Nobody is sent away, nobody waits for a second window, and no round is lost."""

    async def main() -> None:
        rows = normal(count, count)
        async with nodes(count) as group:
            for node in group:
                node.peer.meetings.key = (0,)
            began = asyncio.get_running_loop().time()
            outcomes = await average(group, Moshpit(plain_rounds=2, group_size=size, window_seconds=1.0), rows)
            assert asyncio.get_running_loop().time() - began < 2 * 1.0 + 1
        first = {outcome.rounds[0].members for outcome in results(outcomes) if outcome.rounds[0].round_index == 0}
        assert sorted(map(len, first), reverse=True) == sizes
        assert sorted(who for members in first for who in members) == sorted(node.id for node in group)

    run(main())


def test_check_11_an_odd_crowd_in_groups_of_two_costs_one_peer_its_round_and_no_more() -> None:
    """Two is the one size at which a crowd can't be split without somebody alone."""

    async def main() -> None:
        async with nodes(5) as group:
            for node in group:
                node.peer.meetings.key = (0,)
            outcomes = await average(group, Moshpit(plain_rounds=2, group_size=2), normal(5, 1))
        with_first = [one for one in results(outcomes) if one.rounds[0].round_index == 0]
        assert len(with_first) == 4
        assert all(len(one.rounds[0].members) == 2 for one in with_first)

    run(main())


# ---------------------------------------------------------------- check 31: never one flat group


@pytest.mark.parametrize("rounds", [1, 0, -1, True, 1.5, "2", 11, float("nan"), float("inf")])
def test_check_31_a_grid_with_an_empty_key_is_refused_by_name(rounds) -> None:
    """d rounds have keys of d-1 digits: one round would put everybody on the same, empty key."""
    with pytest.raises(OptionError) as refused:
        Moshpit(plain_rounds=rounds)
    assert refused.value.field == "plain_rounds"
    assert refused.value.bounds == "a whole number from 2 to 10 or None"
    with pytest.raises(MismatchError, match=r"plain_rounds = .* must be a whole number from 2 to 10 or None"):
        build_strategy(charter_options(rounds))


def charter_options(rounds: object) -> dict[str, Any]:
    return {**options_of(Moshpit()), "plain_rounds": rounds}


def test_check_31_groups_are_never_above_their_limit_with_a_roll_either() -> None:
    """Without plain_rounds there are as many rounds as the limit needs, and never one flat group of everybody."""
    for size in (3, 4, 8, 32):
        for count in range(1, 200):
            dims = plan_grid(count, size)
            assert (len(dims) == 1) == (count <= size)


def test_check_31_the_key_is_not_empty_and_no_group_is_above_m() -> None:
    async def main() -> None:
        async with nodes(12) as group:
            outcomes = await average(group, Moshpit(plain_rounds=2, group_size=4), normal(12, 2))
            assert all(len(node.peer.meetings.key) == 1 for node in group)
        reports = [report for outcome in results(outcomes) for report in outcome.rounds]
        assert {len(report.members) for report in reports} <= {2, 3, 4}

    run(main())
