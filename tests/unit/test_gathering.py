"""When a peer stops gathering, and which target suits a fleet: pure functions."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.planning.gathering import (
    AHEAD,
    BEHIND,
    INVITED,
    TARGET,
    TIME,
    Gathered,
    level_of,
    proposed_batch,
    samples_gathered,
    why_stop,
)


def peer(name: str, samples: float, *, step: int = 5, rate: float = 80.0, waits: bool = False, told: float = 10.0):
    return Gathered(name, step, samples, rate, 8.0 / rate, waits, told)


def test_the_level_is_where_most_are_and_the_higher_one_of_two() -> None:
    assert level_of([]) == 0
    assert level_of([3]) == 3
    assert level_of([3, 4]) == 4
    assert level_of([3, 3, 4]) == 3


def test_what_others_gathered_on_an_older_state_does_not_count() -> None:
    assert samples_gathered(peer("a", 8), [peer("b", 16), peer("c", 99, step=4)]) == 24


@pytest.mark.parametrize(
    ("mine", "others", "why"),
    [
        (32, [], TARGET),
        (24, [], ""),
        (16, [peer("b", 16)], TARGET),
        (16, [peer("b", 16, step=6)], BEHIND),
        (16, [peer("b", 16, step=4)], ""),
        (16, [peer("b", 8, told=9.91)], AHEAD),  # it has ended another batch by now
        (16, [peer("b", 8, waits=True, told=9.0)], ""),  # it has stopped: nothing more comes from it
    ],
)
def test_why_a_peer_stops(mine: float, others: list[Gathered], why: str) -> None:
    assert why_stop(peer("a", mine), others, 32, 10.0) == why


def test_the_slowest_stops_where_the_others_have_the_rest_before_half_of_its_batch() -> None:
    slow, fast = peer("s", 8, rate=8.0), peer("f", 16, rate=80.0)
    assert why_stop(slow, [fast], 40, 10.0) == AHEAD  # 16 are missing: 0.2 s of the other one, 1 s of its own
    assert why_stop(slow, [fast], 100, 10.0) == ""
    assert why_stop(dataclasses.replace(fast, samples=16), [slow], 40, 10.0) == ""


def test_a_pause_of_another_is_not_taken_for_work() -> None:
    """However long ago it told: no more than a batch and a half is thought to have come since."""
    assert why_stop(peer("a", 8), [peer("b", 8, told=-1000.0)], 100, 10.0) == ""


def test_who_is_invited_or_out_of_time_stops_with_what_there_is() -> None:
    assert why_stop(peer("a", 8), [], 100, 10.0, invited=True) == INVITED
    assert why_stop(peer("a", 8), [], 100, 10.0, overdue=True) == TIME


def test_at_least_one_of_equal_peers_goes_on() -> None:
    """Equal ones in lockstep, all a batch short: somebody ends another one."""
    fleet = [peer(name, 8, told=10.0) for name in "abcd"]
    stopped = {me.peer_id for me in fleet if why_stop(me, [one for one in fleet if one is not me], 60, 10.0)}
    assert len(stopped) < len(fleet)


@pytest.mark.parametrize(
    ("rate", "slowest", "target", "seconds", "proposed"),
    [
        (100.0, 0.1, 64, 600.0, None),
        (100.0, 0.1, 100_000, 600.0, 30_000),  # more than 600 s: what half of that time brings
        (88.0, 1.0, 32, 600.0, 89),  # one batch of the slowest takes longer than the target
        (0.0, 0.1, 64, 600.0, None),
        (0.5, 2.0, 4096, 60.0, 15),
    ],
)
def test_a_batch_is_proposed_from_the_measured_pace(rate, slowest, target, seconds, proposed) -> None:
    assert proposed_batch(rate, slowest, target, seconds) == proposed


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1e30])
def test_figures_that_are_none_count_for_nothing_and_raise_nothing(nonsense: float) -> None:
    assert samples_gathered(peer("a", 8), [peer("b", nonsense), peer("c", 16)]) == 24
    assert proposed_batch(nonsense, 0.1, 64, 600.0) is None
    assert proposed_batch(80.0, nonsense, 64, 600.0) is None
