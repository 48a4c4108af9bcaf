"""Moshpit All-Reduce, the butterfly in one group: reference sections 2.3, 2.6, 2.7 and 3, checks 12, 13, 14, 16, 17.

Every test runs the real protocol over memory hosts in virtual time, and the oracle beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from group import Member, average, members
from oracles.butterfly import butterfly as oracle
from oracles.butterfly import shares
from shoal.core.errors import RoundError
from shoal.core.loop import run_virtual
from shoal.protocols.outcome import Outcome
from shoal.tensors.flat import pack
from shoal.tensors.mixing import apply_difference

PART_BYTES = 1 << 14
SIZE = 20_011  # a prime: no cut is even


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main, limit_seconds=600)


def values(count: int, size: int = SIZE, dtype: type = np.float32, seed: int = 1) -> np.ndarray:
    """(members, size), of very unlike magnitudes."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, size)) * 10 ** random.uniform(-2, 2, (count, 1))).astype(dtype)


def vectors_of(float32: np.ndarray, float64: np.ndarray | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if float64 is None:
        float64 = np.empty((len(float32), 0))
    return [
        (torch.from_numpy(one.copy()), torch.from_numpy(two.copy())) for one, two in zip(float32, float64, strict=True)
    ]


def held(outcomes: Sequence[Any], vector: int = 0) -> np.ndarray:
    """(members, size) after the averaging; every one of them must have succeeded."""
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), repr(outcome)
    return np.stack([outcome.vectors[vector].numpy() for outcome in outcomes])


def assert_equal_bit_for_bit(rows: np.ndarray) -> None:
    assert all(row.tobytes() == rows[0].tobytes() for row in rows)


def assert_close(rows: np.ndarray, expected: np.ndarray, inputs: np.ndarray) -> None:
    """Within the last place of the largest contribution to each element; float64 is summed in no fixed order."""
    steps = 1 if inputs.dtype == np.float32 else len(inputs)
    assert (np.abs(rows.astype(np.float64) - expected) <= steps * np.spacing(np.abs(inputs).max(0))).all()


# ---------------------------------------------------------------- 2.3: the weighted mean


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_section_2_3_all_members_hold_the_weighted_mean(count) -> None:
    async def main() -> None:
        single, double = values(count), values(count, 4001, np.float64, seed=2)
        weights = [1.0, 32.0, 0.25, 7.0, 1e6, 3.0, 1.0, 2.0][:count]
        bandwidths = [5e6, None, 7e6, 9e6, None, 4e6, 8e6, 6e6][:count]
        async with members(count) as group:
            outcomes = await average(group, vectors_of(single, double), weights, bandwidths, part_bytes=PART_BYTES)
        for vector, inputs, width in ((0, single, 4), (1, double, 8)):
            rows = held(outcomes, vector)
            assert_equal_bit_for_bit(rows)
            assert_close(rows, oracle(inputs, weights, bandwidths, PART_BYTES // width).values, inputs)
        ids = tuple(member.host.peer_id for member in group)
        assert all(outcome.exact and set(outcome.contributed) == set(ids) for outcome in outcomes)

    run(main())


def test_section_2_3_the_inputs_are_left_alone() -> None:
    async def main() -> None:
        inputs = values(3)
        vectors = vectors_of(inputs)
        async with members(3) as group:
            await average(group, vectors, [1, 2, 3], [None] * 3)
        assert all(vector[0].numpy().tobytes() == row.tobytes() for vector, row in zip(vectors, inputs, strict=True))

    run(main())


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_section_2_3_vectors_smaller_than_the_group(size) -> None:
    async def main() -> None:
        inputs = values(4, size)
        async with members(4) as group:
            outcomes = await average(group, vectors_of(inputs), [1, 1, 1, 1], [None] * 4)
        rows = held(outcomes)
        assert_equal_bit_for_bit(rows)
        if size:
            assert_close(rows, inputs.astype(np.float64).mean(0), inputs)

    run(main())


# ---------------------------------------------------------------- check 12: bytes


async def traffic(group: Sequence[Member], *arguments: Any, **options: Any) -> tuple[np.ndarray, list[Any]]:
    """(members, 2): bytes sent and received on the wire by one averaging, and its outcomes."""
    before = np.array([member.traffic for member in group])
    outcomes = await average(group, *arguments, **options)
    return np.array([member.traffic for member in group]) - before, outcomes


@pytest.mark.parametrize("count", [2, 4, 8])
def test_check_12_each_member_sends_and_receives_2_s_times_n_minus_1_over_n(count) -> None:
    async def main() -> None:
        inputs = values(count, 1 << 18)
        async with members(count) as group:
            counted, outcomes = await traffic(group, vectors_of(inputs), [1.0] * count, [None] * count)
        held(outcomes)
        expected = 2 * inputs[0].nbytes * (count - 1) / count
        assert np.abs(counted / expected - 1).max() < 0.02, counted / expected

    run(main())


def test_check_12_with_unequal_shares_and_a_member_without_weight() -> None:
    async def main() -> None:
        inputs, weights, bandwidths = values(4, 1 << 18), [1.0, 0.0, 2.0, 1.0], [4e6, 8e6, 10e6, 0.0]
        async with members(4) as group:
            counted, outcomes = await traffic(group, vectors_of(inputs), weights, bandwidths)
        held(outcomes)
        expected = oracle(inputs, weights, bandwidths, 1 << 14)
        assert counted[:, 0] == pytest.approx(expected.sent_bytes, rel=0.02, abs=20_000)
        assert counted[:, 1] == pytest.approx(expected.received_bytes, rel=0.02, abs=20_000)

    run(main())


# ---------------------------------------------------------------- check 13: weights


@pytest.mark.parametrize("aux", [0, 1, 2])
@pytest.mark.parametrize("clients", [0, 1, 2])
def test_check_13_clients_reduce_nothing_and_aux_peers_contribute_nothing(clients, aux) -> None:
    """4 peers: the first ones have no bandwidth (CLIENT), the last ones no weight (AUX, with absurd values)."""

    async def main() -> None:
        inputs = values(4)
        inputs[4 - aux :] = 1e30
        weights = [1.0, 3.0, 0.5, 2.0][: 4 - aux] + [0.0] * aux
        bandwidths = [0.0] * clients + [6e6] * (4 - clients)
        async with members(4) as group:
            outcomes = await average(group, vectors_of(inputs), weights, bandwidths, part_bytes=PART_BYTES)
        rows = held(outcomes)
        assert_equal_bit_for_bit(rows)
        mean = np.average(inputs[: 4 - aux].astype(np.float64), axis=0, weights=weights[: 4 - aux])
        assert np.abs(rows - mean).max() < 1e-6 * np.abs(inputs[: 4 - aux]).max()
        assert_close(rows, oracle(inputs, weights, bandwidths, PART_BYTES // 4).values, inputs[: 4 - aux])
        assert all(outcome.exact for outcome in outcomes)

    run(main())


@pytest.mark.parametrize("count", [2, 4])
def test_check_13_a_group_without_weight_leaves_every_bit_and_makes_no_nan(count) -> None:
    async def main() -> None:
        inputs = values(count)
        inputs[:, 7] = -0.0
        async with members(count) as group:
            outcomes = await average(group, vectors_of(inputs), [0.0] * count, [None] * count)
        assert held(outcomes).tobytes() == inputs.tobytes()

    run(main())


def test_check_13_nan_of_a_member_with_weight_is_refused_and_of_one_without_never_sent() -> None:
    async def main() -> None:
        inputs = values(4)
        inputs[1, 5000], inputs[3, 5] = np.nan, np.inf
        weights = [1.0, 1.0, 1.0, 0.0]
        async with members(4) as group:
            outcomes = await average(group, vectors_of(inputs), weights, [None] * 4, part_bytes=PART_BYTES)
            told = [event.reason for event in group[0].host.log.recent if event.peer_id == group[1].host.peer_id]
        rows = held(outcomes)
        assert_equal_bit_for_bit(rows)
        assert np.isfinite(rows).all()
        without = np.average(inputs[[0, 2]].astype(np.float64), axis=0, weights=[1.0, 1.0])
        assert rows[0, 5000] == pytest.approx(without[5000])
        assert not any(outcome.exact for outcome in outcomes)
        assert told == ["left out: its values are not finite"]

    run(main())


# ---------------------------------------------------------------- check 14: load balance


def test_check_14_shares_by_bandwidth_are_faster_than_equal_ones() -> None:
    """Links of 1 to 2.5 MB/s: the slowest member's time bounds any split, and equal shares make it longer."""
    rates = [1e6, 1.5e6, 2e6, 2.5e6]
    inputs = values(4, 1 << 18)

    async def seconds(bandwidths: Sequence[float | None]) -> float:
        async with members(4) as group:
            for member, rate in zip(group, rates, strict=True):
                member.transport.uplink.bytes_per_second = member.transport.downlink.bytes_per_second = rate
            began = asyncio.get_running_loop().time()
            outcomes = await average(group, vectors_of(inputs), [1.0] * 4, bandwidths)
            assert all(outcome.exact for outcome in outcomes), "the slowest was left out"
            return asyncio.get_running_loop().time() - began

    async def main() -> None:
        split = shares(rates)
        best = max((1 + 2 * w) / b for w, b in zip(split, rates, strict=True)) * inputs[0].nbytes
        balanced, equal = await seconds(rates), await seconds([None] * 4)
        assert best <= balanced < 1.6 * best
        assert balanced < 0.95 * equal

    run(main())


@pytest.mark.parametrize("count", [3, 5, 8])
def test_check_14_the_shares_on_the_wire_are_the_optimal_ones(count) -> None:
    """A member sends (1 + (n-2) w) s bytes, and receives as many: its share can be read off the wire."""

    async def main() -> None:
        inputs = values(count, 1 << 17)
        bandwidths = [1e6, 3e6, 2e6, 9e6, 4e6, 5e6, 6e6, 8e6][:count]
        async with members(count) as group:
            counted, outcomes = await traffic(group, vectors_of(inputs), [1.0] * count, bandwidths)
        held(outcomes)
        expected = (1 + (count - 2) * shares(bandwidths)) * inputs[0].nbytes
        for direction in (0, 1):
            assert counted[:, direction] == pytest.approx(expected, rel=0.02)

    run(main())


def test_check_14_who_has_no_bandwidth_reduces_nothing() -> None:
    async def main() -> None:
        inputs = values(3, 1 << 16)
        async with members(3) as group:
            counted, outcomes = await traffic(group, vectors_of(inputs), [1.0] * 3, [0.0, 5e6, 5e6])
        held(outcomes)
        assert counted[0] == pytest.approx([inputs[0].nbytes] * 2, rel=0.02)

    run(main())


# ---------------------------------------------------------------- section 3: absent senders


@pytest.mark.parametrize("how", ["silent", "dead", "dead, and not known to all"])
def test_section_3_a_sender_that_never_comes_is_left_out(how) -> None:
    """In the roll, with weight, without a share of its own. Parts are averaged over those who delivered them."""

    async def main() -> None:
        inputs, weights, bandwidths = values(4), [1.0, 2.0, 3.0, 4.0], [5e6, 5e6, 5e6, 0.0]
        strangers = [(1, 3)] if "not known" in how else []
        async with members(4, strangers) as group:
            if "dead" in how:
                group[3].transport.crash()
                await asyncio.sleep(0.1)
            began = asyncio.get_running_loop().time()
            outcomes = await average(group, vectors_of(inputs), weights, bandwidths, absent=[3], part_bytes=PART_BYTES)
            assert asyncio.get_running_loop().time() - began < (5 if how == "silent" else 1)
        rows = held(outcomes[:3])
        assert_equal_bit_for_bit(rows)
        expected = oracle(inputs, weights, bandwidths, PART_BYTES // 4, delivered={3: dict.fromkeys(range(3), 0)})
        assert_close(rows, expected.values[:3], inputs)
        absent = group[3].host.peer_id
        assert not any(outcome.exact or absent in outcome.contributed for outcome in outcomes[:3])

    run(main())


def test_section_3_what_a_sender_delivered_before_it_died_counts() -> None:
    """Each part has the dead sender in its mean or not, the same at all survivors; never half of it."""
    cut_in_the_middle = 0

    async def main(die_after_seconds: float) -> None:
        nonlocal cut_in_the_middle
        inputs, weights, bandwidths = values(4, 1 << 18), [1.0, 2.0, 3.0, 4.0], [5e6, 5e6, 5e6, 0.0]
        async with members(4) as group:
            asyncio.get_running_loop().call_later(die_after_seconds, group[3].transport.crash)
            outcomes = await average(group, vectors_of(inputs), weights, bandwidths, part_bytes=PART_BYTES)
        rows = held(outcomes[:3])
        assert_equal_bit_for_bit(rows)
        elements = PART_BYTES // 4
        full, none = (
            oracle(inputs, weights, bandwidths, elements, delivered=delivered)
            for delivered in (None, {3: dict.fromkeys(range(3), 0)})
        )
        with_it: dict[int, list[bool]] = {0: [], 1: [], 2: []}
        for reducer, start, stop, _ in full.parts:
            limit = np.spacing(np.abs(inputs[:, start:stop]).max(0))
            fits = [
                bool((np.abs(rows[0, start:stop] - each.values[0, start:stop]) <= limit).all()) for each in (full, none)
            ]
            assert sum(fits) == 1, f"part {start}:{stop} is neither with nor without the dead sender"
            with_it[reducer].append(fits[0])
        assert all(parts == sorted(parts, reverse=True) for parts in with_it.values()), "parts come in order"
        counts = [sum(parts) for parts in with_it.values()]
        cut_in_the_middle += 0 < sum(counts) < len(full.parts)
        assert sum(counts) == len(full.parts) or not any(outcome.exact for outcome in outcomes[:3])
        expected = oracle(inputs, weights, bandwidths, elements, delivered={3: dict(enumerate(counts))})
        assert_close(rows, expected.values[:3], inputs)

    for moment in np.linspace(0.02, 0.2, 10):
        run(main(float(moment)))
    assert cut_in_the_middle >= 4


# ---------------------------------------------------------------- checks 16 and 17


@pytest.mark.parametrize("moment", np.linspace(0.02, 0.98, 9).round(2))
def test_check_16_a_death_at_any_moment_leaves_all_or_nothing(moment) -> None:
    """A member with a share of its own dies: each survivor has a whole result or RoundError; its input is untouched."""

    async def main() -> None:
        inputs = values(4, 1 << 17)
        vectors = vectors_of(inputs)
        async with members(4) as group:
            whole = 2 * inputs[0].nbytes * 3 / 4
            began = asyncio.get_running_loop().time()

            def meanwhile() -> None:
                if group[2].host.sent.total_bytes > moment * whole:
                    group[2].transport.crash()

            outcomes = await average(group, vectors, [1.0] * 4, [5e6] * 4, part_bytes=PART_BYTES, meanwhile=meanwhile)
            assert asyncio.get_running_loop().time() - began < 6
        for number in (0, 1, 3):
            assert vectors[number][0].numpy().tobytes() == inputs[number].tobytes()
            outcome = outcomes[number]
            assert isinstance(outcome, Outcome | RoundError), repr(outcome)
            if isinstance(outcome, Outcome):
                assert np.isfinite(outcome.vectors[0].numpy()).all()

    run(main())


def test_check_17_steps_taken_during_the_averaging_survive() -> None:
    """theta_after = theta_now + (average - snapshot), to 1e-6."""

    async def main() -> None:
        torch.manual_seed(5)
        models = [[torch.randn(300, 200), torch.randn(50), torch.tensor(0.5)] for _ in range(3)]
        snapshots = [pack(model) for model in models]
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            for number, model in enumerate(models):
                for tensor in model:
                    tensor.add_(0.01 * (number + 1))

        async with members(3) as group:
            outcomes = await average(group, snapshots, [1.0, 2.0, 1.0], [None] * 3, meanwhile=step)
        rows = held(outcomes)
        assert steps > 3
        inputs = np.stack([snapshot[0].numpy() for snapshot in snapshots])
        mean = np.average(inputs.astype(np.float64), axis=0, weights=[1.0, 2.0, 1.0])
        assert np.abs(rows - mean).max() < 1e-6
        for number, (model, outcome) in enumerate(zip(models, outcomes, strict=True)):
            now = pack(model)[0].double().numpy()
            assert np.abs(now - inputs[number]).min() > 0.009 * steps
            apply_difference(model, outcome.vectors, snapshots[number])
            expected = now + (mean - inputs[number])
            assert np.abs(pack(model)[0].double().numpy() - expected).max() < 1e-6

    run(main())
