"""Hosts that have no links yet and only know where the members of their groups listen; the roll is made by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

import torch

from group import Member, members
from shoal.core.loop import run_virtual
from shoal.planning.grid import grid_groups, plan_grid
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL, Roll
from shoal.strategies.moshpit import Moshpit
from shoal.tensors.flat import Vectors


class GivenRoll:
    """A peer for a strategy: everything it needs of one, with this roll as the only one that there is."""

    def __init__(self, member: Member, roll: Roll) -> None:
        self.id, self.clock, self.rounds = member.host.peer_id, member.host.clock, member.rounds
        self.rolls, self._roll = self, roll

    async def call(self, *_: object) -> Roll:
        return self._roll

    def bandwidth(self) -> float | None:
        return None


def acquaint(group: Sequence[Member], numbers: Iterable[int]) -> None:
    """Each of these knows where the others listen. Nobody dials yet."""
    for one, other in itertools.permutations(numbers, 2):
        group[one].host.know(group[other].host.peer_id, group[other].host.endpoints)


def average_on_demand(
    strategy: Moshpit, inputs: Sequence[Vectors], weights: Sequence[float]
) -> tuple[list[str], list[Outcome]]:
    """The members' ids in the roll's order, and what each of them has at the end."""
    count = len(inputs)

    async def main() -> tuple[list[str], list[Outcome]]:
        async with members(count, strangers=set(itertools.combinations(range(count), 2))) as group:
            dims = plan_grid(count, strategy.group_size)
            for round_index in range(len(dims)):
                for numbers in grid_groups(count, dims, round_index):
                    acquaint(group, numbers)
            ids = [member.host.peer_id for member in group]
            roll = Roll("a roll", CALL, 1, ids, list(weights), [None] * count)
            averaging = [
                strategy.all_reduce(GivenRoll(member, roll), CALL, vectors, weight, [])  # type: ignore[arg-type]
                for member, vectors, weight in zip(group, inputs, weights, strict=True)
            ]
            return ids, await asyncio.gather(*averaging)

    return run_virtual(main(), limit_seconds=600)


def inputs_of(count: int, size: int = 64) -> list[Vectors]:
    """A float32 and a float64 vector for each member, from its count alone."""
    generator = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(size, generator=generator),
            torch.randn(5, generator=generator, dtype=torch.float64) * 1e3,
        )
        for _ in range(count)
    ]
