"""Every method of the scenario `averaging`, and the planning code below it, against NumPy oracles of the reference.

Where a method draws random numbers, the oracle gets the same ones. Differences are those of rounding alone.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from oracles import averaging, moshpit
from shoal.planning.grid import plan_grid
from shoal.sim.averaging_methods import METHODS, MoshpitConserved, Setup, grid_numbers, group_means

COUNTS = [7, 32, 50, 96]
RATES = [0.0, 0.05, 0.5]


def start(peers: int, seed: int, *, group_size: int = 8, dims: tuple[int, ...] = (), weights=None) -> Setup:
    random = np.random.RandomState(seed)
    values = random.standard_normal(peers)
    return Setup(values, np.ones(peers) if weights is None else weights, group_size, dims, random)


def masks(peers: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng([seed, 1]).random((rounds, peers)) >= p)


def run(method: str, setup: Setup, alive: list[np.ndarray]) -> list[np.ndarray]:
    step, held, after = METHODS[method](setup), setup.values, []
    for number, mask in enumerate(alive):
        held = step(number, held, mask)
        after.append(held)
    return after


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("peers", COUNTS)
@pytest.mark.parametrize(
    ("method", "oracle"),
    [
        ("allreduce", averaging.all_reduce),
        ("gossip", averaging.gossip),
        ("sgp", averaging.authors_sgp),
        ("push_sum", averaging.push_sum),
    ],
)
def test_section_5_1_baselines_are_those_of_the_oracle(method, oracle, peers, p) -> None:
    for seed in range(3):
        alive = masks(peers, 15, p / 20 if method == "allreduce" else p, seed)
        setup = start(peers, seed)
        assert_equal(run(method, setup, alive), oracle(setup.values, alive))


@pytest.mark.parametrize("p", [*RATES, 1.0])
@pytest.mark.parametrize("peers", COUNTS)
def test_section_5_1_random_groups_deal_their_leftovers_in_turn(peers, p) -> None:
    for seed in range(3):
        alive = masks(peers, 6, p, seed)
        setup, again = start(peers, seed), start(peers, seed).random
        orders = [again.permutation(np.flatnonzero(mask)) for mask in alive]
        assert_equal(run("random_groups", setup, alive), averaging.random_groups(setup.values, alive, 8, orders))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize(("peers", "side", "axes"), [(64, 4, 3), (50, 4, 3), (81, 9, 2), (40, 9, 2), (30, 2, 5)])
def test_section_5_1_fixed_cells_tolerate_or_block_as_those_of_the_oracle(peers, side, axes, p) -> None:
    """The same cells, and the same peers alive: the oracle draws both from one stream, so the method does too."""
    for seed in range(3):
        values = np.random.default_rng([seed, 2]).standard_normal(peers)
        random = np.random.default_rng(seed)
        step, held = METHODS["moshpit"](Setup(values, np.ones(peers), side, (side,) * axes, random)), values
        for number, expected in enumerate(moshpit.fixed_cells(values, side, axes, 8, p, seed)):
            axis_from_last = axes - 1 - number % axes  # the oracle counts a cell's digits from the last
            held = step(axis_from_last, held, random.random(peers) >= p)
            np.testing.assert_allclose(held, expected, rtol=0, atol=1e-12)

        setup = start(peers, seed, group_size=side, dims=(side,) * axes)
        cells = start(peers, seed).random.choice(side**axes, peers, replace=False)
        alive = masks(peers, 8, p / 5, seed)
        expected = averaging.blocked_cells(setup.values, side, axes, cells, alive)
        assert_equal(run("moshpit_blocking", setup, alive), expected)


@pytest.mark.parametrize(("peers", "side", "axes"), [(1024, 32, 2), (200, 6, 3)])
@pytest.mark.parametrize("p", [0.0, 0.01])
def test_section_2_2_the_key_chain_mixes_as_that_of_the_oracle_without_numbers(peers, side, axes, p) -> None:
    """They draw other numbers, so it is the mean logarithm of the variance that has to agree, in each of 6 rounds."""
    found, expected = [], []
    for seed in range(12):
        setup = start(peers, seed, group_size=side, dims=(side,) * axes)
        found.append([held.var() for held in run("moshpit_keys", setup, masks(peers, 6, p, seed))])
        chain = moshpit.key_chain(setup.values[:, None], side, axes, 6, p, seed, numbered=False)
        expected.append([after.values.var() for after in chain])
    assert np.log10(found).mean(0) == pytest.approx(np.log10(expected).mean(0), abs=0.25)


def grids() -> list[tuple[int, tuple[int, ...]]]:
    return [(peers, plan_grid(peers, size)) for peers, size in [(64, 8), (40, 8), (97, 8), (31, 6), (100, 4), (50, 3)]]


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize(("peers", "dims"), grids())
def test_section_8_0_mass_and_plain_means_are_those_of_the_oracle(peers, dims, p) -> None:
    random = np.random.default_rng(peers)
    for seed in range(3):
        weights = random.integers(0, 100, peers).astype(float)
        setup, alive = start(peers, seed, dims=dims, weights=weights), masks(peers, len(dims), p, seed)
        expected = moshpit.mass_weighted(setup.values[:, None], weights, dims[1:], alive)
        assert_equal(run("moshpit_weighted", setup, alive), [held[:, 0] for held in expected])
        plain = moshpit.plain_on_grid(setup.values[:, None], dims[1:], alive)
        held = setup.values
        for number, mask in enumerate(alive):
            held = group_means(held, grid_numbers(peers, dims, number), mask)
            np.testing.assert_allclose(held, plain[number][:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize(
    ("peers", "dims"), [(64, (8, 8)), (40, (6, 7)), (97, (10, 10)), (27, (3, 3, 3)), (81, (3,) * 4)]
)
def test_section_8_0_conserved_shares_are_those_of_the_oracle(peers, dims, p) -> None:
    """In full grids, and in two rounds: there the reference's rule is exact, and ours is the same."""
    random = np.random.default_rng(peers)
    assert prod(dims) >= peers
    for seed in range(3):
        weights = random.integers(0, 100, peers).astype(float)
        setup, alive = start(peers, seed, dims=dims, weights=weights), masks(peers, 3 * len(dims), p, seed)
        step, held = MoshpitConserved(setup), setup.values
        expected = moshpit.conserved(setup.values, weights, dims[1:], alive)
        for number, (values, mu) in enumerate(expected):
            held = step(number, held, alive[number])
            np.testing.assert_allclose(held, values, rtol=0, atol=1e-12)
            np.testing.assert_allclose(step.mu, mu, rtol=1e-12)
