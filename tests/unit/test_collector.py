"""Who collects a roll: agreed on by all, spread over the numbers, and how long it waits."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal.planning.collector import collector_of, roll_deadline_seconds

MEMBERS = [f"peer-{number}" for number in range(8)]


def test_everybody_with_the_same_members_names_the_same_collector() -> None:
    choose = random.Random(1)
    for number in range(50):
        shuffled = choose.sample(MEMBERS, len(MEMBERS))
        assert collector_of("run", "train", number, shuffled) == collector_of("run", "train", number, MEMBERS)
        assert collector_of("run", "train", number, dict.fromkeys(shuffled)) in MEMBERS


def test_the_duty_is_spread_over_the_numbers() -> None:
    duties = Counter(collector_of("run", "train", number, MEMBERS) for number in range(4000))
    assert set(duties) == set(MEMBERS)
    assert max(duties.values()) < 4 * min(duties.values())


def test_runs_and_series_are_spread_apart() -> None:
    def duties(run: str, series: str) -> list[str]:
        return [collector_of(run, series, number, MEMBERS) for number in range(100)]

    assert duties("run", "train") != duties("run", "call")
    assert duties("run", "train") != duties("other", "train")


def test_the_death_of_another_changes_nothing_and_that_of_the_collector_names_the_next() -> None:
    for number in range(100):
        first = collector_of("run", "train", number, MEMBERS)
        for dead in MEMBERS:
            left = [member for member in MEMBERS if member != dead]
            assert (collector_of("run", "train", number, left) == first) == (dead != first)


def test_one_member_collects_for_itself() -> None:
    assert collector_of("run", "train", 1, ["me"]) == "me"


@pytest.mark.parametrize(
    ("steps", "deadline"), [([], 1.0), ([0.0], 1.0), ([0.1, 0.2], 1.0), ([0.1, 2.0], 3.0), ([4.0, 1.0], 6.0)]
)
def test_the_deadline_is_1_second_or_one_and_a_half_of_the_slowest_step(steps, deadline) -> None:
    assert roll_deadline_seconds(steps) == deadline
    assert roll_deadline_seconds(iter(steps)) == deadline
