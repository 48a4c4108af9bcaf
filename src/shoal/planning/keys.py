"""The group keys of plain Moshpit All-Reduce (Ryabinin et al. 2021; reference, sections 2.1, 2.2 and 2.4).

A key is d-1 digits base M: a peer's index in each of its last d-1 groups. Peers with equal keys form the next group;
within it all get distinct indices, so peers that met in one round are apart in the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Key = tuple[int, ...]
Caller = TypeVar("Caller")


def initial_key(peer_id: str, base: int, digits: int) -> Key:
    """Digits from a hash of the peer's id: nobody numbers the peers. Crowded groups are split when they meet."""
    number = int.from_bytes(hashlib.sha256(f"key {peer_id}".encode()).digest())
    return tuple(number // base**place % base for place in range(digits))


def drawn_digits(group_id: str, base: int) -> list[int]:
    """The digits from 0 to `base` - 1 in an order drawn by the group's id: its k-th member gets the k-th of them."""
    return sorted(range(base), key=lambda digit: hashlib.sha256(f"{group_id} {digit}".encode()).digest())


def next_key(key: Key, group_id: str, members: Sequence[str], me: str, base: int) -> Key:
    """The oldest digit goes, this peer's own in the group comes: its members have distinct ones."""
    return (*key[1:], drawn_digits(group_id, base)[members.index(me)])


def split_crowd(callers: Sequence[Caller], most: int) -> list[Sequence[Caller]]:
    """As few groups of at most `most` as can be, of nearly equal size (reference, section 3: a crowd with one key)."""
    groups = -(-len(callers) // most)
    return [callers[start::groups] for start in range(groups)]
