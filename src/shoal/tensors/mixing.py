"""The rules by which values meet: the weighted mean of a part, and the difference rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shoal.tensors.flat import Vectors, all_finite, slices

CHUNK = 1 << 17
"""Elements that are worked on at a time: they stay in the processor's cache from one operation to the next."""


class PartMean:
    """The weighted mean of one part, in float64 as contributions arrive, rounded once.

    A running mean: it never exceeds the largest value, where a weighted sum could overflow. Of the first contribution
    it keeps no copy: nobody may write there before the mean is written.
    """

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._mean: Tensor | None = None
        self.weight = 0.0

    def add(self, values: Tensor, weight: float) -> bool:
        """Add one member's values. False, and nothing is added, when they are not all finite."""
        if not all_finite(values):
            return False
        if weight > 0:
            before, self.weight = self.weight, self.weight + weight
            if self._first is None:
                self._first = values
                return True
            if self._mean is None:
                self._mean = self._first.to(torch.float64, copy=True)
            self._mean.mul_(before / self.weight).add_(values, alpha=weight / self.weight)
        return True

    def write(self, out: Tensor) -> None:
        """The mean, in `out`'s type. Without weight there is no mean, and `out` stays as it is."""
        mean = self._first if self._mean is None else self._mean
        if mean is not None:
            out.copy_(mean)


@torch.no_grad()
def apply_difference(tensors: Sequence[Tensor], average: Vectors, snapshot: Vectors) -> None:
    """theta += average - snapshot, element by element: nothing that was written since the snapshot is lost.

    An element that is as it was in the snapshot becomes the average itself, so replicas that took no step end equal,
    bit for bit. Half types are computed in float32 and rounded once.
    """
    pieces: list[tuple[Tensor, Callable[[], Tensor]]] = []
    for tensor, mean, old in zip(tensors, slices(average, tensors), slices(snapshot, tensors), strict=True):
        now = tensor.detach()
        if now.device.type != "cpu":  # what may fail there comes before anything is written
            moved = _moved(now, mean.to(now.device), old.to(now.device))
            pieces.append((now, partial(torch.Tensor.detach, moved)))
        elif now.is_contiguous():
            chunks = zip(*(one.view(-1).split(CHUNK) for one in (now, mean, old)), strict=True)
            pieces += [(chunk[0], partial(_moved, *chunk)) for chunk in chunks]
        else:
            pieces.append((now, partial(_moved, now, mean, old)))
    _move_all(pieces)


def _moved(tensor: Tensor, mean: Tensor, old: Tensor) -> Tensor:
    """What a tensor becomes, in new memory."""
    now = tensor.to(mean.dtype)
    if tensor.device.type != "cpu":
        return torch.where(now == old, mean, now + (mean - old))
    moved = torch.sub(mean, old).add_(now)
    same = np.equal(now.numpy(), old.numpy())  # seven times as fast as torch's (measured)
    if same.any():
        np.copyto(moved.numpy(), mean.numpy(), where=same)
    return moved


def _move_all(pieces: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """All or nothing, as `_write_all`; here a piece that were moved again would be moved twice.

    `under_way`: the number of the piece that is being written, and its values.
    """
    under_way: deque[tuple[int, Tensor]] = deque(maxlen=1)

    def move() -> None:
        first = 0
        for number, values in under_way:
            pieces[number][0].copy_(values)
            first = number + 1
        for number in range(first, len(pieces)):
            under_way.append((number, pieces[number][1]()))
            pieces[number][0].copy_(under_way[0][1])

    try:
        move()
    except BaseException:
        move()
        raise


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
