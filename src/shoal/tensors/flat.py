"""A list of tensors as flat vectors, one for each type that travels: float32, and float64 where it stays float64.

Half types travel as float32 and are rounded once, at the end (design, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.errors import TensorError
from shoal.tensors.memory import Memory

WIRE_DTYPES = (torch.float32, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)
ITEM_BYTES = tuple(dtype.itemsize for dtype in WIRE_DTYPES)
Vectors = tuple[Tensor, Tensor]
"""The flat float32 and float64 vectors of a list of tensors, on the CPU."""
Shapes = list[tuple[tuple[int, ...], str]]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Shape and dtype of each tensor: what two peers must have in common to average."""
    return [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors]


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raises TensorError with the index of the first that has no mean: no tensor, no floating type, not finite."""
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TensorError(index, f"expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in (*WIRE_DTYPES, *HALF_DTYPES):
            raise TensorError(
                index, f"dtype {dtype_name(tensor.dtype)} has no mean; float16, bfloat16, float32 and float64 do"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TensorError(
                index, f"it is {'a meta tensor' if tensor.is_meta else tensor.layout}, without plain values"
            )
        if not all_finite(tensor):
            raise TensorError(index, "it contains NaN or infinity, which would reach everybody's average")


@torch.no_grad()
def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. The sum tells it 30 times as fast (measured), unless it overflows."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def check_shapes(ours: Shapes, theirs: Shapes) -> None:
    """Raises TensorError with the first index in which two peers' lists differ."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if (tuple(mine[0]), mine[1]) != (tuple(other[0]), other[1]):
            raise TensorError(
                index, f"here it is {tuple(mine[0])} {mine[1]}, at the others {tuple(other[0])} {other[1]}"
            )
    if len(ours) != len(theirs):
        raise TensorError(min(len(ours), len(theirs)), f"this peer gave {len(ours)} tensors, the others {len(theirs)}")


def wire_index(dtype: torch.dtype) -> int:
    """Which of the two vectors a tensor of this type travels in."""
    return 1 if dtype == torch.float64 else 0


def vector_sizes(shapes: Shapes) -> tuple[int, int]:
    """How many elements each of the two vectors of such tensors has."""
    sizes = [0, 0]
    for shape, dtype in shapes:
        sizes[1 if dtype == "float64" else 0] += math.prod(shape)
    return sizes[0], sizes[1]


def empty_vectors(sizes: tuple[int, int], memory: Memory | None = None) -> Vectors:
    """New flat vectors, their values undefined."""
    new = memory.vector if memory else lambda size, dtype: torch.empty(size, dtype=dtype)
    return new(sizes[0], WIRE_DTYPES[0]), new(sizes[1], WIRE_DTYPES[1])


@torch.no_grad()
def pack(tensors: Sequence[Tensor], memory: Memory | None = None) -> Vectors:
    """New flat vectors with copies of all values, in order."""
    vectors = empty_vectors(vector_sizes(shapes_of(tensors)), memory)
    at = [0, 0]
    for tensor in tensors:
        which = wire_index(tensor.dtype)
        vectors[which][at[which] : at[which] + tensor.numel()].copy_(tensor.detach().reshape(-1))
        at[which] += tensor.numel()
    return vectors


def slices(vectors: Vectors, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into the vectors, one for each tensor of `like`, in its shape (and the vector's own dtype)."""
    at = [0, 0]
    views = []
    for tensor in like:
        which = wire_index(tensor.dtype)
        views.append(vectors[which][at[which] : at[which] + tensor.numel()].view(tensor.shape))
        at[which] += tensor.numel()
    return views


def unpack(vectors: Vectors, like: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with the values of the vectors, in the shapes, types and devices of `like`: rounded once, here."""
    return [
        view.to(device=tensor.device, dtype=tensor.dtype, copy=True)
        for view, tensor in zip(slices(vectors, like), like, strict=True)
    ]


def as_bytes(vector: Tensor) -> memoryview:
    """The memory of a flat CPU vector, without a copy."""
    return vector.numpy().data.cast("B") if len(vector) else memoryview(b"")
