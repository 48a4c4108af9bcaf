"""Memory for large flat vectors that is used again.

The system hands out fresh memory page by page at its first touch: a copy of 40 MB into it takes 19 ms, into memory that
was used before 3 ms (measured). A model's vectors are as large in every averaging.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor


class Memory:
    """Gives out vectors. The memory of one comes back by itself, when the last tensor or view of it is gone.

    It may come back in any thread, at any moment: nothing but a deque's own append and popleft touches what is free.
    """

    def __init__(self, kept: int) -> None:
        self._free: deque[Tensor] = deque(maxlen=kept)

    def vector(self, size: int, dtype: torch.dtype) -> Tensor:
        """A new CPU vector, its values undefined."""
        block = self._take(size, dtype)
        view = block.numpy()
        weakref.finalize(view, self._free.append, block).atexit = False
        return torch.from_numpy(view)

    def _take(self, size: int, dtype: torch.dtype) -> Tensor:
        for _ in range(len(self._free)):
            try:
                block = self._free.popleft()
            except IndexError:
                break
            if (len(block), block.dtype) == (size, dtype):
                return block
            self._free.append(block)
        return torch.empty(size, dtype=dtype)
