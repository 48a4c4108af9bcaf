"""A member whose group was done early waits in the next round for those whose group takes long."""

from __future__ import annotations

import asyncio

import pytest
import torch

from group import Member, members
from shoal.core.loop import run_virtual
from shoal.protocols.butterfly import RoundResult, butterfly
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import Group
from shoal.protocols.rounds import FIND_SECONDS

SIZE = 1 << 18  # a MB


@pytest.mark.parametrize("transfer_seconds", [FIND_SECONDS - 2, FIND_SECONDS + 3, 3 * FIND_SECONDS])
def test_it_is_not_refused_while_they_are_on_their_way(transfer_seconds) -> None:
    """Members 0 and 1 average over slow lines; member 2 begins the round of all three at once. All end equal."""

    async def main() -> list[RoundResult]:
        async with members(3) as three:
            ids = [member.host.peer_id for member in three]
            roll = Roll("roll", "train", 1, ids, [1.0, 1.0, 1.0], [None] * 3)
            first, second = Group(roll, 0, (0, 1), (1.0, 1.0)), Group(roll, 1, (0, 1, 2), (1.0, 1.0, 1.0))
            lines = [line for member in three[:2] for line in (member.transport.uplink, member.transport.downlink)]

            async def slow(member: Member, number: int) -> RoundResult:
                await in_round(member, first, number)
                for line in lines:
                    line.bytes_per_second = 12.5e6
                return await in_round(member, second, number)

            for line in lines:
                line.bytes_per_second = 4 * SIZE / transfer_seconds
            return await asyncio.gather(slow(three[0], 0), slow(three[1], 1), in_round(three[2], second, 2))

    results = run_virtual(main(), limit_seconds=100)
    assert {result.vectors[0].numpy().tobytes() for result in results} == {results[0].vectors[0].numpy().tobytes()}
    assert all(part.attempt == 0 for result in results for part in result.report.parts)


async def in_round(member: Member, group: Group, number: int) -> RoundResult:
    values = torch.full((SIZE,), float(number)), torch.empty(0, dtype=torch.float64)
    return await butterfly(
        member.rounds, group, values, source=member.host.peer_id, mass=1.0, part_bytes=1 << 16, timeout_seconds=60.0
    )
