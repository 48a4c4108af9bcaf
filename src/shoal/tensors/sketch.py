"""A sketch of tensors: few numbers that tell, without sending them, whether two replicas hold the same.

For each tensor its norm and SUMS sums of its values under random signs, the same signs at all peers. Where two tensors
differ by d, each of the sums differs by a number of mean 0 and standard deviation |d|, whichever elements differ.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shoal.planning.divergence import SUMS

BLOCK = 4096


def _signs(seed: bytes, rows: int) -> Tensor:
    """(rows, SUMS) of +1 and -1, the same on every machine."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(seed).digest(-(-rows * SUMS // 8)), np.uint8))
    return torch.from_numpy(bits[: rows * SUMS].astype(np.float32) * 2 - 1).reshape(rows, SUMS)


@lru_cache(maxsize=4)
def _inner(device: str) -> Tensor:
    return _signs(b"within a block", BLOCK).to(device)


@lru_cache(maxsize=64)
def _outer(blocks: int, device: str) -> Tensor:
    return _signs(b"of a block", blocks).double().to(device)


@torch.no_grad()
def sketch_of(tensors: Sequence[Tensor | None]) -> bytes:
    """A row (norm, sums) of little-endian float32 for each tensor; zeros for None.

    Blocks are summed in float32, the blocks in float64: the error stays far below what counts as different.
    """
    return b"".join(struct.pack(f"<{1 + SUMS}f", *_row(tensor)) for tensor in tensors)


def _row(tensor: Tensor | None) -> list[float]:
    if tensor is None or tensor.numel() == 0:
        return [0.0] * (1 + SUMS)
    flat = tensor.detach().reshape(-1).float()
    device = str(flat.device)
    blocks, whole = len(flat) // BLOCK, len(flat) // BLOCK * BLOCK
    sums = torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
    if blocks:
        sums += ((flat[:whole].view(blocks, BLOCK) @ _inner(device)).double() * _outer(blocks, device)).sum(0)
    if whole < len(flat):
        sums += (flat[whole:, None] * _inner(device)[: len(flat) - whole]).double().sum(0)
    return [_float32(float(torch.linalg.vector_norm(flat))), *(_float32(value) for value in sums.tolist())]


def _float32(value: float) -> float:
    """What is beyond float32 becomes infinite, instead of an error of struct."""
    return float(np.float32(value))
