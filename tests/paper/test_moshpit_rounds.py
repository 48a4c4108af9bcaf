"""Whole averagings, from the roll on: Moshpit reference, checks 12, 13 and 16, where one group's tests say too little.

The group alone is in test_moshpit_butterfly.py. Everything here runs over memory hosts in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from group import average as average_in_a_group
from group import members
from peers import Node, average, flat, nodes
from shoal.core.errors import RoundError
from shoal.core.loop import run_virtual
from shoal.planning.grid import plan_grid
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL
from shoal.strategies import AnyStrategy
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main, limit_seconds=100)


def values(count: int, size: int, seed: int) -> np.ndarray:
    """(peers, size) of float32, of very unlike magnitudes."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, size)) * 10 ** random.uniform(-2, 2, (count, 1))).astype(np.float32)


# ---------------------------------------------------------------- check 12: bytes, in a group of 32


def test_check_12_in_a_group_of_32_each_member_sends_and_receives_2_s_times_31_over_32() -> None:
    async def main() -> None:
        rows = values(32, 1 << 17, 12)
        async with members(32) as group:
            before = np.array([member.traffic for member in group])
            vectors = [(torch.from_numpy(row), torch.empty(0, dtype=torch.float64)) for row in rows]
            outcomes = await average_in_a_group(group, vectors, [1.0] * 32, [None] * 32)
            counted = np.array([member.traffic for member in group]) - before
        assert all(isinstance(outcome, Outcome) and outcome.exact for outcome in outcomes)
        assert np.abs(counted / (2 * rows[0].nbytes * 31 / 32) - 1).max() < 0.02

    run(main())


# ---------------------------------------------------------------- check 13: clients and aux peers


@pytest.mark.parametrize("aux", [0, 1, 2])
@pytest.mark.parametrize("clients", [0, 1, 2])
@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_check_13_in_a_grid_of_groups_of_three_too_the_mean_is_weighted_and_exact(count, clients, aux) -> None:
    """The roll says who has no bandwidth (CLIENT) and who no weight (AUX, with absurd values)."""

    async def main() -> None:
        rows = values(count, 2003, 13)
        rows[count - aux :] = 1e30
        weights = [1.0, 3.0, 0.5, 2.0, 70.0, 0.1, 9.0][: count - aux] + [0.0] * aux
        async with nodes(count) as group:
            for number, node in enumerate(group):
                node.peer.bandwidth = lambda number=number: 0.0 if number < clients else 6e6
            outcomes = await average(group, Moshpit(group_size=3, part_bytes=1024), rows, series=CALL, weights=weights)
            inside = rows[: count - aux].astype(np.float64)
            mean = np.average(inside, axis=0, weights=weights[: count - aux])
            for number, outcome in enumerate(outcomes):
                assert isinstance(outcome, Outcome), repr(outcome)
                assert outcome.exact
                assert outcome.rounds_planned == len(plan_grid(count, 3))
                assert np.abs(flat(outcome.vectors) - mean).max() < 1e-6 * np.abs(inside).max()
                clients_here = {node.id for node in group[:clients]}
                for report in outcome.rounds:
                    reducers = {part.reducer for part in report.parts}
                    assert not reducers & clients_here or set(report.members) <= clients_here
                    if report.round_index == 0:
                        absurd = {node.id for node in group[count - aux :]}
                        assert not any(absurd & {*part.contributors} for part in report.parts)
                assert (group[number].before[0] == rows[number]).all()

    run(main())


@pytest.mark.parametrize("count", [4, 7])
def test_check_13_in_a_grid_without_weight_every_bit_stays_and_nothing_is_nan(count) -> None:
    async def main() -> None:
        rows = values(count, 501, 14)
        rows[:, 7] = -0.0
        async with nodes(count) as group:
            outcomes = await average(group, Moshpit(group_size=3), rows, series=CALL, weights=[0.0] * count)
        for row, outcome in zip(rows, outcomes, strict=True):
            assert isinstance(outcome, Outcome), repr(outcome)
            assert flat(outcome.vectors).tobytes() == row.tobytes()

    run(main())


# ---------------------------------------------------------------- check 16: a kill at any instant


def test_check_16_a_kill_at_any_of_50_random_instants_leaves_all_or_nothing() -> None:
    """From the call to the end of the last round. Nobody's own values change; a result is whole: each part of it is the
    mean of its reported contributors, the same bits at all survivors of a group. So survivors have one, or no roll."""
    without = complete = struck = 0
    for seed in range(50):
        random = Random(seed)
        grid = seed % 2 == 1
        strategy = Moshpit(group_size=3, part_bytes=2048) if grid else AllReduce(part_bytes=2048)
        count = 6 if grid else 4
        victim, moment = random.randrange(count), random.uniform(0.0, 0.35 if grid else 0.25)
        rows = values(count, 9001, seed)

        async def main(
            count: int = count, rows: np.ndarray = rows, strategy: AnyStrategy = strategy, victim: int = victim,
            moment: float = moment,
        ) -> tuple[int, int, int]:  # fmt: skip
            async with nodes(count) as group:
                for node in group:
                    for line in (node.transport.uplink, node.transport.downlink):
                        line.bytes_per_second = 1e6
                began = asyncio.get_running_loop().time()
                outcomes = await average(group, strategy, rows, series=CALL, deaths={victim: moment})
                assert asyncio.get_running_loop().time() - began < moment + 5
                return check_survivors(group, victim, outcomes, rows)

        failed, results, hit = run_virtual(main(), limit_seconds=100)
        without += failed
        complete += results
        struck += hit
    assert without == 0
    assert complete == 25 * 3 + 25 * 5
    assert struck >= 25, "of the 50 instants lay within a round that the dead one was missed in"


def check_survivors(
    group: Sequence[Node], victim: int, outcomes: Sequence[Any], rows: np.ndarray
) -> tuple[int, int, int]:
    """How many survivors have nothing, how many a whole result, and whether a round missed the victim."""
    groups: dict[tuple[int, tuple[str, ...]], set[Any]] = {}
    by_id = {node.id: node for node in group}
    results = failed = hit = 0
    for number, (node, outcome) in enumerate(zip(group, outcomes, strict=True)):
        assert node.before.get(0, rows[number]).tobytes() == rows[number].tobytes()
        if number == victim:
            assert not isinstance(outcome, RoundError)
            continue
        assert isinstance(outcome, Outcome | RoundError), repr(outcome)
        failed += isinstance(outcome, RoundError)
        results += isinstance(outcome, Outcome)
        for index, report in enumerate(outcome.rounds if isinstance(outcome, Outcome) else ()):
            rest = outcome.rounds[index + 1 :]
            after = node.before[rest[0].round_index] if rest else flat(outcome.vectors)
            groups.setdefault((report.round_index, report.members), set()).add((after.tobytes(), report.parts))
            hit |= node.id != group[victim].id and group[victim].id in report.lost
            assert [part.start for part in report.parts] == [0, *(part.stop for part in report.parts[:-1])]
            for part in report.parts:
                brought = np.stack([by_id[who].before[report.round_index] for who in part.contributors])
                brought = brought[:, part.start : part.stop].astype(np.float64)
                found = after[part.start : part.stop]
                limit = np.spacing(np.abs(brought).max(0).astype(np.float32))
                assert (found >= brought.min(0) - limit).all()
                assert (found <= brought.max(0) + limit).all()
                if report.round_index == 0:
                    assert (np.abs(found - brought.mean(0)) <= limit).all()
    assert all(len(versions) == 1 for versions in groups.values()), "the members of a group differ"
    return failed, results, hit
