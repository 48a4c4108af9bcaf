"""Members die at random moments of a group round: those who live end equal, or say that they did not."""

from __future__ import annotations

from collections import Counter

import pytest
from deaths import trial

COUNT = 1000
IN_TEST = 50


@pytest.mark.parametrize("seed", range(IN_TEST))
def test_survivors_have_a_result_and_it_is_the_same(seed: int) -> None:
    assert not trial(seed).errors


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_a_thousand_rounds_without_a_silent_difference() -> None:
    trials = [trial(seed) for seed in range(IN_TEST, COUNT)]
    errors = [done for done in trials if done.errors]
    kinds = Counter(f"{len(done.dead)} died" for done in trials)
    exchanges = Counter(done.exchanges for done in trials)
    print(
        f"\n{len(trials)} rounds ({dict(kinds)}): {sum(done.results for done in trials)} survivors with a result, "
        f"{sum(len(done.errors) for done in errors)} with an error; parts taken over in "
        f"{sum(done.taken_over > 0 for done in trials)} rounds; exchanges {dict(exchanges)}; "
        f"longest {max(done.seconds for done in trials):.2f} virtual s"
    )
    assert not errors
