"""A member that begins a group round later than the others, and then keeps pace, is not late."""

from __future__ import annotations

import asyncio

import pytest
import torch

from group import Member, members
from shoal.core.loop import run_virtual
from shoal.protocols.butterfly import RoundResult, butterfly
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import whole_group

FLOATS = 500_000


async def average_with_a_late_start(late_seconds: float) -> list[RoundResult | BaseException]:
    async with members(4) as group:
        roll = Roll("roll", "call", 1, [member.host.peer_id for member in group], [1.0] * 4, [None] * 4)

        async def one(number: int, member: Member) -> RoundResult:
            await asyncio.sleep(late_seconds if number == 3 else 0.0)
            vectors = torch.full((FLOATS,), float(number)), torch.empty(0, dtype=torch.float64)
            return await butterfly(
                member.rounds, whole_group(roll), vectors, source=member.host.peer_id, mass=1.0,
                part_bytes=1 << 14, timeout_seconds=30,
            )  # fmt: skip

        works = [one(number, member) for number, member in enumerate(group)]
        return await asyncio.gather(*works, return_exceptions=True)


@pytest.mark.parametrize("late_seconds", [0.0, 0.6, 0.8, 0.9, 0.95, 1.0])
def test_a_late_start_is_no_slow_pace(late_seconds):
    for result in run_virtual(average_with_a_late_start(late_seconds), limit_seconds=60):
        assert isinstance(result, RoundResult), result
        assert torch.equal(result.vectors[0], torch.full((FLOATS,), 1.5))
