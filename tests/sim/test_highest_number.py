"""Whoever names the highest number of all does not end the averagings of the others, nor hurries them for ever."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import peers
from shoal.core.loop import run_virtual
from shoal.overlay.charter import Charter
from shoal.protocols.meeting import Start
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import MAX_NUMBER, TRAIN, Invite, Invited
from shoal.strategies.allreduce import AllReduce

ROWS = np.arange(3000, dtype=np.float32).reshape(3, 1000)


@pytest.mark.parametrize("number", [MAX_NUMBER, 2**53 - 1, 2**63 - 1])
def test_the_others_average_on_after_an_invitation_to_the_last_number(number: int) -> None:
    async def main() -> None:
        async with peers.nodes(3) as group:
            for other in group[1:]:
                await group[0].peer.host.call(other.id, Invite(TRAIN, number), Invited, timeout_seconds=5)
            for _ in range(3):
                outcomes = await peers.average(group, AllReduce(), ROWS)
                assert all(isinstance(one, Outcome) and one.exact for one in outcomes), outcomes

    run_virtual(main(), limit_seconds=1000)


@pytest.mark.parametrize(("plain_rounds", "invited"), [(None, False), (2, True)])
def test_a_start_means_something_only_where_the_run_meets(plain_rounds: int | None, invited: bool) -> None:
    """Elsewhere nobody would ever answer to it, and each averaging would begin at once after the one before."""
    options = {"name": "Moshpit", "plain_rounds": plain_rounds}
    charter = Charter("r", "charter", "registrar", 0.0, strategy=options, schema=[])

    async def main() -> None:
        async with peers.nodes(2) as (one, other):
            other.peer.members.charter = charter
            one.peer.host.tell([other.id], Start(5))
            await asyncio.sleep(1)
            assert other.peer.meetings.invited is invited

    run_virtual(main(), limit_seconds=1000)
