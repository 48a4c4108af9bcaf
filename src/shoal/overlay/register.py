"""The register of a run: its page in the directory, where members keep their records and find those they have not met.

Members tell each other directly, over their links, what they do. The register is for what links can not do. Two peers
that nobody introduced, because they came at once through different peers, find each other here. And in a swarm of more
members than a peer has links it lists the rest, a little later than a link would tell: whoever is needed from there is
dialled, and links that nobody has used for a while are given up again. The larger the swarm, the more rarely its page
is read: who takes part in an averaging is in its roll, with places, and is listed from there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import msgspec

from shoal.core.address import MAX_ENDPOINTS, parse_endpoint
from shoal.core.errors import AddressError, PeerLost, ProtocolError, ShoalError
from shoal.net.envelope import decode_body, raw
from shoal.overlay.directory import Entry
from shoal.overlay.member_record import TRAINER, TRAINING, Record
from shoal.overlay.membership import NEIGHBOURS, Membership

PAUSES_SECONDS, STAY_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0), 30.0
"""Before each visit to the page, the last one for ever. The first links are made by the first; a crowd of newcomers
has found each other before the long pauses."""
LARGE_PAGE, MOST_VISITS = 64, 6
"""A page of more records is read at each second visit only; later on, of twice as many at each third, and so on, up to
each sixth."""
UNUSED_SECONDS = 20.0
MAX_DECODED, MAX_LISTED = 4096, 10_000


@functools.lru_cache(maxsize=MAX_DECODED)
def _record_in(value: bytes) -> Record:
    """Each reading meets many that it has met before."""
    return decode_body(msgspec.Raw(value), Record)


class Register:
    """One peer's view of the page, read again and again."""

    def __init__(self, members: Membership) -> None:
        self._members, self._host = members, members.host
        self._page: dict[str, Record] = {}
        self._sequences: dict[str, int] = {}  # of what was read last

    async def keep(self) -> None:
        """Keep this peer's record there for ever, and links to as many members as a peer should have."""
        directory = self._members.directory
        unread = 0
        for visit in itertools.count():
            pause = PAUSES_SECONDS[min(visit, len(PAUSES_SECONDS) - 1)]
            await self._host.clock.sleep(pause * self._host.random.uniform(0.75, 1.25))  # not all at once
            if visit == 0:
                await directory.bootstrap()
            if self._members.charter is not None:
                await directory.store(self._page_key, bytes(raw(self._members.me.listed())), STAY_SECONDS)
                unread += 1
                if unread >= (self._visits_per_reading if visit >= len(PAUSES_SECONDS) else self._early_visits):
                    await self._read_page()
                    unread = 0
                await self._give_up_unused()

    @property
    def _page_key(self) -> str:
        assert self._members.charter is not None
        return f"members of {self._members.charter.charter_id}"

    @property
    def _visits_per_reading(self) -> int:
        return min(1 + len(self._page) // LARGE_PAGE, MOST_VISITS)

    @property
    def _early_visits(self) -> int:
        return min(self._visits_per_reading, 2)

    async def look_for_newcomers(self) -> None:
        """Read the page now, where it is read rarely: whoever collects a roll has to know who came meanwhile."""
        if self._visits_per_reading > 1:
            await self._read_page()

    async def _read_page(self) -> None:
        page = self._page_key
        is_large = max(len(self._page), self._members.most_heard_of[0]) > LARGE_PAGE
        entries = (await self._members.directory.get(page, one_by_one=is_large))[page]
        for who, entry in entries.items():
            if entry.sequence > self._sequences.get(who, -1):
                self._members.has_written(who)
        self._sequences = {who: entry.sequence for who, entry in entries.items()}
        records = [record for who, entry in entries.items() if (record := self._read(who, entry))]
        self._page = {record.peer_id: record for record in records}
        self._members.seek(list(self._listed().values()))

    def _read(self, peer_id: str, entry: Entry) -> Record | None:
        try:
            record = _record_in(entry.value)
        except ProtocolError as error:
            self._host.log.add("refused", f"its record in the register: {error}", peer_id)
            return None
        return record if record.peer_id == peer_id else None

    def _listed(self) -> dict[str, Record]:
        return {who: record for who, record in self._page.items() if self._members.is_only_listed(record)}

    def everybody(self, state: str | None = None) -> dict[str, Record]:
        """This peer, the trainers it has a link to, and those that are only listed, by id (in a state)."""
        listed = self._listed().items()
        rest = {who: record for who, record in listed if record.role == TRAINER and state in (None, record.state)}
        return dict(sorted({**rest, **self._members.with_me(state)}.items()))

    async def reach(self, peer_id: str) -> None:
        """See to it that there is a link to a member that is only listed. Raises PeerLost."""
        record = self._page.get(peer_id)
        if record is None or self._host.linked(peer_id):
            return
        try:
            await self._members.meet([parse_endpoint(text) for text in record.endpoints[:MAX_ENDPOINTS]], peer_id)
        except ShoalError as error:
            self._members.not_reached(peer_id)
            raise PeerLost(f"{peer_id[:8]} can't be reached: {error}") from None

    def hear_roll(self, peer_ids: Sequence[str], places: Sequence[Sequence[str]], *, training: bool) -> None:
        """Who took part in an averaging and where they listen, as its collector says: a place is believed only where
        nothing better is known."""
        now = self._host.clock.wall()
        for peer_id, endpoints in zip(peer_ids, places, strict=False) if training else ():
            if len(self._page) >= MAX_LISTED and peer_id not in self._page:
                continue  # a swarm of so many needs another way; a collector that lies has only this much room
            known = self._page.get(peer_id) or Record(peer_id, list(endpoints), born=now)
            self._page[peer_id] = msgspec.structs.replace(known, state=TRAINING)
        for peer_id, endpoints in zip(peer_ids, places, strict=False):
            if peer_id != self._host.peer_id and not self._host.knows(peer_id):
                with contextlib.suppress(AddressError):
                    self._host.know(peer_id, [parse_endpoint(text) for text in endpoints])

    async def _give_up_unused(self) -> None:
        """Part from some of those to whom nobody needs a link now, down to NEIGHBOURS; they stay listed."""
        members = self._members.members
        spare = len(members) - NEIGHBOURS
        if spare > NEIGHBOURS // 2:
            unused = [who for who in members if self._host.unused_seconds(who) > UNUSED_SECONDS and who in self._page]
            for who in self._host.random.sample(unused, min(spare, len(unused))):
                await self._host.part(who)
