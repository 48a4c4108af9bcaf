"""Fault injection in one group: Moshpit reference, section 3 and check 15. The rest of the 200 repeats: acceptance."""

from __future__ import annotations

import pytest

from faults import PAIRS, check_trials

REPEATS = 3


@pytest.mark.parametrize("pair", range(len(PAIRS)), ids=[" and ".join(pair) for pair in PAIRS])
def test_check_15_of_five_peers_two_fail_and_the_others_end_in_time_equal_and_with_the_reported_mean(pair) -> None:
    trials = check_trials([pair + len(PAIRS) * repeat for repeat in range(REPEATS)])
    assert all(one.kinds == PAIRS[pair] for one in trials)
    assert sum(one.struck for one in trials) >= REPEATS, "the faults came in time"
    assert any(one.taken_over or one.left_out_parts for one in trials) or PAIRS[pair] == ("slow", "slow")
