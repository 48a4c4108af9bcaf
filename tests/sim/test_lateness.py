"""A member that begins a group round late, or stalls for a second, and then keeps pace, is in it to the end."""

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
CRAWL_BYTES_PER_SECOND = 50_000
Outcomes = list[RoundResult | BaseException]


async def average(
    *, weights: tuple[float, ...] = (1.0,) * 4, late_seconds: float = 0.0, stall_seconds: float = 0.0
) -> Outcomes:
    """The last of four begins late, or sends next to nothing at first."""
    async with members(4) as group:
        roll = Roll("roll", "call", 1, [member.host.peer_id for member in group], list(weights), [None] * 4)
        uplink = group[3].transport.uplink
        usual, uplink.bytes_per_second = uplink.bytes_per_second, CRAWL_BYTES_PER_SECOND
        asyncio.get_running_loop().call_later(stall_seconds, setattr, uplink, "bytes_per_second", usual)

        async def one(number: int, member: Member) -> RoundResult:
            await asyncio.sleep(late_seconds if number == 3 else 0.0)
            vectors = torch.full((FLOATS,), float(number)), torch.empty(0, dtype=torch.float64)
            return await butterfly(
                member.rounds, whole_group(roll), vectors, source=member.host.peer_id, mass=weights[number],
                part_bytes=1 << 14, timeout_seconds=30,
            )  # fmt: skip

        works = [one(number, member) for number, member in enumerate(group)]
        return await asyncio.gather(*works, return_exceptions=True)


def check(outcomes: Outcomes, mean: float) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, RoundResult), outcome
        assert torch.equal(outcome.vectors[0], torch.full((FLOATS,), mean))


@pytest.mark.parametrize("late_seconds", [0.0, 0.6, 0.8, 0.9, 0.95, 1.0])
def test_a_late_start_is_no_slow_pace(late_seconds):
    check(run_virtual(average(late_seconds=late_seconds), limit_seconds=60), 1.5)


@pytest.mark.parametrize("stall_seconds", [0.5, 1.0])
def test_a_stall_of_a_sender_is_no_slow_pace(stall_seconds):
    check(run_virtual(average(stall_seconds=stall_seconds), limit_seconds=60), 1.5)


@pytest.mark.parametrize("stall_seconds", [0.5, 1.0, 1.5, 2.0])
def test_a_stall_of_a_reducer_is_no_slow_pace(stall_seconds):
    """It has no weight, so the others end at once but for its share."""
    check(run_virtual(average(weights=(1.0, 1.0, 1.0, 0.0), stall_seconds=stall_seconds), limit_seconds=60), 1.0)
