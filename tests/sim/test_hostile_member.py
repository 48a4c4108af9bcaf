"""A member of the roll that sends nonsense: as a contributor, as a reducer, and in the closing exchange.

Four honest members and it. Each honest one gets the mean of the honest, all the same bits, and raises nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from group import Member, average, members
from shoal.core.loop import run_virtual
from shoal.net.envelope import Done, Message
from shoal.net.stream import Stream
from shoal.protocols.butterfly import RoundResult, butterfly
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import (
    AskVersions,
    Begin,
    PartMeanSent,
    PartSent,
    Recover,
    VersionsHeld,
    Where,
    whole_group,
)
from shoal.tensors.flat import Vectors, as_bytes

HONEST, SIZE, PART_BYTES = 4, 5000, 1 << 11
ELEMENTS = PART_BYTES // 4
HOSTILE = HONEST
WEIGHTS = [2**0.5, 2.718281828459045, 1 / 3, 3.141592653589793, 5.0]
WHERE = Where("call", 1, f"roll-{WEIGHTS}", 0, 0)
ONES, DIGEST = as_bytes(torch.ones(ELEMENTS)), bytes(16)


def inputs() -> list[Vectors]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(SIZE, generator=generator), torch.empty(0, dtype=torch.float64)) for _ in range(HONEST + 1)]


Attack = Callable[[list[Member]], Awaitable[None]]


def attacked(
    prepare: Callable[[Member], None], attack: Attack, *, has_share: bool
) -> tuple[list[Outcome], list[Member]]:
    """What the honest have at the end, within 20 s."""

    async def main() -> tuple[list[Outcome], list[Member]]:
        async with members(HONEST + 1) as group:
            prepare(group[HOSTILE])
            attacking = asyncio.create_task(attack(group))
            bandwidths = [1e6] * HONEST + [1e6 if has_share else 0.0]
            outcomes = await average(
                group, inputs(), WEIGHTS, bandwidths, part_bytes=PART_BYTES, absent=[HOSTILE], timeout_seconds=20
            )
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)
            honest = outcomes[:HONEST]
            assert all(isinstance(outcome, Outcome) for outcome in honest), honest
            return honest, group[:HONEST]  # type: ignore[return-value]

    return run_virtual(main(), limit_seconds=200)


def check_honest_mean(outcomes: list[Outcome]) -> None:
    rows = np.stack([given[0].double().numpy() for given in inputs()[:HONEST]])
    mean = np.average(rows, axis=0, weights=WEIGHTS[:HONEST])
    assert len({outcome.vectors[0].numpy().tobytes() for outcome in outcomes}) == 1
    assert np.abs(outcomes[0].vectors[0].double().numpy() - mean).max() <= 1e-6 * np.abs(rows).max()
    hostile = outcomes[0].roll.members[HOSTILE]
    for outcome in outcomes:
        assert not outcome.exact
        assert hostile not in outcome.contributed
        assert hostile in {**outcome.rounds[0].left_out, **outcome.rounds[0].lost}


# ---------------------------------------------------------------- as a contributor

SAMPLES = {
    "too few bytes": (PartSent(0), ONES[:-4], 5.0),
    "too many bytes": (PartSent(0), as_bytes(torch.ones(ELEMENTS + 1)), 5.0),
    "no bytes": (PartSent(0), b"", 5.0),
    "NaN": (PartSent(0), as_bytes(torch.full((ELEMENTS,), math.nan)), 5.0),
    "infinity": (PartSent(0), as_bytes(torch.full((ELEMENTS,), math.inf)), 5.0),
    "an index beyond all": (PartSent(10**6), ONES, 5.0),
    "a negative index": (PartSent(-1), ONES, 5.0),
    "a mass beyond the roll's": (PartSent(0), ONES, 1e30),
    "a negative mass": (PartSent(0), ONES, -5.0),
    "a mass that is no number": (PartSent(0), ONES, math.nan),
    "a mean that nobody asked for": (PartMeanSent(0, 0, DIGEST, 5.0, [4]), ONES, 5.0),
    "a message of another kind": (Done(), ONES, 5.0),
}


def contribute(message: Message, payload: Any, mass: float) -> Attack:
    """To each honest member: a stream that begins with this, in place of the parts of its share."""

    async def to(group: list[Member], target: int, first: int) -> None:
        begin = Begin(WHERE, group[HOSTILE].host.peer_id, mass)
        index = message.index + first if isinstance(message, PartSent) and message.index == 0 else None
        sent = PartSent(index) if index is not None else message
        async with group[HOSTILE].host.stream(group[target].host.peer_id, begin) as stream:
            await stream.send(sent, payload)
            await asyncio.sleep(30)

    async def work(group: list[Member]) -> None:
        parts_of_a_share = -(-SIZE // HONEST // ELEMENTS)
        to_all = (to(group, target, target * parts_of_a_share) for target in range(HONEST))
        await asyncio.gather(*to_all, return_exceptions=True)

    return work


@pytest.mark.parametrize("what", SAMPLES)
def test_a_contributor_of_nonsense_is_left_out(what: str) -> None:
    outcomes, _ = attacked(lambda hostile: None, contribute(*SAMPLES[what]), has_share=False)
    check_honest_mean(outcomes)


def test_parts_of_other_shares_are_counted_and_change_nothing() -> None:
    async def work(group: list[Member]) -> None:
        begin = Begin(WHERE, group[HOSTILE].host.peer_id, 5.0)
        async with group[HOSTILE].host.stream(group[0].host.peer_id, begin) as stream:
            for index in (3, 3, 6):
                await stream.send(PartSent(index), ONES)
            await asyncio.sleep(30)

    outcomes, honest = attacked(lambda hostile: None, work, has_share=False)
    check_honest_mean(outcomes)
    assert honest[0].rounds.dropped == {"a part that nobody waits for": 3}


# ---------------------------------------------------------------- as a reducer


def mean_sent(**changes: Any) -> PartMeanSent:
    fields = {"index": FIRST_OF_SHARE, "attempt": 0, "digest": DIGEST, "weight": 12.0, "contributors": [0, 1, 2, 3, 4]}
    return PartMeanSent(**(fields | changes))


FIRST_OF_SHARE = 8
"""Its parts are the last two of ten: each share has 1000 elements."""
BAD_MEANS: dict[str, tuple[dict[str, Any], Any]] = {
    "of another part": ({"index": 0}, ONES),
    "of a part beyond all": ({"index": 10**6}, ONES),
    "of absurd weight": ({"weight": 1e30}, ONES),
    "of negative weight": ({"weight": -1.0}, ONES),
    "of no weight, with values": ({"weight": 0.0}, ONES),
    "whose weight is no number": ({"weight": math.nan}, ONES),
    "of absurd attempt": ({"attempt": 10**9}, ONES),
    "of negative attempt": ({"attempt": -1}, ONES),
    "with a short digest": ({"digest": b"abc"}, ONES),
    "of contributors that do not exist": ({"contributors": [99]}, ONES),
    "of negative contributors": ({"contributors": [-7]}, ONES),
    "of too many contributors": ({"contributors": [0] * 100}, ONES),
    "that is not finite": ({}, as_bytes(torch.full((ELEMENTS,), math.nan))),
    "of the wrong size": ({}, ONES[:-4]),
}


async def nothing(_: list[Member]) -> None:
    return


@pytest.mark.parametrize("what", BAD_MEANS)
def test_a_reducer_of_nonsense_is_replaced(what: str) -> None:
    changes, payload = BAD_MEANS[what]

    async def reduce(stream: Stream, begin: Begin) -> None:
        await stream.send(mean_sent(**changes), payload)
        await asyncio.sleep(1)

    outcomes, _ = attacked(lambda hostile: hostile.host.serve_stream(Begin, reduce), nothing, has_share=True)
    check_honest_mean(outcomes)


# ---------------------------------------------------------------- in the closing exchange

TEN = [(0, DIGEST)] * 10
LISTS: dict[str, list[tuple[int, bytes]]] = {
    "empty": [],
    "too short": TEN[:9],
    "too long": TEN * 1000,
    "of negative attempts": [(-1, DIGEST)] * 10,
    "of absurd attempts": [(10**9, DIGEST)] * 10,
    "of short digests": [(0, b"")] * 10,
    "lower than everybody's, and not to be had": TEN,
}


@pytest.mark.parametrize("what", LISTS)
def test_absurd_versions_in_the_closing_exchange(what: str) -> None:
    """It ends each stream at once, so that its share is taken over, and then says that it holds other versions."""

    def prepare(hostile: Member) -> None:
        async def reduce(stream: Stream, begin: Begin) -> None:
            return

        async def recover(stream: Stream, begin: Recover) -> None:
            await stream.send(Done())

        async def versions(peer_id: str, call: AskVersions) -> Message:
            return VersionsHeld(LISTS[what])

        hostile.host.serve_stream(Begin, reduce)
        hostile.host.serve_stream(Recover, recover)
        hostile.host.serve(AskVersions, versions)

    outcomes, _ = attacked(prepare, nothing, has_share=True)
    check_honest_mean(outcomes)
    assert all(outcome.rounds[0].exchanges >= 1 for outcome in outcomes)


# ---------------------------------------------------------------- early streams


@pytest.mark.parametrize("late_seconds", [0.1, 1.0, 3.0])
def test_streams_that_come_before_the_round_is_open_wait_for_it(late_seconds: float) -> None:
    """One honest member comes to the round later than the others: all are in it."""

    async def main() -> None:
        async with members(HONEST) as group:
            ids = [member.host.peer_id for member in group]
            roll = Roll("a roll", "call", 1, ids, WEIGHTS[:HONEST], [None] * HONEST)

            async def one(number: int) -> RoundResult:
                await asyncio.sleep(late_seconds if number == 2 else 0.0)
                return await butterfly(
                    group[number].rounds, whole_group(roll), inputs()[number], source=ids[number],
                    mass=WEIGHTS[number], part_bytes=PART_BYTES, timeout_seconds=20,
                )  # fmt: skip

            results = await asyncio.gather(*map(one, range(HONEST)))
            assert all(result.mass == pytest.approx(sum(WEIGHTS[:HONEST]), rel=1e-12) for result in results)
            assert all(set(result.report.contributed) == set(ids) for result in results)
            assert len({result.vectors[0].numpy().tobytes() for result in results}) == 1
            assert not any(member.rounds.dropped for member in group)

    run_virtual(main(), limit_seconds=100)
