"""What does not belong to a group round changes nothing in it, and is counted.

Four honest members average. A fifth host, or one of the four on a connection beside the round, sends what is not due:
before the round, in its middle, or after it. The result must be the undisturbed one, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import torch
from crowd import now

from group import Member, average, members
from shoal.core.errors import RefusedError, RemoteError
from shoal.core.loop import run_virtual
from shoal.protocols.outcome import Outcome
from shoal.protocols.round_record import AskVersions, Begin, PartMeanSent, PartSent, Recover, VersionsHeld, Want, Where
from shoal.tensors.flat import Vectors, as_bytes

HONEST, SIZE, PART_BYTES = 4, 1 << 16, 1 << 13
WEIGHTS = [2**0.5, 2.718281828459045, 1 / 3, 3.141592653589793]
"""Not round: no mean lies half-way between two floats, where the order of arrival would decide how it is rounded."""
MOMENTS = {"before": -0.03, "as it begins": 0.01, "in the middle": 0.055, "near its end": 0.1, "after": 0.6}
"""Seconds from the beginning of the round, which takes about 0.13 s."""
NOT_OPEN, STRANGER = "a message of a roll that is not open here", "a message of a stranger to the roll"
DUPLICATE, NOT_DUE = "a duplicate part", "a part that nobody waits for"
SECOND = "a second stream of one member"
WHERE = Where("call", 1, f"roll-{WEIGHTS}", 0, 0)


def inputs() -> list[Vectors]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(SIZE, generator=generator), torch.empty(0, dtype=torch.float64)) for _ in range(HONEST)]


@dataclass(frozen=True)
class Run:
    """What each honest member has, what it has counted, and how long it took."""

    outcomes: list[Outcome]
    dropped: list[dict[str, int]]
    seconds: float

    @property
    def bits(self) -> list[bytes]:
        return [b"".join(v.numpy().tobytes() for v in outcome.vectors) for outcome in self.outcomes]

    def counted(self, *kinds: str) -> int:
        return sum(dropped.get(kind, 0) for dropped in self.dropped for kind in kinds)


Disturbance = Callable[[list[Member]], Awaitable[None]]


def disturbed(work: Disturbance | None, at_seconds: float = 0.0, *, fails: bool = True) -> Run:
    """A round of the four; `work` goes on before, in, or after it, and may end in a refusal if it `fails`."""

    async def main() -> Run:
        async with members(HONEST + 1) as group:
            began = now() + 1
            disturbing = asyncio.create_task(later(began + at_seconds, work, group)) if work else None
            await asyncio.sleep(1)
            outcomes = await average(group[:HONEST], inputs(), WEIGHTS, [None] * HONEST, part_bytes=PART_BYTES)
            seconds = now() - began
            if disturbing:
                async with asyncio.timeout(10):
                    with contextlib.suppress(RemoteError) if fails else contextlib.nullcontext():
                        await disturbing
            assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
            return Run(outcomes, [dict(member.rounds.dropped) for member in group[:HONEST]], seconds)  # type: ignore[arg-type]

    return run_virtual(main(), limit_seconds=100)


async def later(moment: float, work: Disturbance, group: list[Member]) -> None:
    await asyncio.sleep(moment - now())
    await work(group)


@pytest.fixture(scope="module")
def undisturbed() -> Run:
    run = disturbed(None)
    assert not any(run.dropped)
    assert all(outcome.exact for outcome in run.outcomes)
    assert 0.1 < run.seconds < 0.2
    return run


def begin_and_send(sender: int, where: Where, mass: float = 1.0) -> Disturbance:
    """A stream to each of the four, with values of every part on it; whatever comes back is read."""

    async def to(group: list[Member], target: int) -> None:
        begin = Begin(where, group[sender].host.peer_id, mass)
        async with group[sender].host.stream(group[target].host.peer_id, begin) as stream:
            for index in range(SIZE * 4 // PART_BYTES):
                await stream.send(PartSent(index), as_bytes(torch.full((PART_BYTES // 4,), 1e9)))
            await stream.receive(PartMeanSent)

    async def work(group: list[Member]) -> None:
        targets = [number for number in range(HONEST) if number != sender]
        done = await asyncio.gather(*(to(group, target) for target in targets), return_exceptions=True)
        assert all(isinstance(result, RemoteError) for result in done), done

    return work


def ask(where: Where, *, values: bool) -> Disturbance:
    """A stranger wants parts of member 0, and its list of versions: it gets neither."""

    async def work(group: list[Member]) -> None:
        stranger, target = group[HONEST].host, group[0].host.peer_id
        with pytest.raises(RefusedError):
            await stranger.call(target, AskVersions(where, 1), VersionsHeld, timeout_seconds=9)
        with pytest.raises(RemoteError):
            async with stranger.stream(target, Recover(where)) as stream:
                await stream.send(Want(0, values))
                await stream.receive(PartMeanSent)

    return work


STRANGE: dict[str, tuple[Disturbance, str]] = {
    "an older roll": (begin_and_send(0, Where("call", 0, "an older roll", 0, 0)), NOT_OPEN),
    "an older roll, from a stranger": (begin_and_send(HONEST, Where("call", 0, "an older roll", 0, 0)), NOT_OPEN),
    "another roll with this number": (begin_and_send(0, Where("call", 1, "its twin", 0, 0)), NOT_OPEN),
    "another roll, from a stranger": (begin_and_send(HONEST, Where("call", 1, "its twin", 0, 0)), NOT_OPEN),
    "a stranger to the roll": (begin_and_send(HONEST, WHERE), STRANGER),
    "a stranger of absurd mass": (begin_and_send(HONEST, WHERE, 1e300), STRANGER),
    "a stranger asks": (ask(WHERE, values=False), STRANGER),
    "a stranger asks for values": (ask(WHERE, values=True), STRANGER),
    "somebody asks for an older roll": (ask(Where("call", 0, "an older roll", 0, 0), values=True), NOT_OPEN),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_not_of_this_round_changes_no_bit_and_is_counted(strange: str, moment: str, undisturbed: Run) -> None:
    work, kind = STRANGE[strange]
    run = disturbed(work, MOMENTS[moment])
    assert run.bits == undisturbed.bits
    assert all(outcome.exact for outcome in run.outcomes)
    targets = 1 if "asks" in strange else 3 if work is not None and run.dropped[0] == {} else 4
    assert run.counted(kind) == (2 if "asks" in strange else targets), run.dropped
    assert run.counted(NOT_OPEN, STRANGER, DUPLICATE, NOT_DUE) == run.counted(kind)
    assert run.seconds < undisturbed.seconds + 0.2


def twice(*, waits: bool) -> Disturbance:
    """Member 0 opens a second stream to member 1, with its true values on it, and ends it at once or at the end."""

    async def work(group: list[Member]) -> None:
        own = inputs()[0][0]
        begin = Begin(WHERE, group[0].host.peer_id, WEIGHTS[0])
        parts_of_a_share = SIZE * 4 // PART_BYTES // HONEST
        async with group[0].host.stream(group[1].host.peer_id, begin) as stream:
            for index in range(parts_of_a_share, 2 * parts_of_a_share if waits else parts_of_a_share + 1):
                at = index * PART_BYTES // 4
                await stream.send(PartSent(index), as_bytes(own[at : at + PART_BYTES // 4]))
            if waits:
                await asyncio.sleep(1)

    return work


@pytest.mark.parametrize("moment", list(MOMENTS)[1:])
@pytest.mark.parametrize("waits", [True, False], ids=["all parts", "one part, and an early end"])
def test_a_duplicate_changes_no_bit_and_is_counted(waits: bool, moment: str, undisturbed: Run) -> None:
    run = disturbed(twice(waits=waits), MOMENTS[moment], fails=False)
    assert run.bits == undisturbed.bits
    assert all(outcome.exact for outcome in run.outcomes)
    assert run.counted(SECOND) == sum(run.dropped[1].values()) == 1
