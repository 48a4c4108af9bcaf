"""Chaos finds each fault that is planted in the protocol within 200 seeds; the seed is printed."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, first_seed

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

SEEDS = 200


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_within_200_seeds(name: str) -> None:
    found = first_seed(MUTANTS[name], SEEDS)
    assert found is not None
    seed, complaint = found
    print(f"{name}: seed {seed}: {complaint.splitlines()[:2]}")
