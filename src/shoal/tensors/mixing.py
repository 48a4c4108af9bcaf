"""The rules by which values meet: the weighted mean of a part, and the difference rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.tensors.flat import Vectors, slices


class PartMean:
    """The weighted mean of one part, in float64 as contributions arrive, rounded once.

    A running mean: it never exceeds the largest value, where a weighted sum could overflow.
    """

    def __init__(self, size: int) -> None:
        self._mean = torch.zeros(size, dtype=torch.float64)
        self.weight = 0.0

    def add(self, values: Tensor, weight: float) -> bool:
        """Add one member's values. False, and nothing is added, when they are not all finite."""
        if not torch.isfinite(values).all():
            return False
        if weight > 0:
            before, self.weight = self.weight, self.weight + weight
            self._mean.mul_(before / self.weight).add_(values, alpha=weight / self.weight)
        return True

    def write(self, out: Tensor) -> None:
        """The mean, in `out`'s type. Without weight there is no mean, and `out` stays as it is."""
        if self.weight > 0:
            out.copy_(self._mean)


@torch.no_grad()
def apply_difference(tensors: Sequence[Tensor], average: Vectors, snapshot: Vectors) -> None:
    """theta += average - snapshot, element by element: nothing that was written since the snapshot is lost.

    An element that is as it was in the snapshot becomes the average itself, so replicas that took no step end equal,
    bit for bit. Half types are computed in float32 and rounded once.
    """
    values = []
    for tensor, average_view, old_view in zip(
        tensors, slices(average, tensors), slices(snapshot, tensors), strict=True
    ):
        now, mean, old = tensor.to(average_view.dtype), average_view.to(tensor.device), old_view.to(tensor.device)
        values.append(torch.where(now == old, mean, now + (mean - old)))
    _write_all(tensors, values)


@torch.no_grad()
def apply_exact(tensors: Sequence[Tensor], average: Vectors) -> None:
    """theta = average: a newcomer takes over values that it has not trained."""
    _write_all(tensors, slices(average, tensors))


def _write_all(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """All or nothing, also when Ctrl-C comes in between: what was begun is finished before it goes on its way."""
    left = list(zip(tensors, values, strict=True))
    try:
        while left:
            left[-1][0].copy_(left[-1][1])
            left.pop()
    except BaseException:
        for tensor, value in left:
            tensor.copy_(value)
        raise
