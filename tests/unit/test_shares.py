"""Shares by bandwidth (Moshpit reference, section 2.6) and the cut of vectors into parts."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planning.shares import ALIKE, cut_parts, shares_by_bandwidth, without_noise


def cost(bandwidths: list[float], shares: list[float]) -> float:
    """max_i (1 + (n-2) w_i) / b_i over those with a link at all."""
    n = len(bandwidths)
    return max((1 + (n - 2) * w) / b for b, w in zip(bandwidths, shares, strict=True) if b > 0)


def shares_by_bisection(bandwidths: list[float]) -> list[float]:
    """The reference's own way: w_i(T) = max(0, (T b_i - 1) / (n - 2)), bisect T until they sum to 1."""
    n = len(bandwidths)

    def at(level: float) -> list[float]:
        return [max(0.0, (level * b - 1) / (n - 2)) for b in bandwidths]

    low, high = 0.0, n / max(bandwidths)
    while sum(at(high)) < 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < 1 else (low, middle)
    raw = at(high)
    return [w / sum(raw) for w in raw]


def best_cost(bandwidths: list[float]) -> float:
    """Brute force: for each set of reducers the shares at which all of them need equal time; the best of all sets."""
    n = len(bandwidths)
    linked = [number for number in range(n) if bandwidths[number] > 0]
    best = math.inf
    for size in range(1, len(linked) + 1):
        for chosen in itertools.combinations(linked, size):
            level = (n - 2 + size) / sum(bandwidths[number] for number in chosen)
            shares = [(level * b - 1) / (n - 2) if number in chosen else 0.0 for number, b in enumerate(bandwidths)]
            if min(shares) >= -1e-12:
                best = min(best, cost(bandwidths, shares))
    return best


def cases(count: int) -> list[list[float]]:
    """Bandwidths of 3 to 8 members over six orders of magnitude, some of them zero or equal."""
    choose = random.Random(20)
    found: list[list[float]] = []
    while len(found) < count:
        n = choose.randint(3, 8)
        spread = choose.choice([0.1, 1.0, 3.0])
        case = [choose.choice([10 ** choose.uniform(6 - spread, 6 + spread), 1e6]) for _ in range(n)]
        for number in range(n):
            if choose.random() < 0.1:
                case[number] = 0.0
        if any(case):
            found.append(case)
    return found


@pytest.mark.parametrize("number", range(10))
def test_no_split_is_better(number) -> None:
    """Acceptance check 14: the largest cost within 1e-9 of the optimum on 300 random cases."""
    for bandwidths in cases(300)[number::10]:
        shares = shares_by_bandwidth(bandwidths)
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert min(shares) >= 0
        assert cost(bandwidths, shares) <= best_cost(bandwidths) * (1 + 1e-9)
        assert all(share == 0 for share, b in zip(shares, bandwidths, strict=True) if b == 0)


def test_no_random_split_is_better() -> None:
    """Independent of every formula: 100 splits drawn at random for each case."""
    choose = random.Random(21)
    for bandwidths in cases(100):
        best = cost(bandwidths, shares_by_bandwidth(bandwidths))
        for _ in range(100):
            raw = [choose.expovariate(1) ** 3 * (b > 0) for b in bandwidths]
            assert cost(bandwidths, [w / sum(raw) for w in raw]) >= best * (1 - 1e-12)


def test_the_closed_form_equals_the_bisection() -> None:
    for bandwidths in cases(300):
        assert shares_by_bandwidth(bandwidths) == pytest.approx(shares_by_bisection(bandwidths), abs=1e-9)


def test_the_scale_does_not_matter() -> None:
    for bandwidths in cases(50):
        scaled = shares_by_bandwidth([b * 1e-6 for b in bandwidths])
        assert scaled == pytest.approx(shares_by_bandwidth(bandwidths), abs=1e-9)


@pytest.mark.parametrize(
    ("bandwidths", "shares"),
    [
        ([], []),
        ([5.0], [1.0]),
        ([0.0], [1.0]),
        ([None], [1.0]),
        ([5.0, 5.0], [0.5, 0.5]),
        ([1.0, 100.0], [0.5, 0.5]),
        ([0.0, 5.0], [0.0, 1.0]),
        ([0.0, 0.0], [0.5, 0.5]),
        ([0.0, 0.0, 0.0], [1 / 3] * 3),
        ([7.0, 7.0, 7.0], [1 / 3] * 3),
        ([0.0, 7.0, 7.0], [0.0, 0.5, 0.5]),
        ([0.0, 0.0, 7.0], [0.0, 0.0, 1.0]),
        ([1.0, 1.0, 2.0], [0.0, 0.0, 1.0]),
        ([2.0, 3.0, 3.0], [0.0, 0.5, 0.5]),
        ([1.0, 1e9, 1e9], [0.0, 0.5, 0.5]),
    ],
)
def test_small_groups(bandwidths, shares) -> None:
    assert shares_by_bandwidth(bandwidths) == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize(
    ("bandwidths", "as_if"),
    [
        ([None, None, None], [1.0, 1.0, 1.0]),
        ([None, 2.0, 4.0], [3.0, 2.0, 4.0]),
        ([None, 2.0, None, 4.0], [3.0, 2.0, 3.0, 4.0]),
        ([None, 0.0, 4.0, 4.0], [8 / 3, 0.0, 4.0, 4.0]),
        ([None, 0.0, 0.0], [1.0, 0.0, 0.0]),
    ],
)
def test_an_unknown_bandwidth_counts_as_the_mean_of_the_known_ones(bandwidths, as_if) -> None:
    assert shares_by_bandwidth(bandwidths) == shares_by_bandwidth(as_if)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e15)), min_size=1, max_size=20))
def test_whatever_is_measured_gives_a_split(bandwidths) -> None:
    shares = shares_by_bandwidth(bandwidths)
    assert len(shares) == len(bandwidths)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1, abs=1e-9)


# ---------------------------------------------------------------- parts

splits = st.lists(st.one_of(st.just(0.0), st.floats(0.001, 1)), min_size=1, max_size=8).filter(any)


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=2), splits, st.sampled_from([1, 4, 7, 8, 64, 1000, 1 << 19]))
def test_each_element_lies_in_exactly_one_part(sizes, raw, part_bytes) -> None:
    widths = [4, 8]
    shares = [w / sum(raw) for w in raw]
    owned = cut_parts(sizes, widths, shares, part_bytes)
    assert len(owned) == len(shares)
    covered = [[0] * size for size in sizes]
    for parts in owned:
        assert parts == sorted(parts, key=lambda part: (part.vector, part.start)), "in order"
        for part in parts:
            assert part.start < part.stop
            width = widths[part.vector]
            assert (part.stop - part.start) * width <= max(part_bytes, width)
            for at in range(part.start, part.stop):
                covered[part.vector][at] += 1
    assert all(count == 1 for vector in covered for count in vector)


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=2), splits)
def test_each_member_owns_its_share_of_the_bytes(sizes, raw) -> None:
    widths = [4, 8]
    shares = [w / sum(raw) for w in raw]
    owned = cut_parts(sizes, widths, shares, 1024)
    for share, parts in zip(shares, owned, strict=True):
        for vector, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            owns = sum(part.stop - part.start for part in parts if part.vector == vector) * width
            assert abs(owns - share * size * width) <= width + 1e-6 * size * width
        if share == 0:
            assert not parts


# ---------------------------------------------------------------- measured rates


@pytest.mark.parametrize(
    ("measured", "taken"),
    [
        ([], []),
        ([None, 7.0], [None, 7.0]),
        ([10.0, 11.0, 9.5], [10.166666666666666] * 3),
        ([10.0, 5.0, 5.5, None], [10.0, 5.25, 5.25, None]),
        ([0.0, 1.0], [0.0, 1.0]),
        ([10.0, 8.6, 7.4], [9.3, 9.3, 7.4]),  # the slowest is too far from the fastest of its level
    ],
)
def test_rates_that_are_alike_are_equal(measured, taken) -> None:
    assert without_noise(measured) == pytest.approx(taken)


def test_equal_lines_that_are_measured_with_noise_have_equal_shares() -> None:
    choose = random.Random(1)
    measured = [1e7 * choose.uniform(0.95, 1.05) for _ in range(16)]
    raw, shares = shares_by_bandwidth(measured), shares_by_bandwidth(without_noise(measured))
    assert max(raw) > 1.15 * min(raw)
    assert shares == pytest.approx([1 / 16] * 16)


@given(st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=20))
def test_what_it_costs_where_the_rates_were_true_is_bounded(rates) -> None:
    assert cost(rates, shares_by_bandwidth(without_noise(rates))) <= best_possible(rates) * ALIKE


def best_possible(rates: list[float]) -> float:
    return cost(rates, shares_by_bandwidth(rates))
