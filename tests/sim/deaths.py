"""A group round in which members die at random moments, and what must be true of those who live. All from one seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from group import average, members
from shoal.core.errors import RoundError
from shoal.core.loop import run_virtual
from shoal.protocols.outcome import Outcome

SIZE, PART_BYTES = 1000, 1024
RETURN_SECONDS = 5.0


@dataclass(frozen=True)
class Trial:
    """What became of it. `taken_over` parts were reduced by another than their owner."""

    count: int
    dead: tuple[int, ...]
    results: int
    errors: tuple[str, ...]
    exchanges: int
    taken_over: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    count: int
    weights: list[float]
    bandwidths: list[float | None]
    latencies_seed: int


def setting(random: Random) -> Setting:
    count = random.randint(3, 16)
    weights = [random.choice([0.0, 1.0, random.uniform(0.1, 50)]) for _ in range(count)]
    bandwidths = [random.choice([None, None, random.uniform(1e6, 1e7)]) for _ in range(count)]
    return Setting(count, weights, bandwidths, random.getrandbits(32))


def inputs_of(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = np.random.default_rng(count).normal(size=(count, SIZE)).astype(np.float32)
    return [(torch.from_numpy(row.copy()), torch.empty(0, dtype=torch.float64)) for row in rows]


def run_round(given: Setting, deaths: dict[int, float]) -> tuple[list[Outcome | Exception | None], float]:
    """What each member has at the end, and how many seconds that took."""
    latencies = Random(given.latencies_seed)

    async def main() -> tuple[list[Outcome | Exception | None], float]:
        async with members(given.count, latency_seconds=lambda: latencies.choice([0.002, 0.01, 0.05])) as group:
            began = asyncio.get_running_loop().time()
            outcomes = await average(
                group, inputs_of(given.count), given.weights, given.bandwidths, part_bytes=PART_BYTES, deaths=deaths
            )
            return outcomes, asyncio.get_running_loop().time() - began

    return run_virtual(main(), limit_seconds=600)


def trial(seed: int) -> Trial:
    """Run one; raises AssertionError where something is not as it must be."""
    random = Random(seed)
    given = setting(random)
    undisturbed, duration = run_round(given, {})
    assert all(isinstance(outcome, Outcome) and outcome.exact for outcome in undisturbed), undisturbed
    most = 2 if given.count > 3 else 1
    victims = random.sample(range(given.count), random.randint(1, most))
    deaths = {victim: random.uniform(0, 1.1 * duration) for victim in victims}
    outcomes, seconds = run_round(given, deaths)
    assert seconds <= max(deaths.values()) + RETURN_SECONDS
    survivors = [outcome for number, outcome in enumerate(outcomes) if number not in deaths]
    results = [outcome for outcome in survivors if isinstance(outcome, Outcome)]
    errors = [outcome for outcome in survivors if not isinstance(outcome, Outcome)]
    assert all(isinstance(error, RoundError) for error in errors), errors
    check_results(results, inputs_of(given.count), given.weights)
    reports = [outcome.rounds[0] for outcome in results]
    return Trial(
        given.count, tuple(deaths), len(results), tuple(str(error) for error in errors),
        max((report.exchanges for report in reports), default=0),
        sum(part.attempt > 0 for part in reports[0].parts) if reports else 0, seconds,
    )  # fmt: skip


def check_results(
    results: Sequence[Outcome], inputs: list[tuple[torch.Tensor, torch.Tensor]], weights: Sequence[float]
) -> None:
    """Equal bit for bit, the same report of the parts, and each part the weighted mean of its reported contributors."""
    if not results:
        return
    first = results[0]
    ids = first.roll.members
    for outcome in results:
        assert outcome.rounds[0].parts == first.rounds[0].parts
        if first.roll.weights != [0.0] * len(ids):
            for part in first.rounds[0].parts:
                if part.weight > 0:
                    ours = outcome.vectors[0][part.start : part.stop].numpy()
                    assert ours.tobytes() == first.vectors[0][part.start : part.stop].numpy().tobytes()
    covered = 0
    for part in first.rounds[0].parts:
        numbers = [ids.index(who) for who in part.contributors]
        covered += part.stop - part.start
        total = sum(weights[number] for number in numbers)
        assert abs(total - part.weight) <= 1e-9 * max(1.0, total)
        assert len(set(numbers)) == len(numbers)
        if total > 0:
            rows = np.stack([inputs[number][0][part.start : part.stop].double().numpy() for number in numbers])
            mean = np.average(rows, axis=0, weights=[weights[number] for number in numbers])
            values = first.vectors[0][part.start : part.stop].double().numpy()
            assert np.abs(values - mean).max() <= 2e-7 * np.abs(rows).max()
    assert covered == SIZE
