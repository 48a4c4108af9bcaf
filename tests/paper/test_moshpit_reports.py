"""Moshpit reference, check 33: every round reports who was in it, who was not and why, its bytes, times and share."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence

import numpy as np
import pytest

from peers import Node, average, nodes
from shoal.core.loop import run_virtual
from shoal.protocols.butterfly import PartReport, RoundReport
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL, TRAIN
from shoal.strategies import AnyStrategy
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit
from shoal.training.report import AveragingReport

SIZE, PART_BYTES = 30_000, 4096
ROWS = np.random.default_rng(33).normal(size=(9, SIZE)).astype(np.float32)
WAYS: dict[str, tuple[AnyStrategy, str, int]] = {
    "allreduce": (AllReduce(part_bytes=PART_BYTES), CALL, 1),
    "moshpit": (Moshpit(group_size=4, part_bytes=PART_BYTES), CALL, 2),
    "plain": (Moshpit(group_size=3, plain_rounds=2, part_bytes=PART_BYTES, window_seconds=0.5), TRAIN, 2),
}


def seat(group: Sequence[Node]) -> None:
    """For the plain mode: three lines of three."""
    for number, node in enumerate(group):
        node.peer.meetings.key = (number % 3,)


def check(report: RoundReport, node: Node, group: Sequence[Node]) -> None:
    """What holds of any round's report."""
    assert node.id in report.members
    assert set(report.members) <= {one.id for one in group}
    assert set(report.left_out) | set(report.lost) <= set(report.members) - {node.id}
    assert all(reason for reason in (*report.left_out.values(), *report.lost.values()))
    assert 0 <= report.obtaining_seconds < 10
    assert 0 <= report.closing_seconds < 10
    assert report.bytes_sent > 0 < report.bytes_received
    assert 0.0 <= report.averaged <= 1.0
    places = [(part.start, part.stop) for part in report.parts]
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
    assert places[-1][1] == SIZE
    assert all(
        part.reducer in report.members and set(part.contributors) <= set(report.members) for part in report.parts
    )
    assert all(part.stop - part.start <= PART_BYTES // 4 for part in report.parts)


@pytest.mark.parametrize("way", WAYS)
def test_check_33_every_round_yields_a_report(way) -> None:
    strategy, series, rounds = WAYS[way]

    async def main() -> None:
        async with nodes(9) as group:
            seat(group)
            before = [node.peer.host.sent.total_bytes for node in group]
            outcomes = await average(group, strategy, ROWS, series=series)
            for node, outcome, sent in zip(group, outcomes, before, strict=True):
                assert isinstance(outcome, Outcome), repr(outcome)
                assert [report.round_index for report in outcome.rounds] == list(range(rounds))
                assert outcome.rounds_planned == outcome.rounds_done == rounds
                for report in outcome.rounds:
                    check(report, node, group)
                    count = len(report.members)
                    expected = 2 * ROWS[0].nbytes * (count - 1) / count
                    assert report.bytes_sent == pytest.approx(expected, rel=0.08)
                    assert report.bytes_received == pytest.approx(expected, rel=0.08)
                    assert report.averaged == 1.0
                    assert (report.left_out, report.lost, report.exchanges) == ({}, {}, 0)
                    assert 0.02 < report.obtaining_seconds < 1
                    assert {part.attempt for part in report.parts} == {0}
                    assert {part.reducer for part in report.parts} == set(report.members)
                    sources = {len(part.contributors) for part in report.parts}
                    assert sources <= set(range(2, count + 1))
                total = sum(report.bytes_sent for report in outcome.rounds)
                assert total <= node.peer.host.sent.total_bytes - sent < total + 8000

    run_virtual(main(), limit_seconds=100)


@pytest.mark.parametrize("way", WAYS)
def test_check_33_so_does_a_round_in_which_somebody_died(way) -> None:
    """Who was lost is named with the reason, and so is what it had delivered until then; nobody else is missing."""
    strategy, series, _ = WAYS[way]
    told = 0

    async def main(moment: float) -> None:
        nonlocal told
        async with nodes(9) as group:
            seat(group)
            outcomes = await average(group, strategy, ROWS, series=series, deaths={4: moment})
            for number, node in enumerate(group):
                if number == 4:
                    continue
                outcome = outcomes[number]
                assert isinstance(outcome, Outcome), repr(outcome)
                assert len(outcome.rounds) + len(outcome.failures) == outcome.rounds_planned
                for report in outcome.rounds:
                    check(report, node, group)
                    assert {*report.left_out, *report.lost} <= {group[4].id}
                    missing = [part for part in report.parts if group[4].id not in part.contributors]
                    if group[4].id in report.lost:
                        told += 1
                        assert "closed" in report.lost[group[4].id] or "connect" in report.lost[group[4].id]
                        assert report.exchanges > 0
                    if group[4].id in report.members and missing and way != "moshpit":
                        assert group[4].id not in report.contributed
                        assert not outcome.exact
                    taken_over = {part.reducer for part in report.parts if part.attempt > 0}
                    assert group[4].id not in taken_over

    for moment in (0.05, 0.09, 0.58):
        run_virtual(main(moment), limit_seconds=100)
    assert told >= 2


def test_check_33_without_any_weight_the_share_of_averaged_elements_is_none() -> None:
    async def main() -> None:
        async with nodes(4) as group:
            outcomes = await average(group, AllReduce(), ROWS[:4], series=CALL, weights=[0.0] * 4)
            for outcome in outcomes:
                assert isinstance(outcome, Outcome), repr(outcome)
                assert outcome.rounds[0].averaged == 0.0
                assert outcome.rounds[0].contributed == ()

    run_virtual(main(), limit_seconds=100)


def test_check_33_a_contribution_that_is_refused_is_named_with_the_reason() -> None:
    async def main() -> None:
        rows = ROWS[:4].copy()
        rows[2, 17] = math.nan
        async with nodes(4) as group:
            outcomes = await average(group, AllReduce(part_bytes=PART_BYTES), rows, series=CALL)
            named = [
                outcome.rounds[0].left_out.get(group[2].id) for outcome in outcomes if isinstance(outcome, Outcome)
            ]
            assert len(named) == 4
            assert named.count("its values are not finite") == 1, "told by the one who reduces that element"
            for outcome in outcomes:
                assert group[2].id not in outcome.contributed
                assert not outcome.exact

    run_virtual(main(), limit_seconds=100)


def test_check_33_swarm_average_gives_the_same_reports() -> None:
    """Its report has a RoundReport for each group round, with the parts, and the reason for each that failed."""
    hints = typing.get_type_hints(AveragingReport)
    assert hints["rounds"] == tuple[RoundReport, ...]
    assert hints["failures"] == tuple[str, ...]
    assert {"members", "contributed", "exact", "bytes_sent", "bytes_received", "seconds"} <= set(hints)
    inside = typing.get_type_hints(RoundReport)
    assert inside["members"] == tuple[str, ...]
    assert inside["left_out"] == inside["lost"] == dict[str, str]
    assert inside["parts"] == tuple[PartReport, ...]
    assert inside["bytes_sent"] is inside["bytes_received"] is int
    assert inside["obtaining_seconds"] is inside["closing_seconds"] is float
