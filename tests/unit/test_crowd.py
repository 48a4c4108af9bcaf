"""Who of the unauthenticated goes in, who waits, who has to go."""

from __future__ import annotations

import random

from shoal.planning.crowd import INSIDE, INSIDE_PER_ADDRESS, SETTLED_SECONDS, Crowd


def fill(crowd: Crowd[str], address: str, count: int, now: float = 0.0) -> tuple[list[str], list[str]]:
    """Guests `address-0`, `address-1`, ... come at once; who went in and who was sent away."""
    entered, left = [], []
    for number in range(count):
        step = crowd.arrive(f"{address}-{number}", address, now)
        entered += step.enter
        left += step.leave
    return entered, left


def test_whoever_comes_to_an_empty_door_goes_in() -> None:
    step = Crowd[str](100).arrive("one", "home", 0.0)
    assert (step.enter, step.leave, step.again_at) == (["one"], [], None)


def test_of_one_address_so_many_are_inside_and_the_rest_waits() -> None:
    crowd = Crowd[str](1000)
    entered, left = fill(crowd, "here", 200)
    assert (len(entered), left) == (INSIDE_PER_ADDRESS, [])
    assert crowd.arrive("guest", "there", 0.0).enter == ["guest"], "another address has room yet"


def test_the_newest_goes_in_when_somebody_leaves() -> None:
    crowd = Crowd[str](1000)
    entered, _ = fill(crowd, "here", INSIDE_PER_ADDRESS + 3)
    step = crowd.gone(entered[5], "here", 0.1)
    assert step.enter == [f"here-{INSIDE_PER_ADDRESS + 2}"]


def test_nobody_is_sent_away_before_it_had_time_and_then_the_oldest_of_the_fullest_address() -> None:
    crowd = Crowd[str](1000)
    fill(crowd, "few", INSIDE - INSIDE_PER_ADDRESS)
    fill(crowd, "many", INSIDE_PER_ADDRESS, now=1.0)
    step = crowd.arrive("late", "elsewhere", 1.2)
    assert (step.enter, step.leave, step.again_at) == ([], [], 1.0 + SETTLED_SECONDS)
    step = crowd.look(1.0 + SETTLED_SECONDS)
    assert (step.enter, step.leave) == (["late"], ["many-0"])


def test_who_leaves_while_it_waits_is_forgotten() -> None:
    crowd = Crowd[str](1000)
    entered, _ = fill(crowd, "here", INSIDE_PER_ADDRESS + 1)
    crowd.gone(f"here-{INSIDE_PER_ADDRESS}", "here", 0.1)
    assert crowd.gone(entered[0], "here", 0.2).enter == []


def test_those_who_wait_are_bounded_by_address_and_in_all() -> None:
    crowd = Crowd[str](100)
    _, left = fill(crowd, "here", INSIDE_PER_ADDRESS + 60)
    assert left == [f"here-{number}" for number in range(10)] or len(left) == 10
    for number in range(60):
        fill(crowd, f"host {number}", 40)
    assert sum(len(guests) for guests in crowd._waiting.values()) <= 100
    assert sum(len(guests) for guests in crowd._inside.values()) <= INSIDE


def test_whatever_happens_each_guest_is_in_one_place_and_the_bounds_hold() -> None:
    choose, crowd, now = random.Random(3), Crowd[int](50), 0.0
    here: dict[int, str] = {}
    outcome: dict[int, str] = {}
    for guest in range(5000):
        now += choose.expovariate(200)
        step = crowd.arrive(guest, here.setdefault(guest, choose.choice("abcde")), now)
        steps = [step]
        if outcome and choose.random() < 0.5:
            leaver = choose.choice(list(outcome))
            outcome.pop(leaver)
            steps.append(crowd.gone(leaver, here[leaver], now))
        for step in steps:
            for left in step.leave:
                outcome.pop(left, None)
            for entered in step.enter:
                assert entered not in outcome
                outcome[entered] = "inside"
        waiting = [one for guests in crowd._waiting.values() for one in guests]
        inside = [one for guests in crowd._inside.values() for one in guests]
        assert len(waiting) <= 50
        assert len(inside) <= INSIDE
        assert set(inside) == set(outcome)
        assert not set(waiting) & set(inside)
