"""The group keys of plain Moshpit All-Reduce (Ryabinin et al. 2021; reference, sections 2.1, 2.2 and 2.4).

A key is d-1 digits base M: a peer's index in each of its last d-1 groups. Peers with equal keys form the next group;
within it all get distinct indices, so peers that met in one round are apart in the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shoal.core.clock import Random

Key = tuple[int, ...]


def initial_key(peer_id: str, base: int, digits: int) -> Key:
    """Digits from a hash of the peer's id: nobody numbers the peers. Crowded groups are split when they meet."""
    number = int.from_bytes(hashlib.sha256(f"key {peer_id}".encode()).digest())
    return tuple(number // base**place % base for place in range(digits))


def next_key(key: Key, group_id: str, members: Sequence[str], me: str, base: int) -> Key:
    """The oldest digit goes, this peer's index in the group comes: |G| distinct ones of `base`, drawn from its id."""
    indices = Random(group_id).sample(range(base), len(members))
    return (*key[1:], indices[members.index(me)])
