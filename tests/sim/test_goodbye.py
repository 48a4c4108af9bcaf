"""Scripts that average once and exit: whoever is done first leaves at once, and costs the others nothing."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
import torch

from group import Member, members
from shoal.core.loop import run_virtual
from shoal.protocols.butterfly import RoundResult, butterfly
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import whole_group


@pytest.mark.parametrize("seed", range(30))
def test_each_member_leaves_as_soon_as_it_has_its_result_and_all_have_the_same(seed: int) -> None:
    random = Random(seed)
    count = 2 + seed % 3
    inputs = torch.randn(count, 1000, generator=torch.Generator().manual_seed(seed))

    async def average_and_leave(member: Member, roll: Roll, values: torch.Tensor) -> RoundResult:
        result = await butterfly(
            member.rounds, whole_group(roll), (values, torch.empty(0, dtype=torch.float64)),
            source=member.host.peer_id, mass=1.0, part_bytes=1024, timeout_seconds=30.0,
        )  # fmt: skip
        await member.host.goodbye("it left")
        await member.transport.close()
        return result

    async def main() -> None:
        async with members(count, latency_seconds=lambda: random.choice([0.002, 0.01, 0.05])) as group:
            ids = [member.host.peer_id for member in group]
            roll = Roll("roll", "call", 1, ids, [1.0] * count, [None] * count)
            results = await asyncio.gather(
                *(average_and_leave(member, roll, values) for member, values in zip(group, inputs, strict=True))
            )
        expected = inputs.double().mean(0)
        for result in results:
            assert torch.equal(result.vectors[0], results[0].vectors[0])
            assert (result.vectors[0] - expected).abs().max() < 1e-6

    run_virtual(main(), limit_seconds=100)
