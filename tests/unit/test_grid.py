"""The grid of the mass-weighted averaging (Moshpit reference, section 8.0): its plan, its groups, its blocks.

Held against the definition written down once more, member by member, and against exact rational arithmetic.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.core.errors import OptionError
from shoal.planning.grid import block_of, grid_groups, plan_grid

Dims = tuple[int, ...]

SMALL = [(count, size) for count in range(1, 201) for size in range(3, 10)]
LARGE = [
    (count, size)
    for count in sorted({*range(201, 1101, 53), 255, 256, 257, 512, 97, 1000, 1021, 1023, 1024, 1025, 1089, 1100})
    for size in (8, 16, 32, 64)
]
FULL = [(2, 2), (2, 2, 2), (3, 3), (3, 3, 3), (4, 4, 4), (3, 3, 3, 3), (32, 32), (5, 2, 3), (2, 3, 4), (6, 7)]


def largest_group(count: int, blocks: Dims) -> int:
    """The largest group of any round, from the sizes alone; `blocks` = (k_2, ..., k_d)."""
    largest = -(-count // prod(blocks))
    for done, joined in enumerate(blocks):
        finer, coarser = prod(blocks[done:]), prod(blocks[done + 1 :])
        for block in (0, coarser - 1):  # the one with most of the longer sub-blocks, and the one with fewest
            sizes = [len(range(block + j * coarser, count, finer)) for j in range(joined)]
            extra = sum(size > min(sizes) for size in sizes)
            largest = max(largest, joined + -(-extra // min(sizes)))
    return largest


def fewest_rounds(count: int, size: int) -> int:
    """By trying every (k_2, ..., k_d)."""
    for rounds in itertools.count(1):
        for blocks in itertools.product(range(2, size + 1), repeat=rounds - 1):
            if prod(blocks) <= count <= size * prod(blocks) and largest_group(count, blocks) <= size:
                return rounds
    raise AssertionError


def groups_by_definition(count: int, dims: Dims, done: int) -> set[tuple[int, ...]]:
    """Each member is asked for its block and for the group that it joins there."""
    finer, coarser = prod(dims[done:]), prod(dims[done + 1 :])
    if done == 0:
        finer = count  # everyone is alone
    joined: dict[tuple[int, int], list[int]] = {}
    for member in range(count):
        block = member % coarser
        if done == 0:
            joined.setdefault((block, 0), []).append(member)
            continue
        line, index = member % finer // coarser, member // finer
        m = min(len(range(block + j * coarser, count, finer)) for j in range(dims[done]))
        joined.setdefault((block, index if index < m else (index + line) % m), []).append(member)
    return {tuple(group) for group in joined.values()}


def check_grid(count: int, dims: Dims) -> int:
    """Partition, order, blocks and the condition of exactness in every round; returns the largest group."""
    largest = 0
    for done in range(len(dims)):
        groups = grid_groups(count, dims, done)
        assert sorted(member for group in groups for member in group) == list(range(count))
        for group in groups:
            assert group and group == sorted(group)
            (block,) = {block_of(member, dims, done + 1) for member in group}
            sources = {block_of(member, dims, done) for member in group}
            finer, coarser = prod(dims[done:]), prod(dims[done + 1 :])
            if done == 0:
                assert sources == set(group) == set(range(block, count, coarser))
            else:
                assert sources == set(range(block, finer, coarser)), (
                    "one source of the block is missing, or one too many"
                )
            largest = max(largest, len(group))
        assert {tuple(group) for group in groups} == groups_by_definition(count, dims, done)
    return largest


def check_plan(count: int, size: int) -> None:
    dims = plan_grid(count, size)
    assert isinstance(dims, tuple)
    assert len(dims) == fewest_rounds(count, size)
    assert dims[0] == -(-count // prod(dims[1:])) <= size
    assert check_grid(count, dims) == largest_group(count, dims[1:]) <= size
    if count <= size:
        assert dims == (count,)


# ---------------------------------------------------------------- the plan, and the groups it leads to


@pytest.mark.parametrize("size", range(3, 10))
def test_every_count_up_to_200_has_a_grid_within_the_group_size(size) -> None:
    for count in range(1, 201):
        check_plan(count, size)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_large_counts_have_a_grid_within_the_group_size(size) -> None:
    for count in [count for count, one in LARGE if one == size]:
        check_plan(count, size)


@given(st.integers(1, 1500), st.integers(3, 64))
@example(1500, 3)
@example(1021, 5)
def test_any_count_has_a_grid_within_any_group_size(count, size) -> None:
    check_plan(count, size)


@pytest.mark.parametrize(
    ("size", "rounds", "counts"),
    [
        (6, 1, [1, 2, 5, 6]),
        (6, 2, [*range(7, 31), 36]),
        (6, 3, [*range(31, 36), *range(37, 41)]),
        (3, 1, [1, 2, 3]),
        (3, 2, [4, 5, 6, 9]),
        (3, 3, [7, 8, 10]),
        (32, 2, [961, 992, 1024]),
        (32, 3, [993, 1000, 1021, 1023]),
        (33, 2, [993, 1000, 1021, 1024]),
    ],
)
def test_the_fewest_rounds_that_the_reference_names(size, rounds, counts) -> None:
    assert [len(plan_grid(count, size)) for count in counts] == [rounds] * len(counts)


def test_limit_3_needs_three_rounds_for_10_and_more() -> None:
    assert all(len(plan_grid(count, 3)) >= 3 for count in range(10, 300))


@pytest.mark.parametrize(("count", "size", "dims"), [(1024, 32, (32, 32)), (36, 6, (6, 6)), (9, 3, (3, 3))])
def test_a_full_square_is_planned_as_one(count, size, dims) -> None:
    assert plan_grid(count, size) == dims


@pytest.mark.parametrize(("side", "rounds"), [(3, 2), (3, 3), (3, 4), (4, 3), (5, 3), (8, 3), (32, 2)])
def test_a_full_cube_takes_as_many_rounds_as_it_has_axes(side, rounds) -> None:
    assert plan_grid(side**rounds, side) == (side,) * rounds


@pytest.mark.parametrize(("count", "size"), [(0, 8), (-1, 8), (10, 2), (10, 1), (10, 0), (10, -3), (2, 2), (1, 2)])
def test_a_count_below_one_and_a_group_size_below_three_are_refused(count, size) -> None:
    with pytest.raises(OptionError):
        plan_grid(count, size)


# ---------------------------------------------------------------- blocks


@given(st.integers(1, 600), st.integers(3, 20), st.data())
def test_blocks_are_the_remainders_by_the_product_of_the_rounds_to_come(count, size, data) -> None:
    dims = plan_grid(count, size)
    member, done = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, len(dims)))
    assert block_of(member, dims, done) == member % prod(dims[done:])
    assert block_of(member, dims, 0) == member, "before the first round everyone is alone"
    assert block_of(member, dims, len(dims)) == 0, "after the last all hold one value"


# ---------------------------------------------------------------- grids that are not planned


def test_40_members_in_7_lines_fold_to_groups_of_8() -> None:
    """Section 8.0: `c mod C` would pile up to 12."""
    assert check_grid(40, (6, 7)) == 8


@given(st.lists(st.integers(2, 6), min_size=1, max_size=4), st.integers(1, 6), st.data())
def test_any_grid_that_is_not_too_thin_is_sound(blocks, height, data) -> None:
    lines = prod(blocks)
    if lines <= 400:
        count = lines * height + data.draw(st.integers(0, lines - 1))
        dims = (-(-count // lines), *blocks)
        assert check_grid(count, dims) == largest_group(count, dims[1:])


# ---------------------------------------------------------------- full grids: no two share twice


@pytest.mark.parametrize("dims", FULL)
def test_in_a_full_grid_no_two_members_share_a_group_twice(dims) -> None:
    count, seen = prod(dims), set()
    for done, size in enumerate(dims):
        groups = grid_groups(count, dims, done)
        assert {len(group) for group in groups} == {size}
        for pair in itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups):
            assert pair not in seen
            seen.add(pair)


@given(st.integers(4, 400), st.integers(3, 12))
def test_who_shared_a_group_is_of_one_source_ever_after(count, size) -> None:
    dims = plan_grid(count, size)
    for done in range(len(dims)):
        for group in grid_groups(count, dims, done):
            for later in range(done + 1, len(dims) + 1):
                assert len({block_of(member, dims, later) for member in group}) == 1


# ---------------------------------------------------------------- exactness, in rational numbers


def rounds_of(count: int, dims: Dims, weights: list[int], values: list[Fraction]) -> Iterator[list[Fraction]]:
    """What members hold after each round: one of a source stands for all of it, with the mass of its whole block."""
    held, mass = values, [Fraction(weight) for weight in weights]
    for done in range(len(dims)):
        after, heavier = list(held), list(mass)
        for group in grid_groups(count, dims, done):
            stands = {block_of(member, dims, done): member for member in group}.values()
            total = sum(mass[member] for member in stands)
            for member in group:
                heavier[member] = total
                if total:
                    after[member] = sum(mass[one] * held[one] for one in stands) / total
        held, mass = after, heavier
        for block in range(prod(dims[done + 1 :])):
            members = range(block, count, prod(dims[done + 1 :]))
            assert {mass[member] for member in members} == {sum(weights[member] for member in members)}
        yield held


def check_exact(count: int, dims: Dims, weights: list[int], choose: random.Random) -> None:
    values = [Fraction(choose.randint(-1000, 1000), choose.choice([1, 3, 7])) for _ in range(count)]
    for done, held in enumerate(rounds_of(count, dims, weights, values), start=1):
        for block in range(prod(dims[done:])):
            members = range(block, count, prod(dims[done:]))
            total = sum(weights[member] for member in members)
            if total:
                mean = sum(weights[member] * values[member] for member in members) / total
                assert all(held[member] == mean for member in members)
            else:
                assert all(held[member] == values[member] for member in members)


@pytest.mark.parametrize("size", [3, 4, 6, 8])
def test_the_mean_by_mass_is_exact_for_every_count_up_to_60(size) -> None:
    choose = random.Random(size)
    for count in range(2, 61):
        for zeros in (0.0, 0.2, 0.8):
            weights = [0 if choose.random() < zeros else choose.randint(0, 99) for _ in range(count)]
            check_exact(count, plan_grid(count, size), weights, choose)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_one_weight_alone_wins_and_no_weight_at_all_changes_nothing(size) -> None:
    choose = random.Random(size)
    for count in (2, 7, 31, 40, 60):
        dims = plan_grid(count, size)
        check_exact(count, dims, [0] * count, choose)
        for bearer in range(count):
            check_exact(count, dims, [5 * (member == bearer) for member in range(count)], choose)
