"""256 peers of which 1 % die in each round: nothing hangs, and the error is that of averaging without those absent."""

from __future__ import annotations

import pytest

from shoal.sim.churn import Churn

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(3000)]

SEEDS, FACTOR = 5, 2.0


def test_the_error_under_churn_is_that_of_the_scenario_averaging() -> None:
    churn = Churn(peers=256, group_size=16, failure_rate=0.01)
    figures = churn.summary([churn.run(seed) for seed in range(SEEDS)])
    print(f"churn: {figures}")
    assert figures["averagings"] >= SEEDS * churn.averagings
    assert figures["died"] == figures["joined"] > 0
    for times in figures["times_averaging"][:2]:
        assert 1 / FACTOR <= times <= FACTOR
