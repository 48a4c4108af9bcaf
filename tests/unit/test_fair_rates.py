"""Max-min fair rates: known examples, and what defines them, in both ways of calculating them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planning import fair_rates as module
from shoal.planning.fair_rates import FEW_FLOWS, fair_rates

Filling = Callable[[Sequence[int], Sequence[int], Sequence[float]], list[float]]
BOTH = pytest.mark.parametrize("fill", [module._fill_few, module._fill_many], ids=["plain", "numpy"])
CLOSE = 1e-6


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[int], list[int], list[float]]:
    """Some uplinks and downlinks of unlike capacity, and flows between them, several on one pair too."""
    ups, downs = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    capacity = st.one_of(st.sampled_from([1e6, 2e6, 12.5e6]), st.floats(1.0, 1e9))
    capacities = draw(st.lists(capacity, min_size=ups + downs, max_size=ups + downs))
    pair = st.tuples(st.integers(0, ups - 1), st.integers(ups, ups + downs - 1))
    flows = draw(st.lists(pair, min_size=1, max_size=40))
    return [up for up, _ in flows], [down for _, down in flows], capacities


def check(ups: Sequence[int], downs: Sequence[int], capacities: Sequence[float], rates: Sequence[float]) -> None:
    """No line above its capacity; each flow has a full line on which nobody has more (Bertsekas, Gallager, 6.5.2)."""
    used, largest = [0.0] * len(capacities), [0.0] * len(capacities)
    for up, down, rate in zip(ups, downs, rates, strict=True):
        assert rate > 0
        for line in (up, down):
            used[line] += rate
            largest[line] = max(largest[line], rate)
    for what, capacity in zip(used, capacities, strict=True):
        assert what <= capacity * (1 + CLOSE)
    for up, down, rate in zip(ups, downs, rates, strict=True):
        assert any(
            used[line] >= capacities[line] * (1 - CLOSE) and rate >= largest[line] * (1 - CLOSE) for line in (up, down)
        )


@BOTH
@pytest.mark.parametrize(
    ("flows", "capacities", "expected"),
    [
        ([(0, 1)], [10, 4], [4]),
        ([(0, 2), (1, 2)], [10, 10, 10], [5, 5]),
        ([(0, 2), (1, 2)], [2, 10, 10], [2, 8]),
        ([(0, 3), (1, 3), (2, 3)], [1, 4, 20, 12], [1, 4, 7]),
        ([(0, 2), (0, 3), (1, 3)], [12, 12, 3, 9], [3, 4.5, 4.5]),
        ([(0, 1), (0, 1), (0, 1)], [9, 6], [2, 2, 2]),
        ([(0, 2), (0, 3), (1, 3), (1, 4)], [4, 10, 10, 7, 10], [2, 2, 5, 5]),
        ([], [5], []),
    ],
    ids=["one", "a downlink shared", "one is slow", "three unequal", "a slow reader", "one pair", "a chain", "none"],
)
def test_known_rates(fill: Filling, flows, capacities, expected) -> None:
    assert fill([up for up, _ in flows], [down for _, down in flows], capacities) == pytest.approx(expected)


@BOTH
@given(networks())
def test_rates_are_max_min_fair(fill: Filling, network) -> None:
    check(*network, fill(*network))


@given(networks())
def test_both_ways_agree(network) -> None:
    assert module._fill_few(*network) == pytest.approx(module._fill_many(*network), rel=CLOSE)


@pytest.mark.parametrize("count", [FEW_FLOWS, FEW_FLOWS + 1, 3000])
def test_many_flows_are_fair_too(count) -> None:
    choose = random.Random(count)
    capacities = [choose.uniform(1e5, 1e8) for _ in range(100)]
    ups, downs = [choose.randrange(50) for _ in range(count)], [choose.randrange(50, 100) for _ in range(count)]
    check(ups, downs, capacities, fair_rates(ups, downs, capacities))


@BOTH
def test_a_long_chain_of_tighter_and_tighter_lines(fill: Filling) -> None:
    """Each line waits for its neighbour: as many rounds as lines, and no rounding that adds up."""
    hosts = 40
    ups = [number for number in range(hosts) for _ in (0, 1)]
    downs = [hosts + (number + step) % hosts for number in range(hosts) for step in (0, 1)]
    capacities = [1e6 * (1 + number) for number in range(hosts)] + [1e6 * (1.5 + number) for number in range(hosts)]
    check(ups, downs, capacities, fill(ups, downs, capacities))
