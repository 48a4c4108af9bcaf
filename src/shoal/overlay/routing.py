"""Kademlia's routing table: for each power of two a bucket of the peers at that distance (sections 2.2 and 4.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from shoal.core.address import MAX_ENDPOINTS, Endpoint, parse_endpoint
from shoal.core.clock import Random
from shoal.core.errors import AddressError
from shoal.net.envelope import Message
from shoal.planning.distance import POINT_BITS, point_of

BUCKET_SIZE = 20
REST_SECONDS, MAX_REST_SECONDS = 5.0, 300.0
MAX_RESTING = 2000

PeerId = Annotated[str, msgspec.Meta(pattern=r"\A[a-z2-7]{32}\Z")]
Places = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=260)], ...], msgspec.Meta(max_length=MAX_ENDPOINTS)]


class Contact(Message, frozen=True, array_like=True):
    """Who may be found where."""

    peer_id: PeerId
    places: Places

    @property
    def size_bytes(self) -> int:
        """About what it takes on the wire."""
        return 50 + sum(map(len, self.places))

    def endpoints(self) -> list[Endpoint]:
        """Empty when any of the places is none."""
        try:
            return [parse_endpoint(place) for place in self.places[:MAX_ENDPOINTS]]
        except AddressError:
            return []


class RoutingTable:
    """A live contact is never given up for a new one: who has been there for long will stay longest (section 2.2).

    A contact that fails gives its place to a spare one, and stays where there is none (section 4.1): a broken uplink of
    our own must not empty the table. It is not asked again for a while, and not named to others before it answers.
    It fails at its endpoints: a liar that names false ones for a peer does not silence it at the true ones.
    """

    def __init__(self, peer_id: str, now: Callable[[], float]) -> None:
        self._me, self._now = peer_id, now
        self._buckets: dict[int, dict[str, Contact]] = {}  # least recently heard first, as are the spare ones
        self._spares: dict[int, dict[str, Contact]] = {}
        self._rests: dict[Contact, tuple[float, float]] = {}  # (until, its length)

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._buckets.values():
            yield from bucket.values()

    def _bucket(self, peer_id: str) -> tuple[dict[str, Contact], dict[str, Contact]]:
        number = (point_of(peer_id) ^ point_of(self._me)).bit_length() - 1
        return self._buckets.setdefault(number, {}), self._spares.setdefault(number, {})

    def get(self, peer_id: str) -> Contact | None:
        """The contact of this peer, at the endpoints that it named itself."""
        return self._bucket(peer_id)[0].get(peer_id)

    def heard(self, contact: Contact) -> bool:
        """It called or answered. True when it is new in the table."""
        if contact.peer_id == self._me or not contact.endpoints():
            return False
        bucket, spares = self._bucket(contact.peer_id)
        self.rested(contact)
        spares.pop(contact.peer_id, None)
        known = bucket.pop(contact.peer_id, None)
        if known is None and len(bucket) >= BUCKET_SIZE:
            failed = next((peer_id for peer_id, other in bucket.items() if other in self._rests), None)
            if failed is None:
                spares[contact.peer_id] = contact
                if len(spares) > BUCKET_SIZE:
                    del spares[next(iter(spares))]
                return False
            del bucket[failed]
        bucket[contact.peer_id] = contact
        return known is None

    def failed(self, contact: Contact) -> None:
        """It did not answer: 5 s of rest, twice as long each further time, at most 5 min."""
        if not self.resting(contact):
            _, length = self._rests.pop(contact, (0.0, REST_SECONDS / 2))
            length = min(2 * length, MAX_REST_SECONDS)
            self._rests[contact] = self._now() + length, length
            if len(self._rests) > MAX_RESTING:
                del self._rests[next(iter(self._rests))]
        bucket, spares = self._bucket(contact.peer_id)
        if spares.get(contact.peer_id) == contact:
            del spares[contact.peer_id]
        if bucket.get(contact.peer_id) == contact and spares:
            self.forget(contact.peer_id)

    def forget(self, peer_id: str) -> None:
        """Give its place to the spare one heard last."""
        bucket, spares = self._bucket(peer_id)
        spares.pop(peer_id, None)
        if bucket.pop(peer_id, None) and spares:
            name, contact = spares.popitem()
            bucket[name] = contact

    def rested(self, contact: Contact) -> None:
        """It can be reached after all: it may be asked at once."""
        self._rests.pop(contact, None)

    @property
    def any_rests(self) -> bool:
        """Whether some contact has failed, and was not heard of since."""
        return bool(self._rests)

    def resting(self, contact: Contact) -> bool:
        """Whether it is not to be asked now."""
        return contact in self._rests and self._rests[contact][0] > self._now()

    def nearest(self, point: int, count: int, *, proven: bool = False) -> list[Contact]:
        """The nearest contacts that do not rest, nearest first; `proven`: of those whose last call was answered."""
        shunned = self._rests.__contains__ if proven else self.resting
        near = (contact for contact in self._by_distance(point) if not shunned(contact))
        return list(itertools.islice(near, count))

    def _by_distance(self, point: int) -> Iterator[Contact]:
        """All contacts, the nearest first. In the point's own bucket they are nearest, then those in all lower ones."""
        own = (point ^ point_of(self._me)).bit_length() - 1
        lower = [number for number in self._buckets if number < own]
        for numbers in ([own], lower, *([number] for number in sorted(self._buckets) if number > own)):
            contacts = [contact for number in numbers for contact in self._buckets.get(number, {}).values()]
            yield from sorted(contacts, key=lambda contact: point_of(contact.peer_id) ^ point)

    def refresh_points(self, random: Random) -> list[int]:
        """A random point in each bucket further away than the nearest neighbour (section 2.3)."""
        me, lowest = point_of(self._me), min((n for n, bucket in self._buckets.items() if bucket), default=POINT_BITS)
        return [me ^ (1 << number | random.getrandbits(number)) for number in range(lowest, POINT_BITS)]
