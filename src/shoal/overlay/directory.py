"""The directory: Kademlia (Maymounkov & Mazieres 2002) over authenticated calls, with signed records that expire.

Every peer has a point, the hash of its id, and so has every key; a record lies at the REPLICAS peers nearest to its key
by XOR. A look-up asks the nearest peers it knows of for nearer ones until the nearest have answered (section 2.3).
Under one key each peer has one record, its own: a look-up returns all of them, and believes only signatures. So a peer
that lies can hide or repeat what others said, never change it, and the newest from any replica wins.

Whom others name is a candidate; a contact is who called or answered, at the endpoints it names itself.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from shoal.core.address import MAX_ENDPOINTS
from shoal.core.errors import OptionError, ProtocolError, RemoteError
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.overlay.lookup import MAX_POINTS_PER_CALL, LookUp
from shoal.overlay.records import (
    MARK_BYTES,
    MAX_KEY_CHARS,
    MAX_TTL_SECONDS,
    MAX_VALUE_BYTES,
    Shelf,
    SignedRecord,
    merge,
    sign,
)
from shoal.overlay.routing import BUCKET_SIZE, Contact, Places, RoutingTable
from shoal.planning.distance import POINT_BITS, point_of

REPLICAS = 5
ALPHA = REPLICAS
"""Requests at once (the paper takes 3): with fewer a look-up in a small swarm would take two round trips, not one."""
CALL_SECONDS, LOOKUP_SECONDS = 2.0, 10.0
PATIENCE_SECONDS = 0.5
"""When none of those asked answers for so long, ALPHA more are asked: silent machines cost little time."""
MAX_CALLS = 32
"""Under the 64 that a host allows one caller. Dials outlive the call that wanted them by seconds, no more."""
MAX_RECORDS_PER_ANSWER, MAX_ANSWER_BYTES, MAX_NAMES_BYTES = 1000, 1_000_000, 250_000
MAX_RECORDS_PER_STORE, BATCH_BYTES, MAX_MARKS = 64, 65_536, 4096
MAX_NEWCOMERS, PASS_ON_SECONDS = 100, 0.25
CACHE_SECONDS, MAX_CACHED_RECORDS = 1.0, 256
NEAR_SECONDS = 25.0
"""So long a peer stores again where it did before, once two look-ups in a row have found the same peers: nearer ones
that come meanwhile get it from their neighbours."""
POINT_BYTES = POINT_BITS // 8
BREATH_EVERY = 50  # signatures, about 5 ms, between two turns for others on the loop

PointBytes = Annotated[bytes, msgspec.Meta(min_length=POINT_BYTES, max_length=POINT_BYTES)]
Reply = TypeVar("Reply", bound=Message)
Item = TypeVar("Item", Contact, SignedRecord)


@dataclass(frozen=True)
class Entry:
    """What one peer said under a key, until `expires_at` (Unix seconds)."""

    value: bytes
    expires_at: float
    sequence: int


class Find(Message, frozen=True):
    """Whom do you know near these points, and (where wanted) what lies there? `places`: where the caller listens.

    `known`: the marks, end to end, of records that it has already.
    """

    points: Annotated[list[PointBytes], msgspec.Meta(max_length=MAX_POINTS_PER_CALL)]
    wants_records: bool
    places: Places
    known: Annotated[bytes, msgspec.Meta(max_length=MARK_BYTES * MAX_MARKS)] = b""


class Found(Message, frozen=True):
    """The nearest contacts of all points together, each once, and records; `places`: where this peer listens."""

    contacts: Annotated[list[Contact], msgspec.Meta(max_length=MAX_POINTS_PER_CALL * BUCKET_SIZE)]
    records: Annotated[list[SignedRecord], msgspec.Meta(max_length=MAX_POINTS_PER_CALL * MAX_RECORDS_PER_ANSWER)]
    places: Places


class Store(Message, frozen=True):
    """Keep these."""

    records: Annotated[list[SignedRecord], msgspec.Meta(max_length=MAX_RECORDS_PER_STORE)]


class Stored(Message, frozen=True):
    """Which of them lie here now."""

    kept: list[bool]


class Directory:
    """One node of it. Owners store again every third of the time to live; that is the caller's business."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.table = RoutingTable(host.peer_id, host.clock.now)
        self.shelf = Shelf(host.clock.wall)
        self._sequence = 0
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._dialling: dict[Contact, asyncio.Task[None]] = {}
        self._cache: dict[str, tuple[float, dict[str, Entry]]] = {}  # (when, what) by key, oldest first
        self._cached = 0  # entries in it
        self._near: dict[str, tuple[float, list[Contact], bool]] = {}  # (when, who, twice in a row) by key
        self._newcomers: dict[str, Contact] = {}
        self._passing_on = False
        host.serve(Find, self._find)
        host.serve(Store, self._store)

    # -- what its user calls

    async def store(self, key: str, value: bytes, ttl_seconds: float) -> int:
        """Sign `value` and store it under `key`, at this peer's own subkey. Returns at how many peers it lies now.

        Raises OptionError. A key or value that is too long is the caller's mistake; other peers' mistakes only count.
        """
        _check_key(key)
        if not isinstance(value, bytes) or len(value) > MAX_VALUE_BYTES:
            raise OptionError("value", f"{len(value)} bytes", f"at most {MAX_VALUE_BYTES} bytes")
        if not (math.isfinite(ttl_seconds) and 0 < ttl_seconds <= MAX_TTL_SECONDS):
            raise OptionError("ttl_seconds", ttl_seconds, f"more than 0 and at most {MAX_TTL_SECONDS:.0f}")
        wall, point = self.host.clock.wall(), point_of(key)
        self._sequence = max(self._sequence + 1, int(wall * 1000))  # a restarted peer's records are newer
        record = sign(self.host.identity, key, value, self._sequence, wall + ttl_seconds)
        near, kept = await self._nearest(key, point), 0
        if len(near) < REPLICAS or _nearer(self.host.peer_id, near[-1].peer_id, point):
            kept, near = int(self.shelf.put(point, record)), near[: REPLICAS - 1]
        answers = await asyncio.gather(*[self._call(contact, Store([record]), Stored) for contact in near])
        self._uncache(key)
        took = sum(answer is not None and answer.kept == [True] for answer in answers)
        if took < len(near):
            self._near.pop(key, None)  # somebody is gone
        return kept + took

    async def _nearest(self, key: str, point: int) -> list[Contact]:
        """The REPLICAS peers nearest to a key that is stored here again and again."""
        now = self.host.clock.now()
        found_at, before, is_sure = self._near.get(key, (-math.inf, [], False))
        if is_sure and now - found_at < NEAR_SECONDS:
            return before
        near = (await self._look_up([point], REPLICAS)).nearest(point)
        self._near = {old: one for old, one in self._near.items() if now - one[0] < MAX_TTL_SECONDS}
        self._near[key] = now, near, near == before
        return near

    async def get(self, *keys: str, one_by_one: bool = False) -> dict[str, dict[str, Entry]]:
        """Each key's valid records by their owner; a key without any gives {}. Raises OptionError for a bad key.

        `one_by_one`: the replicas are asked in any order, each for what those before it did not have. It takes a little
        longer, and saves four fifths of the bytes where many have a record under one key.
        """
        now, wall = self.host.clock.now(), self.host.clock.wall()
        found: dict[str, dict[str, Entry]] = {}
        for key in keys:
            _check_key(key)
            cached_at, entries = self._cache.get(key, (-math.inf, {}))
            if now - cached_at < CACHE_SECONDS:
                found[key] = {owner: entry for owner, entry in entries.items() if wall < entry.expires_at}
        missing = {key: point_of(key) for key in keys if key not in found}
        at_once = 1 if one_by_one else ALPHA
        search = await self._look_up(list(missing.values()), REPLICAS, wants_records=True, at_once=at_once)
        for key, point in missing.items():
            newest = search.found[point]
            for record in self.shelf.under(point):
                merge(newest, record)
            found[key] = {who: Entry(r.value, r.expires_at, r.sequence) for who, r in sorted(newest.items())}
            self._remember(key, dict(found[key]))
        return {key: found[key] for key in keys}

    def _remember(self, key: str, entries: dict[str, Entry]) -> None:
        """For CACHE_SECONDS. A key without records is asked for again."""
        now = self.host.clock.now()
        self._uncache(key)
        if entries:
            self._cache[key], self._cached = (now, entries), self._cached + len(entries)
        while self._cache:
            oldest, (cached_at, _) = next(iter(self._cache.items()))
            if now - cached_at < CACHE_SECONDS and self._cached <= MAX_CACHED_RECORDS:
                break
            self._uncache(oldest)

    def _uncache(self, key: str) -> None:
        self._cached -= len(self._cache.pop(key, (0.0, {}))[1])

    def meet(self, peer_id: str, endpoints: Sequence[str]) -> None:
        """This contact is alive."""
        self._heard(peer_id, tuple(endpoints[:MAX_ENDPOINTS]))

    def forget(self, peer_id: str) -> None:
        """This contact was lost."""
        self.table.forget(peer_id)

    async def bootstrap(self) -> None:
        """Become known to one's neighbours, then fill the buckets further away (section 2.3)."""
        await self._look_up([point_of(self.host.peer_id)], BUCKET_SIZE)
        await self._look_up(self.table.refresh_points(self.host.random), REPLICAS)

    # -- looking up

    async def _look_up(
        self, points: list[int], width: int, wants_records: bool = False, at_once: int = ALPHA
    ) -> LookUp:
        """The nearest `width` peers of each point. At the deadline, what is known by then."""
        search = LookUp(points, width, wants_records, self.host.random if at_once == 1 else None)
        for point in points:
            search.learn(self.table.nearest(point, BUCKET_SIZE))
        try:
            async with asyncio.timeout(LOOKUP_SECONDS), asyncio.TaskGroup() as tasks:
                asked: list[asyncio.Task[None]] = []
                while not search.done():
                    while len(asked) < at_once + search.extra and (due := search.due()):
                        asked.append(tasks.create_task(self._ask(search, *due)))
                    ended, _ = await asyncio.wait(asked, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    search.extra += 0 if ended else ALPHA
                    asked = [task for task in asked if not task.done()]
                for task in asked:
                    task.cancel()  # they turned out not to be among the nearest
        except TimeoutError:
            self.host.log.add("late", f"a look-up in the directory ended after {LOOKUP_SECONDS:.0f} s, incomplete")
        return search

    async def _ask(self, search: LookUp, contact: Contact, points: list[int]) -> None:
        request = Find(
            [point.to_bytes(POINT_BYTES) for point in points], search.wants_records, self._places(),
            search.known(points, MAX_MARKS),
        )  # fmt: skip
        found = await self._call(contact, request, Found)
        if found is None or not await self._believe(search, contact.peer_id, points, found.records):
            self.table.failed(contact)
            search.lose(contact, points)
            return
        self._heard(contact.peer_id, found.places)
        named = found.contacts[: BUCKET_SIZE * len(points)]
        search.learn(c for c in named if c.peer_id != self.host.peer_id and not self.table.resting(c))
        search.answer(contact.peer_id, points)

    async def _believe(self, search: LookUp, peer_id: str, points: list[int], records: Iterable[SignedRecord]) -> bool:
        """Take over what is newer and true. False at the first lie: the rest of that answer is not read."""
        wall, checked = self.host.clock.wall(), 0
        for record in records:
            point = point_of(record.key)
            if point not in points:
                self.host.log.add("refused", "it told of a key that it was not asked for", peer_id)
                return False
            newest = search.found[point].get(record.owner)
            if not record.valid_at(wall) or (newest is not None and newest.sequence >= record.sequence):
                continue
            if not record.genuine():
                self.host.log.add("refused", "it told of a record that its owner did not sign", peer_id)
                return False
            merge(search.found[point], record)
            checked += 1
            if checked % BREATH_EVERY == 0:
                await self.host.clock.sleep(0)
        return True

    async def _call(self, contact: Contact, request: Message, reply: type[Reply]) -> Reply | None:
        """The answer, over a link that is made where there is none; None when it did not answer in time."""
        async with self._slots:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await self._reach(contact)
                    return await self.host.call(contact.peer_id, request, reply, timeout_seconds=CALL_SECONDS)
            except (RemoteError, TimeoutError):
                self.table.failed(contact)
                return None

    async def _reach(self, contact: Contact) -> None:
        """Wait for a link. The dial goes on behind a caller that gives up, so a second endpoint gets its turn too."""
        if not self.host.linked(contact.peer_id):
            if contact not in self._dialling:
                self._dialling[contact] = self.host.spawn(self._dial(contact), f"find {contact.peer_id[:6]}")
            await asyncio.wait([self._dialling[contact]])

    async def _dial(self, contact: Contact) -> None:
        try:
            await self.host.link(contact.endpoints(), contact.peer_id)
            self.table.rested(contact)
        except RemoteError:
            self.table.failed(contact)
        finally:
            del self._dialling[contact]

    def _places(self) -> tuple[str, ...]:
        return tuple(str(endpoint) for endpoint in self.host.endpoints[:MAX_ENDPOINTS])

    # -- serving

    async def _find(self, peer_id: str, call: Find) -> Message:
        self._heard(peer_id, call.places)
        points = [int.from_bytes(point) for point in call.points]
        near = {c.peer_id: c for point in points for c in self.table.nearest(point, BUCKET_SIZE, proven=True)}
        near.pop(peer_id, None)
        contacts = _fitting(near.values(), MAX_NAMES_BYTES)
        records, left = [], MAX_ANSWER_BYTES
        known = {call.known[at : at + MARK_BYTES] for at in range(0, len(call.known), MARK_BYTES)}
        for number, point in enumerate(points if call.wants_records else []):
            share = left // (len(points) - number)  # what one key does not need, the later ones may take
            chosen = self.shelf.fitting(point, known, MAX_RECORDS_PER_ANSWER, share)
            left -= sum(record.size_bytes for record in chosen)
            records += chosen
        return Found(contacts, records, self._places())

    async def _store(self, peer_id: str, call: Store) -> Message:
        kept = []
        for record in call.records:
            if not record.valid_at(self.host.clock.wall()):
                kept.append(False)
            elif not record.genuine():
                raise ProtocolError("a record that its owner did not sign")
            else:
                kept.append(self.shelf.put(point_of(record.key), record))
        return Stored(kept)

    # -- contacts

    def _heard(self, peer_id: str, places: tuple[str, ...]) -> None:
        contact = Contact(peer_id, places)
        if self.table.heard(contact) and len(self.shelf) and len(self._newcomers) < MAX_NEWCOMERS:
            self._newcomers[peer_id] = contact
            if not self._passing_on:
                self._passing_on = True
                self.host.spawn(self._pass_on(), "pass records on")

    async def _pass_on(self) -> None:
        """Give newcomers what they are now nearer to than this node (section 2.5), one small batch after the other."""
        try:
            while self._newcomers:
                _, contact = self._newcomers.popitem()
                batch: list[SignedRecord] = []
                for number, point in enumerate(self.shelf.points()):
                    if number % BREATH_EVERY == 0:
                        await self.host.clock.sleep(0)
                    batch += self.shelf.under(point) if self._is_its_now(contact.peer_id, point) else []
                while batch and self.table.get(contact.peer_id):
                    part = _fitting(batch, BATCH_BYTES)[:MAX_RECORDS_PER_STORE]
                    batch = batch[len(part) :]
                    if await self._call(contact, Store(part), Stored) is None:
                        break
                    await self.host.clock.sleep(PASS_ON_SECONDS)
        finally:
            self._passing_on = False

    def _is_its_now(self, peer_id: str, point: int) -> bool:
        nearest = self.table.nearest(point, REPLICAS)
        return _nearer(peer_id, self.host.peer_id, point) and peer_id in [contact.peer_id for contact in nearest]


def _nearer(one: str, other: str, point: int) -> bool:
    return point_of(one) ^ point < point_of(other) ^ point


def _check_key(key: str) -> None:
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise OptionError("key", key, f"1 to {MAX_KEY_CHARS} printable characters")


def _fitting(items: Iterable[Item], limit_bytes: int) -> list[Item]:
    """As many of the first as fit."""
    sizes = itertools.accumulate(item.size_bytes for item in items)
    return [item for item, size in zip(items, sizes, strict=True) if size <= limit_bytes]
