"""Lists of tensors as flat vectors and back, and which tensors can be averaged at all."""

from __future__ import annotations

import pytest
import torch

from shoal.core.errors import TensorError
from shoal.tensors.flat import all_finite, as_bytes, check_shapes, check_tensors, pack, shapes_of, slices, unpack

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def tensors_of_every_kind(dtype: torch.dtype) -> list[torch.Tensor]:
    """0-d, empty, 1-d, non-contiguous (transposed, strided, expanded, flipped storage order) and a parameter."""
    torch.manual_seed(3)
    base = torch.randn(6, 8, 4, dtype=torch.float64).to(dtype)
    return [
        torch.tensor(1.5, dtype=dtype),
        torch.empty(0, dtype=dtype),
        torch.empty(3, 0, 2, dtype=dtype),
        torch.randn(7, dtype=torch.float64).to(dtype),
        base.permute(2, 0, 1),
        base[::2, 1:5:3],
        base[:, 3, 0],
        torch.randn(1, 3, dtype=torch.float64).to(dtype).expand(4, 3),
        base[..., :3].contiguous(memory_format=torch.contiguous_format).mT,
        torch.nn.Parameter(torch.randn(2, 2, dtype=torch.float64).to(dtype)),
    ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", FLOATING)
def test_pack_and_unpack_give_the_same_tensors(dtype) -> None:
    tensors = tensors_of_every_kind(dtype)
    check_tensors(tensors)
    vectors = pack(tensors)
    elements = sum(tensor.numel() for tensor in tensors)
    assert [len(vector) for vector in vectors] == ([0, elements] if dtype == torch.float64 else [elements, 0])
    back = unpack(vectors, tensors)
    assert all(same(one, other) for one, other in zip(back, tensors, strict=True))
    assert not any(tensor.requires_grad for tensor in back)


def test_types_may_be_mixed_and_float64_stays_float64() -> None:
    tensors = [tensor for group in zip(*map(tensors_of_every_kind, FLOATING), strict=True) for tensor in group]
    vectors = pack(tensors)
    assert [vector.dtype for vector in vectors] == [torch.float32, torch.float64]
    assert all(vector.is_contiguous() and vector.device.type == "cpu" for vector in vectors)
    assert all(same(one, other) for one, other in zip(unpack(vectors, tensors), tensors, strict=True))


def test_pack_copies_and_unpack_too() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    vectors = pack(tensors)
    tensors[0].zero_()
    assert vectors[0].tolist() == [1, 1, 1]
    back = unpack(vectors, tensors)
    vectors[0].zero_()
    vectors[1].zero_()
    assert back[0].tolist() == [1, 1, 1]
    assert back[1].tolist() == [1, 1]


def test_slices_are_views() -> None:
    tensors = [torch.tensor(1.0), torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)]
    vectors = pack(tensors)
    views = slices(vectors, tensors)
    assert [view.dtype for view in views] == [torch.float32, torch.float32, torch.float64]
    vectors[0][1] = 7
    assert views[1][0, 0] == 7


def test_no_tensors_are_two_empty_vectors() -> None:
    assert [len(vector) for vector in pack([])] == [0, 0]
    assert unpack(pack([]), []) == []


def test_half_types_are_rounded_once() -> None:
    """The mean of 1 and 1 + 2 ** -7 in bfloat16 lies between two numbers; float32 holds it, the end rounds to even."""
    tensors = [torch.tensor([1.0], dtype=torch.bfloat16)]
    middle = torch.tensor([1 + 2**-8], dtype=torch.float32)
    assert unpack((middle, torch.empty(0, dtype=torch.float64)), tensors)[0].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_bytes_is_the_memory_itself(dtype) -> None:
    vector = torch.arange(5, dtype=dtype)
    assert len(as_bytes(vector)) == vector.nbytes
    assert bytes(as_bytes(vector)) == vector.numpy().tobytes()
    as_bytes(vector[1:3])[:] = bytes(2 * dtype.itemsize)
    assert vector.tolist() == [0, 0, 0, 3, 4]
    assert len(as_bytes(vector[2:2])) == 0


# ---------------------------------------------------------------- refusals

GOOD = torch.ones(2)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ([1.0], "expected a torch.Tensor, got list"),
        (None, "expected a torch.Tensor, got NoneType"),
        (torch.ones(2, dtype=torch.int64), "dtype int64 has no mean; float16, bfloat16, float32 and float64 do"),
        (torch.ones(2, dtype=torch.bool), "dtype bool has no mean"),
        (torch.ones(2, dtype=torch.complex64), "dtype complex64 has no mean"),
        (torch.ones(2).to(torch.float8_e4m3fn), "dtype float8_e4m3fn has no mean"),
        (torch.ones(2, 2).to_sparse(), "it is torch.sparse_coo, without plain values"),
        (torch.tensor([1, float("nan")]), "it contains NaN or infinity"),
        (torch.tensor(float("inf"), dtype=torch.float64), "it contains NaN or infinity"),
        (torch.tensor([float("-inf")], dtype=torch.bfloat16), "it contains NaN or infinity"),
        (torch.tensor([float("nan")], requires_grad=True), "it contains NaN or infinity"),
    ],
)
def test_what_has_no_mean_is_refused_by_its_index(bad, problem) -> None:
    with pytest.raises(TensorError, match=r"tensor 1: ") as error:
        check_tensors([GOOD, bad, bad])
    assert error.value.index == 1
    assert problem in error.value.problem


@pytest.mark.parametrize(
    ("ours", "theirs", "index", "problem"),
    [
        ([(2, 3)], [(3, 2)], 0, "here it is (2, 3) float32, at the others (3, 2) float32"),
        ([(2,), (1,)], [(2,), ()], 1, "here it is (1,) float32, at the others () float32"),
        ([(2,), (1,)], [(2,)], 1, "this peer gave 2 tensors, the others 1"),
        ([], [(2,)], 0, "this peer gave 0 tensors, the others 1"),
    ],
)
def test_lists_that_differ_are_refused_by_the_first_index(ours, theirs, index, problem) -> None:
    with pytest.raises(TensorError) as error:
        check_shapes(*(shapes_of([torch.ones(shape) for shape in shapes]) for shapes in (ours, theirs)))
    assert (error.value.index, error.value.problem) == (index, problem)


def test_the_type_counts_as_well_as_the_shape() -> None:
    with pytest.raises(TensorError, match=r"tensor 0: here it is \(2,\) float32, at the others \(2,\) bfloat16"):
        check_shapes(shapes_of([torch.ones(2)]), shapes_of([torch.ones(2, dtype=torch.bfloat16)]))


def test_shapes_that_came_over_the_wire_as_lists_are_the_same() -> None:
    check_shapes(shapes_of([torch.ones(2, 3)]), [([2, 3], "float32")])


@pytest.mark.parametrize("dtype", FLOATING)
def test_finite_values_whose_sum_overflows_are_finite(dtype) -> None:
    large = torch.full((2000,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(large)
    assert all_finite(torch.empty(0, dtype=dtype))
    for bad in (float("nan"), float("inf"), float("-inf")):
        large[1234] = bad
        assert not all_finite(large)
    assert not all_finite(torch.tensor([float("inf"), float("-inf")], dtype=dtype))
