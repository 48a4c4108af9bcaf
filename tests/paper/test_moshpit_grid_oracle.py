"""The oracle of the grid against the numbers of the Moshpit reference: 5.2, 5.3 and 8.0, checks 1 to 3 and 5 to 7.

Nothing here runs the library: each test is named `oracle_only`, and says that the oracle is fit to be compared with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from oracles.moshpit import fixed_cells, grid_groups, key_chain, mass_weighted, plain_on_grid

FULL = [(2, 3), (3, 3), (4, 3), (32, 2)]
Averaging = Callable[[np.ndarray, int, int, int, float, int], list[np.ndarray]]


def normal(count: int, seed: int, size: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size))


def masks(count: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    """Who is alive in each round."""
    return list(np.random.default_rng(seed).random((rounds, count)) >= p)


def chain(values: np.ndarray, side: int, axes: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    return [after.values for after in key_chain(values, side, axes, rounds, p, seed)]


def whole_chain(values: np.ndarray, side: int, axes: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    return [after.values for after in key_chain(values, side, axes, rounds, p, seed, split=False)]


def weighted(values: np.ndarray, side: int, axes: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    """The mass-weighted grid with equal weights; one pass of it is as many rounds as axes."""
    alive = masks(len(values), rounds, p, seed)
    return mass_weighted(values, np.ones(len(values)), (side,) * (axes - 1), alive)


def plain(values: np.ndarray, side: int, axes: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    return plain_on_grid(values, (side,) * (axes - 1), masks(len(values), rounds, p, seed))


# ---------------------------------------------------------------- check 1: exact after d rounds, not before


@pytest.mark.parametrize("averaging", [fixed_cells, chain, weighted, plain])
@pytest.mark.parametrize(("side", "axes"), FULL)
def test_oracle_only_check_1_a_full_grid_is_exact_after_d_rounds_not_before(side, axes, averaging: Averaging) -> None:
    for seed in range(5):
        values = normal(side**axes, seed)
        after = averaging(values, side, axes, axes, 0.0, seed)
        assert len(after) == axes
        assert all(held.var() > 1e-25 for held in after[:-1])
        assert after[-1].var() < 1e-25
        assert np.abs(after[-1] - values.mean()).max() < 1e-12


# ---------------------------------------------------------------- check 2: the mean is kept, the spread never grows


@pytest.mark.parametrize("averaging", [fixed_cells, chain, whole_chain, plain])
@pytest.mark.parametrize("p", [0.0, 0.01, 0.2, 0.9, 1.0])
def test_oracle_only_check_2_the_mean_is_kept_and_the_deviation_never_grows(p, averaging: Averaging) -> None:
    for seed, (count, side, axes) in enumerate([(27, 3, 3), (64, 4, 3), (48, 4, 3), (81, 9, 2), (50, 9, 2)]):
        rounds = axes if averaging is plain else 12
        values = normal(count, seed, size=3)
        held = [values, *averaging(values, side, axes, rounds, p, seed)]
        for before, after in itertools.pairwise(held):
            assert np.abs(after.mean(0) - values.mean(0)).max() < 1e-12
            assert (after.std(0) <= before.std(0) + 1e-15).all()
        if p == 1:
            assert all((after == values).all() for after in held)


# ---------------------------------------------------------------- check 3: the key chain separates


def test_oracle_only_check_3_who_finished_a_round_together_never_holds_one_key_next_round() -> None:
    random = np.random.default_rng(3)
    for seed in range(200):
        side, axes, p = int(random.integers(2, 7)), int(random.integers(2, 5)), float(random.choice([0, 0.01, 0.2]))
        count = int(random.integers(2, side**axes + 1)) if seed % 4 else side**axes
        keys = np.arange(count)[:, None] // side ** np.arange(axes - 1) % side
        for after in key_chain(normal(count, seed), side, axes, 6, p, seed):
            members = [member for group in after.groups for member in group]
            assert len(set(members)) == len(members)
            for group in after.groups:
                assert 1 <= len(group) <= side
                assert len(np.unique(keys[group], axis=0)) == 1, "the members of a group come with one key"
                assert len(np.unique(after.keys[group], axis=0)) == len(group)
            assert ((after.keys >= 0) & (after.keys < side)).all()
            absent = np.setdiff1d(np.arange(count), members)
            assert (after.keys[absent] == keys[absent]).all()
            keys = after.keys
        assert p or len(members) == count


def test_oracle_only_check_3_and_11_a_crowd_that_is_not_split_does_not_separate() -> None:
    """Section 3: groups of 35 and more at M = 32 once dead peers return with their old keys."""
    crowded = 0
    for seed in range(3):
        for after in key_chain(normal(1024, seed), 32, 2, 10, 0.01, seed, split=False):
            for group in after.groups:
                together = len(np.unique(after.keys[group], axis=0)) < len(group)
                assert together == (len(group) > 32)
                crowded = max(crowded, len(group))
    assert 33 <= crowded <= 40


# ---------------------------------------------------------------- checks 5 to 7: tables 5.2 and 5.3

# (peers, p): iterations to 1e-9 with fixed cells
FIXED = {
    (512, 0): 8.2,
    (512, 0.001): 8.5,
    (512, 0.005): 8.8,
    (512, 0.01): 8.8,
    (768, 0): 6.0,
    (768, 0.001): 6.0,
    (768, 0.005): 6.6,
    (768, 0.01): 6.9,
    (1024, 0): 2.0,
    (1024, 0.001): 3.4,
    (1024, 0.005): 5.0,
    (1024, 0.01): 5.7,
}
CHAIN = {(512, 0): 6.9, (768, 0): 5.4, (1024, 0.001): 4.1, (1024, 0.005): 5.0, (1024, 0.01): 5.8}


def iterations(averaging: Averaging, count: int, p: float, seed: int) -> int:
    after = averaging(normal(count, seed), 32, 2, 14, p, seed)
    return next(number for number, held in enumerate(after, start=1) if held.var() < 1e-9)


@pytest.mark.parametrize(("count", "p"), FIXED)
def test_oracle_only_check_5_fixed_cells_need_the_iterations_of_table_5_2(count, p) -> None:
    found = [iterations(fixed_cells, count, p, seed) for seed in range(30)]
    assert np.mean(found) == pytest.approx(FIXED[count, p], abs=0.6)


@pytest.mark.parametrize(("count", "p"), CHAIN)
def test_oracle_only_section_5_2_the_whole_key_chain_needs_the_iterations_below_the_table(count, p) -> None:
    found = [iterations(whole_chain, count, p, seed) for seed in range(60)]
    assert np.mean(found) == pytest.approx(CHAIN[count, p], abs=0.6)


@pytest.mark.parametrize("p", [0.001, 0.005, 0.01])
def test_oracle_only_check_11_crowds_that_are_split_lose_no_round_but_mix_more_slowly(p) -> None:
    """About two iterations more than the whole crowds of 5.2 take: halves of a line mix less than the line."""
    found, crowded = [], 0
    for seed in range(20):
        after = key_chain(normal(1024, seed), 32, 2, 14, p, seed)
        sizes = [[len(group) for group in one.groups] for one in after]
        assert max(map(max, sizes)) <= 32
        assert all(sum(one) >= 1024 * (1 - 2 * p) - 10 for one in sizes)
        crowded += sum(len(one) > 32 for one in sizes)
        found.append(next(number for number, one in enumerate(after, start=1) if one.values.var() < 1e-9))
    assert crowded
    assert CHAIN[1024, p] < np.mean(found) < CHAIN[1024, p] + 3


def test_oracle_only_check_6_and_7_fixed_cells_leave_the_variance_of_table_5_3() -> None:
    after = {}
    for count, p in ((1024, 0.005), (768, 0.005), (1024, 0.01)):
        runs = [fixed_cells(normal(count, seed), 32, 2, 2, p, seed) for seed in range(100)]
        after[count, p] = np.array([[held.var() for held in run] for run in runs]).mean(0)
    assert after[1024, 0.005][0] == pytest.approx(3.4e-2, rel=0.15)
    assert after[1024, 0.005][1] == pytest.approx(3.1e-4, rel=0.3)
    assert after[768, 0.005][0] == pytest.approx(4.5e-2, rel=0.15)
    assert after[768, 0.005][1] == pytest.approx(8.2e-4, rel=0.3)
    for p in (0.005, 0.01):
        assert after[1024, p][1] == pytest.approx(2 * p / 32, rel=0.35)


# ---------------------------------------------------------------- 8.0: exact for every count


@pytest.mark.parametrize(("axes", "counts"), [(2, range(5, 1022)), (3, range(27, 1022))], ids=["d2", "d3"])
def test_oracle_only_section_8_0_mass_is_exact_for_every_count_after_d_rounds(axes, counts) -> None:
    """To 2e-32, squared, in units of the largest value; the true mean is rounded once."""
    random = np.random.default_rng(axes)
    for count in counts:
        blocks = (round(count ** (1 / axes)),) * (axes - 1)
        weights = random.integers(0, 100, count) * (random.random(count) > 0.1)
        weights[0] = max(weights[0], 1)
        values = normal(count, count)
        true = math.fsum((weights * values[:, 0]).tolist()) / int(weights.sum())
        *before, last = [((held - true) ** 2).mean() for held in mass_weighted(values, weights, blocks)]
        assert last <= 2e-32 * (values**2).max(), count
        assert min(before) > 1e-9, count


def test_oracle_only_section_8_0_without_any_weight_nothing_changes() -> None:
    values = normal(40, 1)
    assert all((held == values).all() for held in mass_weighted(values, [0] * 40, (7,)))


def error(held: np.ndarray) -> float:
    """The mean squared error to the true mean for values of variance 1: `held` is what unit vectors became."""
    return float(((held - 1 / len(held)) ** 2).sum() / len(held))


@pytest.mark.parametrize(
    ("count", "lines", "expected"),
    [(5, 2, 8e-3), (97, 10, 6e-4), (512, 22, 2e-5), (1000, 31, 1e-5), (1021, 31, 3e-5)],
)
def test_oracle_only_section_8_0_the_plain_mean_on_these_lines_is_not_exact(count, lines, expected) -> None:
    assert expected / 2 < error(plain_on_grid(np.eye(count), (lines,))[-1]) < expected * 2
    assert error(mass_weighted(np.eye(count), [1] * count, (lines,))[-1]) < 1e-32


@pytest.mark.parametrize(
    ("count", "lines", "by_mass", "by_plain"), [(1000, 31, 1.9e-4, 2.8e-4), (1024, 32, 1.3e-4, 2.6e-4)]
)
def test_oracle_only_section_8_0_with_absences_mass_errs_less_than_the_plain_mean(count, lines, by_mass, by_plain):
    unit, found = np.eye(count), []
    for seed in range(20):
        alive = masks(count, 2, 0.005, seed)
        mass = mass_weighted(unit, [1] * count, (lines,), alive)[-1]
        found.append((error(mass), error(plain_on_grid(unit, (lines,), alive)[-1])))
    mean = np.mean(found, axis=0)
    assert mean == pytest.approx([by_mass, by_plain], rel=0.35)
    assert mean[0] < mean[1]


def test_oracle_only_section_8_0_the_fold_by_line_gives_groups_of_8_at_40_members_in_7_lines() -> None:
    first, second = grid_groups(40, (7,))
    assert max(map(len, first)) == 6
    assert max(map(len, second)) == 8
    assert all({member % 7 for member in group} == set(range(7)) for group in second)
