"""Conserved shares: nothing is lost, the split is the reference's where that is exact, and exact everywhere else."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planning.conserved import conserved_claims, conserved_shares
from shoal.planning.grid import grid_groups, plan_grid


def numbers(count: int, dims: tuple[int, ...], round_index: int) -> list[int]:
    groups = grid_groups(count, dims, round_index % len(dims))
    return [next(place for place, group in enumerate(groups) if member in group) for member in range(count)]


def one_pass(count: int, dims: tuple[int, ...]) -> list[float]:
    """What all hold after d rounds with nobody absent; at first member r holds r, with weight 1 + r mod 5."""
    held, mu = [float(member) for member in range(count)], [1.0 + member % 5 for member in range(count)]
    for round_index in range(len(dims)):
        claims, following = conserved_claims(count, dims, round_index), numbers(count, dims, round_index + 1)
        for group in grid_groups(count, dims, round_index):
            total = sum(mu[member] for member in group)
            mean = sum(mu[member] * held[member] for member in group) / total
            shares = conserved_shares(total, [following[one] for one in group], [claims[one] for one in group])
            for member, share in zip(group, shares, strict=True):
                held[member], mu[member] = mean, share
    return held


def test_the_next_groups_get_equal_parts_and_so_do_those_who_go_to_one() -> None:
    assert conserved_shares(12.0, [7, 3, 3, 9], [1.0, 1.0, 1.0, 1.0]) == [4.0, 2.0, 2.0, 4.0]


def test_a_claim_is_that_of_the_group_however_many_of_its_members_are_present() -> None:
    assert conserved_shares(9.0, [7, 3, 3], [2.0, 1.0, 1.0]) == [6.0, 1.5, 1.5]
    assert conserved_shares(9.0, [7, 3], [2.0, 1.0]) == [6.0, 3.0]
    assert conserved_shares(9.0, [3], [1.0]) == [9.0]
    assert conserved_shares(0.0, [], []) == []


@given(
    total=st.integers(0, 1000),
    members=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=20),
)
def test_the_whole_total_is_carried(total, members) -> None:
    claims = {way: Fraction(claim) for way, claim in members}
    ways = [way for way, _ in members]
    assert sum(conserved_shares(Fraction(total), ways, [claims[way] for way in ways])) == total


@pytest.mark.parametrize(
    ("count", "dims"), [(9, (9,)), (24, (4, 6)), (40, (6, 7)), (27, (3, 3, 3)), (16, (2, 2, 2, 2))]
)
def test_in_one_or_two_rounds_and_in_full_grids_all_claims_are_equal(count, dims) -> None:
    for round_index in range(len(dims)):
        assert len(set(conserved_claims(count, dims, round_index))) == 1


@pytest.mark.parametrize("group_size", [3, 4, 8])
def test_one_pass_is_exact_for_every_count_up_to_120(group_size) -> None:
    for count in range(1, 121):
        weights = [1 + member % 5 for member in range(count)]
        mean = sum(weight * member for member, weight in enumerate(weights)) / sum(weights)
        assert one_pass(count, plan_grid(count, group_size)) == pytest.approx([mean] * count, rel=1e-12), count
