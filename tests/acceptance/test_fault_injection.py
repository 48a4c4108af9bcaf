"""Fault injection in one group, 200 repeats (Moshpit reference, check 15), on virtual time; the figures are printed."""

from __future__ import annotations

import pytest

from faults import PAIRS, check_trials

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

REPEATS = 200


def test_check_15_of_five_peers_two_fail_in_each_way_200_repeats() -> None:
    trials = check_trials(range(REPEATS))
    for pair in PAIRS:
        found = [one for one in trials if one.kinds == pair]
        seconds = sorted(one.seconds for one in found)
        print(
            f"{' and '.join(pair):22} {len(found)} rounds: {sum(one.struck for one in found)} faults in time, "
            f"{sum(one.taken_over > 0 for one in found)} with parts taken over, "
            f"median {seconds[len(seconds) // 2]:.2f} s, longest {seconds[-1]:.2f} s"
        )
    assert sum(one.struck for one in trials) > 1.5 * REPEATS
