"""Fault injection in one group: Moshpit reference, section 3 and check 15. The rest of the 200 repeats: acceptance."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from faults import PAIRS, check_trials
from group import members
from shoal.core.loop import run_virtual
from shoal.protocols.butterfly import butterfly
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import whole_group

REPEATS = 3


@pytest.mark.parametrize("pair", range(len(PAIRS)), ids=[" and ".join(pair) for pair in PAIRS])
def test_check_15_of_five_peers_two_fail_and_the_others_end_in_time_equal_and_with_the_reported_mean(pair) -> None:
    trials = check_trials([pair + len(PAIRS) * repeat for repeat in range(REPEATS)])
    assert all(one.kinds == PAIRS[pair] for one in trials)
    assert sum(one.struck for one in trials) >= REPEATS, "the faults came in time"
    assert any(one.taken_over or one.left_out_parts for one in trials) or PAIRS[pair] == ("slow", "slow")


def test_section_3_what_still_comes_for_a_round_that_was_given_up_does_no_harm() -> None:
    """The others go on sending, and may die: it has no values any more. `members` looks at the faults of each host."""

    async def main(moment: float) -> None:
        rows = np.random.default_rng(3).normal(size=(3, 100_000)).astype(np.float32)
        async with members(3) as group:
            roll = Roll("three", "call", 1, [one.host.peer_id for one in group], [1.0] * 3, [None] * 3)
            averagings = [
                asyncio.create_task(
                    butterfly(
                        one.rounds, whole_group(roll), (torch.from_numpy(row), torch.empty(0, dtype=torch.float64)),
                        source=one.host.peer_id, mass=1.0, part_bytes=4096, timeout_seconds=20.0,
                    )
                )
                for one, row in zip(group, rows, strict=True)
            ]  # fmt: skip
            await asyncio.sleep(moment)
            averagings[0].cancel()
            await asyncio.sleep(0.01)
            group[1].transport.crash()
            await asyncio.gather(*averagings, return_exceptions=True)

    for moment in np.linspace(0.02, 0.14, 13):
        run_virtual(main(float(moment)), limit_seconds=100)
