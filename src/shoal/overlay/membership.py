"""Who is in the run: a peer keeps links to NEIGHBOURS others, and hears from each, by its own word, what it is doing.

In a swarm of up to that many, these are all; in a larger one the register lists the rest (register.py).

A link begins with Introduce: both ends show their record, their charter and whom they know. Whoever is named there is
dialled, so two newcomers that came through different peers find each other. Records travel only from their owner, over
its own authenticated link: nobody can say anything about another, except where it may be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shoal.core.address import MAX_ENDPOINTS, Endpoint, parse_endpoint
from shoal.core.errors import AddressError, CharterMismatch, RefusedError, RemoteError, ShoalError
from shoal.net.envelope import Message
from shoal.net.heartbeat import news_seconds
from shoal.net.host import PARTED, Host
from shoal.overlay.charter import Charter, Options, Schema, Standing, check_schema, check_strategy, stays
from shoal.overlay.directory import Directory
from shoal.overlay.member_record import (
    JOINED,
    SEED,
    TRAINER,
    TRAINING,
    Acquaintance,
    Claim,
    Claimed,
    Complaint,
    Introduce,
    Introduced,
    Record,
    Status,
)

REDIAL_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, *[4.0] * 150, 30.0)
"""Pauses before a lost peer is dialled again. The last one repeats: a network that split may heal tomorrow.

Whom only the register names is dialled once: if it lives, the register names it again."""
NEIGHBOURS, OWN_DIALS = 64, 16
"""Links that a peer keeps, and how many it dials in a swarm of more: it is dialled by as many."""
MAX_SOUGHT, MAX_ACQUAINTANCES = 256, 1000
CALL_SECONDS, HEARD_SECONDS = 5.0, 120.0

Known = TypeVar("Known", Acquaintance, Record)


class Membership:
    """The members this peer knows, its own record, and the run's charter."""

    def __init__(self, host: Host, *, role: str, strategy: Options | None = None) -> None:
        self.host, self.strategy = host, strategy
        self.me = Record(host.peer_id, [], born=host.clock.wall(), role=role)
        self.charter: Charter | None = None
        self._founded = ""  # the charter that this very process completed, with a state of its own
        self.members: dict[str, Record] = {}
        self.met: dict[str, None] = {}
        self._gone: dict[str, float] = {}  # who left or was lost, and has not been met again: when it was born
        self._unreached: dict[str, None] = {}  # listed, but dialled in vain, and has not been heard of since
        self._redialling: dict[str, None] = {}
        self.most_heard_of = 0, 0.0  # how many other members at once, and when
        self.directory = Directory(host)
        self.on_change: list[Callable[[], None]] = []
        self.on_rolls: list[Callable[[dict[str, int]], None]] = []  # the newest numbers that a member knows
        self.on_figures: list[Callable[[], None]] = []  # of another member, whatever they are
        self.on_yield: Callable[[], None] = lambda: None
        self.refresh: Callable[[], dict[str, Any]] = dict
        host.on_lost.append(self._lost)
        host.serve(Introduce, self._introduce)
        host.hear(Status, self._status)
        host.serve(Claim, self._claim)
        host.hear(Complaint, self._complaint)

    def start(self) -> None:
        """Call once the host listens."""
        self.update(endpoints=[str(endpoint) for endpoint in self.host.endpoints])
        self.host.spawn(self._keep_telling(), "status")

    # -- asking

    def with_me(self, state: str | None = None, role: str = TRAINER) -> dict[str, Record]:
        """This peer and the live members of a role (and state), by id."""
        everyone = {self.me.peer_id: self.me, **self.members}
        return {
            peer_id: record
            for peer_id, record in sorted(everyone.items())
            if record.role == role and state in (None, record.state)
        }

    def others(self, state: str | None = None) -> dict[str, Record]:
        """The other live trainers (in a state), by id."""
        return {peer_id: record for peer_id, record in self.with_me(state).items() if peer_id != self.me.peer_id}

    def has_others(self, state: str) -> bool:
        """Whether there is another live trainer in this state."""
        return any(record.state == state and record.role == TRAINER for record in self.members.values())

    def update(self, **changes: object) -> None:
        """Change this peer's own record; a changed state is told at once, the rest with the next status.

        `refresh`, when set, gives the changes that a status brings along."""
        before = self.me
        self.me = msgspec.structs.replace(self.me, version=self.me.version + 1, **changes)
        if before.first_batch != self.me.first_batch:
            for record in self.members.values():
                self._warn_of_equal_batches(record)
        if before.state != self.me.state or before.endpoints != self.me.endpoints:
            self._tell_everybody()
            self._changed()

    # -- meeting

    async def meet(self, endpoints: list[Endpoint], expected: str | None) -> str:
        """Connect to a peer and introduce each other. Returns its id.

        Raises CharterMismatch, RefusedError or PeerLost.
        """
        peer_id = await self.host.link(endpoints, expected)
        request = Introduce(self.me, self.charter, self.strategy, self._acquaintances())
        try:
            told = await self.host.call(peer_id, request, Introduced, timeout_seconds=CALL_SECONDS)
        except RefusedError as error:
            self.host.drop(peer_id, error.reason)
            if error.code.startswith("charter:"):
                field = error.code.removeprefix("charter:")
                _, ours, theirs = [*error.reason.split("\n"), "?", "?"][:3]
                raise CharterMismatch(field, ours, theirs) from None
            raise
        except RemoteError as error:
            self.host.drop(peer_id, str(error))
            raise
        self._reconcile(told.charter, told.record)
        self._learn(peer_id, told.record)
        self._look_up(told.acquaintances)
        return peer_id

    async def _introduce(self, peer_id: str, call: Introduce) -> Message:
        if self.charter is not None and (call.charter is None or call.charter.charter_id == self.charter.charter_id):
            try:
                check_strategy(self.charter, call.strategy)
            except CharterMismatch as error:
                self.host.log.add("refused", f"{error.field}: asks for {error.ours}, ours is {error.theirs}", peer_id)
                reason = f"the strategy differs\n{error.ours}\n{error.theirs}"
                raise RefusedError(reason, f"charter:{error.field}") from None
        self._reconcile(call.charter, call.record)
        self._learn(peer_id, call.record)
        self._look_up(call.acquaintances)
        return Introduced(self.me, self.charter, self._acquaintances())

    def _acquaintances(self) -> list[Acquaintance]:
        return [Acquaintance(record.peer_id, record.endpoints) for record in self.members.values()]

    def _look_up(self, acquaintances: list[Acquaintance]) -> None:
        unknown = [who for who in acquaintances if who.peer_id not in (self.me.peer_id, *self.members)]
        for who in self._chosen(unknown[:MAX_ACQUAINTANCES]):
            self._redial(who.peer_id, who.endpoints, REDIAL_SECONDS)

    def _chosen(self, candidates: list[Known]) -> list[Known]:
        """As many of them as it should dial; not the same ones everywhere."""
        known, now = len(self.members) + len(self._redialling), self.host.clock.now()
        if known + len(candidates) >= self.most_heard_of[0] or now - self.most_heard_of[1] > HEARD_SECONDS:
            self.most_heard_of = known + len(candidates), now
        room = (NEIGHBOURS if self.most_heard_of[0] <= NEIGHBOURS else OWN_DIALS) - known
        return candidates if len(candidates) <= room else self.host.random.sample(candidates, max(0, room))

    def _learn(self, peer_id: str, record: Record) -> None:
        if record.peer_id != peer_id:
            raise RefusedError("a peer may only speak for itself")
        known = self.members.get(peer_id)
        if known is not None and (known.born, known.version) >= (record.born, record.version):
            return
        if known is None or known.endpoints != record.endpoints:
            self._learn_where(peer_id, record.endpoints)
        if not self.host.linked(peer_id):
            return  # its link broke while its record was on the way
        self.members[peer_id] = record
        self._gone.pop(peer_id, None)
        if known is None or known.endpoints != record.endpoints or self.directory.table.any_rests:
            self.directory.meet(peer_id, record.endpoints)
        for notice in self.on_figures:
            notice()
        if known is None:
            self.met[peer_id] = None
            self.host.log.add("joined", f"{record.role} at {', '.join(record.endpoints)}", peer_id)
            self._warn_of_equal_batches(record)
        if known is None or known.rolls != record.rolls:
            for heard in self.on_rolls:
                heard(record.rolls)
        if known is None or known.state != record.state or known.rolls != record.rolls:
            self._changed()
        if known is not None and not known.first_batch and record.first_batch:
            self._warn_of_equal_batches(record)

    def _learn_where(self, peer_id: str, endpoints: list[str]) -> None:
        if len(endpoints) > MAX_ENDPOINTS:
            raise RefusedError(f"{len(endpoints)} endpoints, at most {MAX_ENDPOINTS} are allowed")
        try:
            self.host.know(peer_id, [parse_endpoint(text) for text in endpoints])
        except AddressError as error:
            raise RefusedError(str(error)) from None

    def _warn_of_equal_batches(self, record: Record) -> None:
        if record.first_batch and record.first_batch == self.me.first_batch:
            text = (
                "its first batch equals ours: seed the data loader with swarm.data_seed, or both train on the same data"
            )
            self.host.log.add("advice", text, record.peer_id)

    def _status(self, peer_id: str, status: Status) -> None:
        self._learn(peer_id, status.record)

    def tell_figures(self) -> None:
        """Now, not with the next status."""
        self.update(**self.refresh())
        self._tell_everybody()

    def _tell_everybody(self) -> None:
        self.host.tell(self.members, Status(self.me))

    async def _keep_telling(self) -> None:
        while True:
            await self.host.clock.sleep(news_seconds(len(self.members)))
            self.tell_figures()

    # -- losing and finding again

    def _lost(self, peer_id: str, reason: str, polite: bool) -> None:
        record = self.members.pop(peer_id, None)
        if reason == PARTED:
            return
        self.directory.forget(peer_id)
        if record is None:
            return
        self.host.log.add("left" if polite else "lost", reason, peer_id)
        self._changed()
        self._gone[peer_id] = record.born  # the register lists it for a while yet
        if len(self._gone) > MAX_ACQUAINTANCES:
            del self._gone[next(iter(self._gone))]
        if not polite:
            self._redial(peer_id, record.endpoints, REDIAL_SECONDS)

    def is_only_listed(self, record: Record) -> bool:
        """Whether this peer may live though there is no link to it.

        Not where a link is being tried, nor where it has left or was lost in this life, nor where it could not be
        reached: whoever lives writes to the register again (`has_written`).
        """
        who = record.peer_id
        is_here = who == self.me.peer_id or who in self.members or who in self._redialling
        return not is_here and record.born > self._gone.get(who, 0.0) and who not in self._unreached

    def seek(self, records: list[Record]) -> None:
        """Dial some of these, once each, where there is room for links."""
        for record in self._chosen(records):
            self._redial(record.peer_id, record.endpoints, REDIAL_SECONDS[:1])

    def has_written(self, peer_id: str) -> None:
        """There is something newer of this peer's in the register: it lives, and may be dialled again."""
        self._unreached.pop(peer_id, None)

    def not_reached(self, peer_id: str) -> None:
        """This peer did not answer."""
        self._unreached[peer_id] = None
        if len(self._unreached) > MAX_ACQUAINTANCES:
            del self._unreached[next(iter(self._unreached))]

    def _redial(self, peer_id: str, endpoints: list[str], pauses: tuple[float, ...]) -> None:
        if peer_id not in self._redialling and len(self._redialling) < MAX_SOUGHT:
            self._redialling[peer_id] = None
            self.host.spawn(self._find_again(peer_id, endpoints, pauses), f"find {peer_id[:6]}")

    async def _find_again(self, peer_id: str, endpoints: list[str], pauses: tuple[float, ...]) -> None:
        """Dial until it answers. Where another answers that nobody knows yet, it restarted there under a new id."""
        attempt = 0
        try:
            places = [parse_endpoint(text) for text in endpoints[:MAX_ENDPOINTS]]
            while peer_id not in self.members and (attempt == 0 or len(pauses) > 1):
                await self.host.clock.sleep(pauses[min(attempt, len(pauses) - 1)])
                attempt += 1
                try:
                    await self.meet(places, peer_id)
                except RefusedError as error:
                    taken = {place for record in self.members.values() for place in record.endpoints}
                    if error.code == "identity" and not taken & set(endpoints):
                        await self.meet(places, None)
                    if len(places) == 1 and error.code == "identity":
                        return
                except RemoteError:
                    continue
        except RemoteError:
            return  # the stranger at its place did not let us in
        except ShoalError as error:
            self.host.log.add("refused", str(error), peer_id)
        finally:
            self._redialling.pop(peer_id, None)
            if len(pauses) == 1 and peer_id not in self.members:
                self.not_reached(peer_id)

    # -- the charter

    def standing(self) -> Standing:
        """What our run weighs against another of its name and secret."""
        assert self.charter is not None
        return Standing(self.me.progress, self.charter.founded_at, self.charter.charter_id)

    def _reconcile(self, theirs: Charter | None, record: Record) -> None:
        """Take over the charter of the run that stays; a completed charter replaces the incomplete one."""
        if theirs is None:
            return
        if self.charter is None:
            check_strategy(theirs, self.strategy)
            self.charter = theirs
        elif theirs.charter_id == self.charter.charter_id:
            if theirs.complete and not self.charter.complete:
                self.charter = theirs
        elif not stays(self.standing(), Standing(record.progress, theirs.founded_at, theirs.charter_id)):
            text = f"its run of this name has {record.progress} steps of training, ours {self.me.progress}: ours yields"
            self.host.log.add("yielded", text, record.peer_id)
            self.charter = theirs
            self.update(state=JOINED, progress=0)
            self.on_yield()

    async def _claim(self, peer_id: str, claim: Claim) -> Message:
        charter = self.charter
        if charter is None:
            raise RefusedError("this peer has no charter yet")
        if charter.registrar == self.me.peer_id and self.me.role == SEED:
            founder_is_here = charter.founder in self.members and charter.founder != peer_id
            if not charter.complete or not (founder_is_here or self.others(TRAINING)):
                if charter.complete:  # nobody is left who trained: a new run, so that the old one wins if it comes back
                    charter = self._new_charter(charter.run)
                self.charter = charter = charter.completed(peer_id, claim.strategy, claim.schema)
                self.host.log.add("joined", "founds the run", peer_id)
                return Claimed(charter, granted=True)
        return Claimed(charter, granted=False)

    async def settle(self, strategy: Options | None, default: Options, schema: Schema) -> bool | None:
        """One attempt to take part with a model: True as founder, False as newcomer, None when the founder is awaited.

        Raises CharterMismatch or ModelMismatch; the others are told why.
        """
        assert self.charter is not None
        if not self.charter.complete:
            if self.charter.registrar == self.me.peer_id:
                self.charter = self.charter.completed(self.me.peer_id, strategy or default, schema)
                self._founded = self.charter.charter_id
            else:
                await self._ask_for_charter(Claim(strategy or default, schema))
        elif self.charter.founder not in self.with_me() and not self.others(TRAINING):
            await self._ask_for_charter(Claim(strategy or default, schema))
        if not self.charter.complete:
            return None
        try:
            check_strategy(self.charter, strategy)
            check_schema(self.charter, schema)
        except ShoalError as error:
            self.host.tell(self.members, Complaint(str(error)))
            raise
        return self._founded == self.charter.charter_id

    def found(self, run: str) -> None:
        """Found a run: its charter is completed by the first model that is attached here."""
        self.charter = self._new_charter(run)

    def found_again(self) -> None:
        """Go on as a run of its own: the one that this peer yielded to is gone before it gave its state."""
        assert self.charter is not None
        new = self._new_charter(self.charter.run)
        self.charter = msgspec.structs.replace(
            self.charter, charter_id=new.charter_id, registrar=self.me.peer_id, founder=self.me.peer_id
        )
        self._founded = self.charter.charter_id

    def _new_charter(self, run: str) -> Charter:
        charter_id = self.host.random.randbytes(16).hex()
        return Charter(run, charter_id, self.me.peer_id, self.host.clock.wall(), strategy=self.strategy)

    async def _ask_for_charter(self, claim: Claim) -> None:
        assert self.charter is not None
        first = self.charter.registrar
        for peer_id in sorted(self.members, key=lambda peer_id: (peer_id != first, peer_id)):
            try:
                told = await self.host.call(peer_id, claim, Claimed, timeout_seconds=CALL_SECONDS)
            except RemoteError:
                continue
            if told.granted or (told.charter.charter_id == self.charter.charter_id and told.charter.complete):
                self.charter = told.charter
                self._founded = told.charter.charter_id if told.granted else ""
                return

    def _complaint(self, peer_id: str, complaint: Complaint) -> None:
        self.host.log.add("refused", f"it could not take part: {complaint.reason[:300]}", peer_id)

    def _changed(self) -> None:
        for notice in self.on_change:
            notice()
