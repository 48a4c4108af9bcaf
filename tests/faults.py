"""A group round of five in which two members fail, each in its own way, at a random moment. All from one seed.

before      it is in the roll, and its machine died before the round began
sending     its machine dies as it sends a random one of its contributions
reducing    its machine dies as it sends a random one of the means that it reduced
slow        from a random moment on its line is 3 to 200 times slower
cancel      its averaging is given up at a random moment; the peer lives on, and answers
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from group import Member, members
from shoal.core.loop import run_virtual
from shoal.net.stream import Stream
from shoal.protocols.butterfly import RoundResult, butterfly
from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import PartMeanSent, PartSent, whole_group

KINDS = ("before", "sending", "reducing", "slow", "cancel")
PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))
COUNT, SIZE, PART_BYTES, BYTES_PER_SECOND = 5, 10_007, 1024, 1e6
UNDISTURBED_SECONDS = 0.15
TIMEOUT_SECONDS = 20.0
DEAD_SECONDS, SLOW_SECONDS = 2.0, 15.0
"""Within these everybody healthy must be done: where a member dies, or gives up, its connections say so at once."""
WAY = {"sending": PartSent, "reducing": PartMeanSent}


@dataclass(frozen=True)
class Trial:
    """What the three healthy members have: results or errors, and after how many seconds the last of them had it."""

    kinds: tuple[str, str]
    struck: int  # of the two faults, how many came before the end of the round
    results: int
    errors: tuple[str, ...]
    seconds: float
    taken_over: int
    left_out_parts: int


def trial(seed: int) -> Trial:
    """One round; raises AssertionError where something is not as it must be."""
    return run_virtual(_round(Random(seed), PAIRS[seed % len(PAIRS)]), limit_seconds=200)


async def _round(random: Random, kinds: tuple[str, str]) -> Trial:
    rows = np.random.default_rng(random.getrandbits(32)).normal(size=(COUNT, SIZE)).astype(np.float32)
    weights = [random.choice([1.0, random.uniform(0.1, 50)]) for _ in range(COUNT)]
    async with members(COUNT) as group:
        for member in group:
            member.transport.uplink.bytes_per_second = member.transport.downlink.bytes_per_second = BYTES_PER_SECOND
        ids = [member.host.peer_id for member in group]
        roll = Roll("five", "call", 1, ids, weights, [random.choice([None, 5e6, 9e6]) for _ in range(COUNT)])
        vectors = [(torch.from_numpy(row.copy()), torch.empty(0, dtype=torch.float64)) for row in rows]
        faulty = dict(zip(random.sample(range(COUNT), 2), kinds, strict=True))
        faults = [_Fault(kind, group[number], random) for number, kind in faulty.items()]
        for fault in faults:
            if fault.kind == "before":
                fault.strike()
        await asyncio.sleep(random.choice([0.0, 0.005, 0.5]))
        began, running = asyncio.get_running_loop().time(), {}
        with _watching(faults):
            for number in random.sample(range(COUNT), COUNT):
                if faulty.get(number) != "before":
                    running[number] = asyncio.create_task(
                        _average(group[number], roll, vectors[number], weights[number])
                    )
            for fault, number in zip(faults, faulty, strict=True):
                fault.begin(running.get(number))
            healthy = [number for number in range(COUNT) if number not in faulty]
            found = await asyncio.gather(*(running[number] for number in healthy), return_exceptions=True)
            seconds = asyncio.get_running_loop().time() - began
            struck = sum(fault.struck for fault in faults)
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
        assert all(vector[0].numpy().tobytes() == row.tobytes() for vector, row in zip(vectors, rows, strict=True))
    results = [one for one in found if isinstance(one, RoundResult)]
    _check(results, ids, rows, weights, {ids[number] for number in healthy})
    parts = results[0].report.parts if results else ()
    return Trial(
        kinds, struck, len(results), tuple(repr(one) for one in found if not isinstance(one, RoundResult)), seconds,
        sum(part.attempt > 0 for part in parts), sum(len(part.contributors) < COUNT for part in parts),
    )  # fmt: skip


async def _average(
    member: Member, roll: Roll, vectors: tuple[torch.Tensor, torch.Tensor], weight: float
) -> RoundResult:
    return await butterfly(
        member.rounds, whole_group(roll), vectors, source=member.host.peer_id, mass=weight,
        part_bytes=PART_BYTES, timeout_seconds=TIMEOUT_SECONDS,
    )  # fmt: skip


def _check(
    results: Sequence[RoundResult], ids: Sequence[str], rows: np.ndarray, weights: Sequence[float], healthy: set[str]
) -> None:
    """Equal bit for bit, in what is reported of the parts too; each part is the mean of its reported contributors.

    Whatever a healthy member reduced has all healthy ones in it; a slow reducer may find that all others are late.
    """
    for one in results:
        assert one.vectors[0].numpy().tobytes() == results[0].vectors[0].numpy().tobytes()
        assert one.report.parts == results[0].report.parts
    covered = 0
    for part in results[0].report.parts if results else ():
        numbers = [ids.index(who) for who in part.contributors]
        assert len(set(numbers)) == len(numbers)
        assert healthy <= {*part.contributors} or part.reducer not in healthy
        covered += part.stop - part.start
        inside = rows[numbers, part.start : part.stop].astype(np.float64)
        mean = np.average(inside, axis=0, weights=[weights[number] for number in numbers])
        assert abs(sum(weights[number] for number in numbers) - part.weight) <= 1e-9 * part.weight
        values = results[0].vectors[0][part.start : part.stop].numpy()
        assert np.abs(values - mean).max() <= np.spacing(np.abs(inside).max().astype(np.float32))
    assert covered == (SIZE if results else 0)


class _Fault:
    def __init__(self, kind: str, member: Member, random: Random) -> None:
        self.kind, self.member, self.struck = kind, member, False
        self.transport = member.transport
        self._after_seconds = random.uniform(0, UNDISTURBED_SECONDS)
        self._after_messages = random.randrange(4 * SIZE * 4 // PART_BYTES // COUNT)
        self._slower = 10 ** random.uniform(0.5, 2.3)
        self._averaging: asyncio.Task[Any] | None = None

    def begin(self, averaging: asyncio.Task[Any] | None) -> None:
        self._averaging = averaging
        if self.kind in ("slow", "cancel"):
            asyncio.get_running_loop().call_later(self._after_seconds, self.strike)

    def sends(self, message: object) -> None:
        if self.kind in WAY and isinstance(message, WAY[self.kind]) and not self.struck:
            self._after_messages -= 1
            if self._after_messages < 0:
                self.strike()

    def strike(self) -> None:
        self.struck = self._averaging is None or not self._averaging.done()
        if self.kind == "slow":
            for line in (self.transport.uplink, self.transport.downlink):
                line.bytes_per_second /= self._slower
            return
        if self.kind != "cancel":
            self.transport.crash()
        if self._averaging is not None:
            self._averaging.cancel()


@contextlib.contextmanager
def _watching(faults: Sequence[_Fault]) -> Iterator[None]:
    """Every message on a stream is shown to its sender's fault, before it is sent."""
    send = Stream.send

    async def watched(stream: Stream, message: Any, payload: Any = b"") -> None:
        for fault in faults:
            if stream._channel._transport is fault.transport:  # type: ignore[attr-defined]
                fault.sends(message)
        await send(stream, message, payload)

    Stream.send = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stream.send = send  # type: ignore[method-assign]


def check_trials(seeds: Sequence[int]) -> list[Trial]:
    """Each pair of faults in turn: all three healthy members have a result, long before the round's own limit."""
    trials = [trial(seed) for seed in seeds]
    for seed, one in zip(seeds, trials, strict=True):
        assert one.results == COUNT - 2, f"seed {seed}: {one}"
        assert one.seconds < (SLOW_SECONDS if "slow" in one.kinds else DEAD_SECONDS), f"seed {seed}: {one}"
    return trials
