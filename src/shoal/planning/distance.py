"""Kademlia's distance: texts are hashed to 160-bit points, and two points are as far apart as their XOR."""

from __future__ import annotations

import functools
import hashlib

POINT_BITS = 160


@functools.lru_cache(maxsize=1 << 14)
def point_of(text: str) -> int:
    """The point of a peer id or a key: the first 20 bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: POINT_BITS // 8])
