"""The weighted mean of a part against NumPy's float64, and the difference rule (Moshpit reference, section 2.7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.tensors.flat import pack, unpack
from shoal.tensors.mixing import CHUNK, PartMean, apply_difference, apply_exact

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_the_mean_is_that_of_float64(dtype, members) -> None:
    random = np.random.default_rng(5)
    values = (random.normal(size=(members, 1000)) * 10 ** random.uniform(-3, 3, (members, 1))).astype(str(dtype)[6:])
    weights = random.uniform(0.1, 1000, members)
    mean, out = PartMean(), torch.empty(1000, dtype=dtype)
    for row, weight in zip(values, weights, strict=True):
        assert mean.add(torch.from_numpy(row), weight)
    assert mean.weight == pytest.approx(weights.sum())
    mean.write(out)
    expected = np.average(values.astype(np.float64), axis=0, weights=weights)
    step = 4 * np.spacing(np.abs(values).max(0))  # four units in the last place of the largest contribution
    assert (np.abs(out.numpy() - expected) <= step).all()


def test_equal_values_stay_bit_identical() -> None:
    values = torch.randn(1000)
    mean, out = PartMean(), torch.empty(1000)
    for weight in (0.1, 3.0, 1e6):
        mean.add(values, weight)
    mean.write(out)
    assert torch.equal(out, values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_whole_and_changes_nothing(bad) -> None:
    mean, out = PartMean(), torch.empty(3)
    assert mean.add(torch.tensor([1.0, 2.0, 3.0]), 2.0)
    assert not mean.add(torch.tensor([5.0, bad, 5.0]), 2.0)
    mean.write(out)
    assert out.tolist() == [1, 2, 3]
    assert mean.weight == 2.0


def test_without_weight_values_stay_as_they_are() -> None:
    for weights in ([], [0.0], [0.0, 0.0]):
        mean, out = PartMean(), torch.tensor([3.0, -0.0])
        for weight in weights:
            mean.add(torch.tensor([8.0, 8.0]), weight)
        mean.write(out)
        assert out.numpy().tobytes() == torch.tensor([3.0, -0.0]).numpy().tobytes()


def test_a_member_without_weight_leaves_no_trace() -> None:
    mean, out = PartMean(), torch.empty(2)
    mean.add(torch.tensor([1.0, 2.0]), 4.0)
    mean.add(torch.tensor([1e30, -1e30]), 0.0)
    mean.write(out)
    assert out.tolist() == [1, 2]


def test_large_values_of_float32_do_not_overflow() -> None:
    mean, out = PartMean(), torch.empty(1)
    for _ in range(8):
        mean.add(torch.tensor([3e38]), 1e6)
    mean.write(out)
    assert out.item() == pytest.approx(3e38)


def test_large_values_of_float64_do_not_overflow() -> None:
    """All contributions are finite, so their mean is."""
    mean, out = PartMean(), torch.empty(1, dtype=torch.float64)
    for _ in range(8):
        mean.add(torch.tensor([1e308], dtype=torch.float64), 32.0)
    mean.write(out)
    assert out.item() == pytest.approx(1e308)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_stay_as_they_are(dtype) -> None:
    """The first one is not copied: it may be a part of the snapshot."""
    first, second = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    mean, out = PartMean(), torch.empty(3, dtype=dtype)
    mean.add(first, 1.0)
    mean.add(second, 3.0)
    mean.write(out)
    assert (out.tolist(), first.tolist(), second.tolist()) == ([0.25] * 3, [1] * 3, [0] * 3)


def test_an_empty_part() -> None:
    mean = PartMean()
    assert mean.add(torch.empty(0), 1.0)
    mean.write(torch.empty(0))


# ---------------------------------------------------------------- what is written into the model


def model(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of several shapes, one of them not contiguous, one a parameter."""
    torch.manual_seed(4)
    return [
        torch.tensor(0.5, dtype=dtype),
        torch.empty(0, dtype=dtype),
        torch.randn(4, 3).to(dtype).t(),
        torch.nn.Parameter(torch.randn(5).to(dtype)),
        torch.randn(3, dtype=torch.float64),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_difference_rule_keeps_the_steps_taken_meanwhile(dtype) -> None:
    tensors = model(dtype)
    snapshot = pack(tensors)
    average = tuple(vector + 0.25 for vector in snapshot)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1.0)
    expected = [(tensor.detach().double() + 0.25) for tensor in tensors]
    apply_difference(tensors, average, snapshot)
    for tensor, wanted in zip(tensors, expected, strict=True):
        step = torch.finfo(tensor.dtype).eps
        assert torch.allclose(tensor.detach().double(), wanted, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_the_difference_rule_is_its_formula_bit_for_bit(dtype, size) -> None:
    """Chunk by chunk as all at once; an element that is as it was becomes the average itself."""
    torch.manual_seed(6)
    tensors = [torch.randn(size).to(dtype), torch.randn(3, 5).to(dtype).t()]
    snapshot = pack(tensors)
    average = tuple(torch.randn(len(vector), dtype=vector.dtype) for vector in snapshot)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_((torch.randn(tensor.shape) * (torch.rand(tensor.shape) < 0.5)).to(dtype))
    (now,) = (vector for vector in pack(tensors) if len(vector))
    (mean,), (old,) = ([vector for vector in vectors if len(vector)] for vectors in (average, snapshot))
    expected = torch.where(now == old, mean, now + (mean - old)).to(dtype)
    apply_difference(tensors, average, snapshot)
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors]), expected)


def test_the_difference_rule_with_an_unchanged_average_changes_no_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = model(dtype)
        snapshot = pack(tensors)
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(1.7)
        before = [tensor.detach().clone() for tensor in tensors]
        apply_difference(tensors, snapshot, snapshot)
        assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


def test_half_types_are_rounded_once_and_not_twice() -> None:
    """In bfloat16 this average is 1, as the snapshot is: rounded too early, the change would be lost."""
    nothing, change = torch.empty(0, dtype=torch.float64), 2**-8 - 2**-12
    tensors = [torch.tensor([2**-6], dtype=torch.bfloat16)]
    apply_difference(tensors, (torch.tensor([1 + change]), nothing), (torch.tensor([1.0]), nothing))
    assert tensors[0].item() == 2**-6 + change


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_apply_exact_writes_the_average_itself(dtype) -> None:
    """theta + (average - theta) is not the average in floating point: equal replicas must end equal, bit for bit."""
    tensors, other = model(dtype), model(dtype)
    with torch.no_grad():
        for tensor in other:
            tensor.mul_(1e6)
    average = tuple(torch.randn(len(vector), dtype=vector.dtype) / 3 for vector in pack(tensors))
    apply_exact(tensors, average)
    apply_exact(other, average)
    assert all(torch.equal(one, two) for one, two in zip(tensors, other, strict=True))
    assert all(torch.equal(one, mean) for one, mean in zip(tensors, unpack(average, tensors), strict=True))


def test_the_tensors_keep_their_identity_and_strides() -> None:
    tensors = model(torch.float32)
    facts = [(tensor.data_ptr(), tensor.stride(), tensor.requires_grad) for tensor in tensors]
    vectors = pack(tensors)
    apply_exact(tensors, vectors)
    apply_difference(tensors, vectors, vectors)
    assert [(tensor.data_ptr(), tensor.stride(), tensor.requires_grad) for tensor in tensors] == facts


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_moves_every_element_exactly_once(monkeypatch, at, after) -> None:
    """Ctrl-C just before, or just after, a piece was written: it must not be moved twice."""
    copy, calls = torch.Tensor.copy_, []

    def interrupted(tensor, *args):
        calls.append(tensor)
        if after:
            copy(tensor, *args)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return tensor if after else copy(tensor, *args)

    tensors = [torch.full((size,), 2.0) for size in (3, 4, 5)]
    nothing = torch.empty(0, dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply_difference(tensors, (torch.full((12,), 1.5), nothing), (torch.ones(12), nothing))
    assert torch.cat(tensors).tolist() == [2.5] * 12


class Interrupting(torch.Tensor):
    """A parameter at which Ctrl-C comes, once."""

    interrupts = 1

    def copy_(self, *args):
        if Interrupting.interrupts:
            Interrupting.interrupts -= 1
            raise KeyboardInterrupt
        return super().copy_(*args)


def test_an_interrupt_in_the_middle_leaves_nothing_half_written() -> None:
    Interrupting.interrupts = 1
    tensors = [torch.zeros(3), torch.zeros(4).as_subclass(Interrupting), torch.zeros(5)]
    with pytest.raises(KeyboardInterrupt):
        apply_exact(tensors, (torch.ones(12), torch.empty(0, dtype=torch.float64)))
    assert all(bool((tensor == 1).all()) for tensor in tensors)
