"""Random small swarms in which anything fails at any time; and faults planted in the protocol, which that must find."""

from __future__ import annotations

import pytest
from mutants import MUTANTS

from shoal.sim.chaos import Chaos

SEEDS, BATCH = 200, 10


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_nothing_breaks_what_must_always_hold(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            Chaos().run(seed)
        except BaseException as error:
            again = f'python -c "from shoal.sim.chaos import Chaos; Chaos().run({seed})"'
            error.add_note(f"seed {seed}; again with: {again}")
            raise


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    Chaos().run(mutant.seed)  # it is the fault that is found
    with mutant.planted(), pytest.raises(AssertionError, match=mutant.found_by):
        Chaos().run(mutant.seed)


def test_one_seed_is_one_history() -> None:
    first = Chaos().run(5)
    assert Chaos().run(5) == first
    assert Chaos().run(6)["trace_digest"] != first["trace_digest"]
