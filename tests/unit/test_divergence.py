"""Sketches of replicas, and who is judged to have parted from the others."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.planning.divergence import EQUAL, ROW_BYTES, farthest, judge
from shoal.tensors.sketch import BLOCK, sketch_of

SIZES = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 3)


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def test_equal_tensors_have_equal_sketches_whatever_their_layout() -> None:
    matrix = torch.randn(64, 128)
    assert sketch_of([matrix]) == sketch_of([matrix.T.contiguous().T])
    assert sketch_of([]) == b""
    assert len(sketch_of([matrix, None, torch.empty(0)])) == 3 * ROW_BYTES
    assert farthest(sketch_of(tensors()), sketch_of(tensors())) == (-1, 0.0)


@pytest.mark.parametrize("row", range(len(SIZES)))
def test_one_flipped_exponent_bit_is_seen_in_the_right_row(row: int) -> None:
    ours, theirs = tensors(), tensors()
    bits = theirs[row].view(torch.int32)
    bits[SIZES[row] // 2] ^= 1 << 27
    where, distance = farthest(sketch_of(ours), sketch_of(theirs))
    assert where == row
    assert distance > EQUAL


def test_the_distance_is_the_relative_norm_of_the_difference() -> None:
    """On average over signs; here over twenty differences of one size."""
    ours = torch.randn(50_000)
    found = []
    for seed in range(20):
        off = torch.randn(50_000, generator=torch.Generator().manual_seed(seed))
        theirs = ours + off * (1e-2 * ours.norm() / off.norm())
        found.append(farthest(sketch_of([ours]), sketch_of([theirs]))[1])
    assert math.sqrt(sum(value**2 for value in found) / len(found)) == pytest.approx(1e-2, rel=0.3)


def test_rounding_is_no_difference() -> None:
    ours = tensors()
    theirs = [tensor * (1 + 2e-7 * torch.randn_like(tensor)) for tensor in ours]
    assert farthest(sketch_of(ours), sketch_of(theirs))[1] < EQUAL / 10


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_what_is_not_finite_is_infinitely_far(value: float) -> None:
    theirs = tensors()
    theirs[2][5] = value
    row, distance = farthest(sketch_of(tensors()), sketch_of(theirs))
    assert row == 2
    assert distance > EQUAL


def test_sketches_of_different_models_do_not_compare() -> None:
    assert farthest(sketch_of(tensors()), sketch_of(tensors()[1:])) == (-1, math.inf)
    assert farthest(b"abc", b"abd") == (-1, math.inf)


def test_the_minority_is_named_and_two_that_differ_are_both_right() -> None:
    same, other, third = (sketch_of(tensors(seed)) for seed in range(3))
    assert judge({"a": same, "b": same, "c": same}).parted == {}
    verdict = judge({"a": same, "b": other, "c": same})
    assert list(verdict.parted) == ["b"]
    assert not verdict.disunited
    assert judge({"a": other, "b": same, "c": same, "d": third}).parted.keys() == {"a", "d"}
    for sketches in ({"a": same, "b": other}, {"a": same, "b": other, "c": third}, {}):
        assert judge(sketches).parted == {}
        assert judge(sketches).disunited == (len(sketches) > 1)
