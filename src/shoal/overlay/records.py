"""Signed records that expire, and what one node holds of them.

A record lies under a key; its subkey is its owner's peer id, the hash of the key that signed it: nobody can write
another's. Of two the higher sequence is newer; of two equal ones that which is held stays.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shoal.net.envelope import Message
from shoal.net.identity import Identity, peer_id_of, verify

MAX_KEY_CHARS, MAX_VALUE_BYTES = 200, 4096
MAX_TTL_SECONDS, SKEW_SECONDS = 3600.0, 60.0
MAX_KEYS_PER_OWNER, MAX_RECORDS, MAX_BYTES = 32, 100_000, 64_000_000
MAX_VERIFIED = 16_384
SWEEP_SECONDS = 5.0
DOMAIN = b"shoal directory record 1\0"
MARK_BYTES = 8
OVERHEAD_BYTES = 150  # of a record besides key and value: key and signature of its owner, numbers, framing


class SignedRecord(Message, frozen=True, array_like=True):
    """What its owner says under `key`, until `expires_at` (Unix seconds)."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_CHARS)]
    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    expires_at: float
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    @property
    def owner(self) -> str:
        """Its subkey."""
        return peer_id_of(self.public_key)

    @property
    def mark(self) -> bytes:
        """Tells it from others: the beginning of its signature."""
        return self.signature[:MARK_BYTES]

    @property
    def size_bytes(self) -> int:
        """About what it takes on the wire and in memory."""
        return len(self.key.encode()) + len(self.value) + OVERHEAD_BYTES

    def valid_at(self, wall: float) -> bool:
        """Neither expired nor dated further ahead than any honest owner would."""
        return wall < self.expires_at <= wall + MAX_TTL_SECONDS + SKEW_SECONDS  # false for NaN too

    def genuine(self) -> bool:
        """Whether its owner signed exactly this."""
        digest = _digest(self.key, self.public_key, self.value, self.sequence, self.expires_at)
        return _signed_by(self.public_key, self.signature, digest)


def sign(identity: Identity, key: str, value: bytes, sequence: int, expires_at: float) -> SignedRecord:
    """A record of one's own."""
    digest = _digest(key, identity.public_key, value, sequence, expires_at)
    return SignedRecord(key, identity.public_key, value, sequence, expires_at, identity.sign(DOMAIN + digest))


def merge(newest: dict[str, SignedRecord], record: SignedRecord) -> None:
    """Keep the newer of an owner's two records."""
    known = newest.get(record.owner)
    if known is None or known.sequence < record.sequence:
        newest[record.owner] = record


def _digest(*content: str | bytes | float) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


@functools.lru_cache(maxsize=MAX_VERIFIED)
def _signed_by(public_key: bytes, signature: bytes, digest: bytes) -> bool:
    """0.1 ms each, and every look-up meets the same signatures: the answers are remembered."""
    return verify(public_key, signature, DOMAIN + digest)


@dataclass(frozen=True)
class _Held:
    record: SignedRecord
    until: float
    """The latest expiry of all that lay here: an older one that was to live longer can't come back before it."""
    mark: bytes
    size_bytes: int


class Shelf:
    """The records this node holds for others. Whoever puts one here has verified it.

    A full shelf refuses what is new: were the oldest dropped instead, a flood would push out what others rely on, while
    a refused record still lies at the other replicas and is stored again by its owner.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._held: dict[int, dict[str, _Held]] = {}
        self._keys_of: Counter[str] = Counter()
        self._count, self._bytes = 0, 0
        self._swept_at = wall()

    def __len__(self) -> int:
        return self._count

    def points(self) -> list[int]:
        """The points under which something is held."""
        return list(self._held)

    def put(self, point: int, record: SignedRecord) -> bool:
        """Take a record whose key has this point; True when this very record lies here now."""
        self._sweep()
        wall, owner = self._wall(), record.owner
        held = self._held.get(point, {}).get(owner)
        if not record.valid_at(wall):
            return False
        if held is not None and held.record.sequence >= record.sequence:
            return held.record == record
        grown = record.size_bytes - (held.size_bytes if held else 0)
        full = self._bytes + grown > MAX_BYTES
        if held is None and (self._keys_of[owner] >= MAX_KEYS_PER_OWNER or len(self) >= MAX_RECORDS):
            full = True
        if full:
            return False
        until = max(record.expires_at, held.until if held else 0.0)
        shelf = self._held.setdefault(point, {})
        shelf.pop(owner, None)  # the newest comes last
        shelf[owner] = _Held(record, until, record.mark, record.size_bytes)
        self._bytes += grown
        if held is None:
            self._count += 1
            self._keys_of[owner] += 1
        return True

    def under(self, point: int) -> list[SignedRecord]:
        """The valid records of a key; what came last is first."""
        return self.fitting(point, frozenset(), MAX_RECORDS, MAX_BYTES)

    def fitting(self, point: int, known: Set[bytes], most: int, limit_bytes: int) -> list[SignedRecord]:
        """As many of them as fit, without those whose marks are known."""
        self._sweep()
        wall = self._wall()
        fitting: list[SignedRecord] = []
        for held in reversed(self._held.get(point, {}).values()):
            if held.mark in known or not held.record.valid_at(wall):
                continue
            limit_bytes -= held.size_bytes
            if limit_bytes < 0 or len(fitting) == most:
                break
            fitting.append(held.record)
        return fitting

    def _sweep(self) -> None:
        """Forget what has expired. The wall clock may jump, also back."""
        wall = self._wall()
        if abs(wall - self._swept_at) < SWEEP_SECONDS:
            return
        self._swept_at = wall
        for point, owners in list(self._held.items()):
            for owner, held in list(owners.items()):
                if held.until <= wall:
                    del owners[owner]
                    self._count -= 1
                    self._bytes -= held.size_bytes
                    self._keys_of[owner] -= 1
                    if not self._keys_of[owner]:
                        del self._keys_of[owner]
            if not owners:
                del self._held[point]
