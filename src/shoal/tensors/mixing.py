"""The rules by which values meet: the weighted mean of a part, and the difference rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.tensors.flat import Vectors, slices


class PartMean:
    """The weighted mean of one part, summed in float64 as contributions arrive and rounded once."""

    def __init__(self, size: int) -> None:
        self._sum = torch.zeros(size, dtype=torch.float64)
        self.weight = 0.0

    def add(self, values: Tensor, weight: float) -> bool:
        """Add one member's values. False, and nothing is added, when they are not all finite."""
        if not torch.isfinite(values).all():
            return False
        self._sum.add_(values, alpha=weight)
        self.weight += weight
        return True

    def write(self, out: Tensor) -> None:
        """The mean, in `out`'s type. Without weight there is no mean, and `out` stays as it is."""
        if self.weight > 0:
            out.copy_(self._sum.div_(self.weight))


@torch.no_grad()
def apply_difference(tensors: Sequence[Tensor], average: Vectors, snapshot: Vectors) -> None:
    """theta += average - snapshot, tensor by tensor: no step that was taken since the snapshot is lost.

    Half types are computed in float32 and rounded once.
    """
    for tensor, mean, old in zip(tensors, slices(average, tensors), slices(snapshot, tensors), strict=True):
        change = mean - old
        if tensor.dtype == mean.dtype:
            tensor.add_(change.to(tensor.device))
        else:
            tensor.copy_(tensor.to(mean.dtype) + change.to(tensor.device))


@torch.no_grad()
def apply_exact(tensors: Sequence[Tensor], average: Vectors) -> None:
    """theta = average: the difference rule where no step was taken since the snapshot, without its rounding."""
    for tensor, mean in zip(tensors, slices(average, tensors), strict=True):
        tensor.copy_(mean)
