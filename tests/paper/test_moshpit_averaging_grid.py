"""The strategy's own grid in the scenario `averaging`: section 8.0 of the Moshpit reference."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.planning.grid import plan_grid
from shoal.sim.averaging import Averaging
from shoal.sim.averaging_methods import MoshpitConserved, Setup, grid_numbers, group_means, moshpit_weighted

RATES = [0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1]


def start(peers: int, group_size: int, seed: int, *, uneven: bool = False) -> Setup:
    random = np.random.RandomState(seed)
    values = random.standard_normal(peers)
    weights = np.ones(peers)
    if uneven:
        weights = random.randint(0, 100, peers) * (random.random_sample(peers) > 0.1).astype(np.float64)
        weights[0] = max(weights[0], 1)
    return Setup(values, weights, group_size, plan_grid(peers, group_size), random)


def mean_of(setup: Setup) -> float:
    return float(setup.weights @ setup.values / setup.weights.sum())


def test_section_8_0_mass_is_exact_after_d_rounds_for_1000_random_counts() -> None:
    """To 2e-32, squared, in units of the largest value, as the reference has it, also with weights from 0 to 99."""
    random = np.random.default_rng(8)
    for peers in random.integers(2, 2001, 1000).tolist():
        for uneven in (False, True):
            setup = start(peers, 32, peers, uneven=uneven)
            step, held = moshpit_weighted(setup), setup.values
            for number in range(len(setup.dims)):
                held = step(number, held, np.ones(peers, bool))
            assert ((held - mean_of(setup)) ** 2).mean() <= 2e-32 * max(1, (setup.values**2).max()), peers


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize(("peers", "group_size"), [(1024, 32), (1000, 32), (97, 32), (40, 8)])
def test_section_8_0_mass_errs_at_most_as_much_as_the_plain_mean_on_the_same_lines(peers, group_size, p) -> None:
    """After rounds 1 to d, the mean over 50 seeds: at most 1.05 times the plain mean's, plus 1e-25."""
    rounds = len(plan_grid(peers, group_size))
    errors = np.zeros((2, rounds))
    for seed in range(50):
        setup = start(peers, group_size, seed)
        step, by_mass, by_plain = moshpit_weighted(setup), setup.values, setup.values
        for number in range(rounds):
            alive = setup.random.random_sample(peers) >= p
            by_mass = step(number, by_mass, alive)
            by_plain = group_means(by_plain, grid_numbers(peers, setup.dims, number), alive)
            errors[:, number] += [((held - mean_of(setup)) ** 2).mean() / 50 for held in (by_mass, by_plain)]
    assert (errors[0] <= 1.05 * errors[1] + 1e-25).all()


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("uneven", [False, True], ids=["equal weights", "weights 0 to 99"])
def test_section_8_0_conserved_shares_keep_the_mean_whoever_is_absent(p, uneven) -> None:
    """sum(mu x) / sum(mu) to 1e-12 after each of 20 rounds; no share is negative."""
    for seed, (peers, group_size) in enumerate([(1024, 32), (1000, 32), (97, 8), (50, 3)]):
        setup = start(peers, group_size, seed, uneven=uneven)
        step, held = MoshpitConserved(setup), setup.values
        for number in range(20):
            held = step(number, held, setup.random.random_sample(peers) >= p)
            assert step.mu @ held / step.mu.sum() == pytest.approx(mean_of(setup), abs=1e-12)
            assert step.mu.sum() == pytest.approx(setup.weights.sum(), rel=1e-12)
            assert step.mu.min() >= 0


def test_section_8_0_conserved_shares_have_no_floor() -> None:
    """(1024, .005): below 1e-15 by round 12, where mass stays above 5e-7."""
    errors = {}
    for method in ("moshpit_conserved", "moshpit_weighted"):
        one = Averaging(method=method, failure_rate=0.005)
        runs = [one.run(seed) for seed in range(20)]
        errors[method] = np.mean([run["error_to_mean_by_iteration"] for run in runs], axis=0)
    assert errors["moshpit_conserved"][11] < 1e-15
    assert 5e-7 < errors["moshpit_weighted"][11] < 2e-5


@pytest.mark.parametrize(("method", "rounds"), [("moshpit_weighted", 3), ("moshpit_conserved", 3)])
def test_section_8_0_random_weights_lead_to_the_weighted_mean(method, rounds) -> None:
    one = Averaging(method=method, peers=1000, weights="random")
    assert one.dims is not None
    assert len(one.dims) == rounds
    for seed in range(5):
        figures = one.run(seed)
        assert figures["iterations_1e9"] == rounds
        assert figures["error_to_mean_by_iteration"][rounds - 2] > 1e-4
        assert figures["error_to_mean_by_iteration"][rounds - 1] < 1e-30
