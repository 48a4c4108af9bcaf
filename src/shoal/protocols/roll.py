"""The roll: one agreed list of who takes part in an averaging (design, section 5).

Averagings are numbered per series ("train": of parameters, "step": of gradients, "call": of swarm.average). For number
n the live member nearest to hash(run, series, n) is the collector: it invites the others, gathers `Here` from the
callers, closes when all that it expects have called or the deadline passed, and returns one record to all.

    caller                            collector                       the others
      Here(n, weight, shapes)   ->      open, Invite(n)       ->        each: due; Here(n) from the next safe point
                                <-      Roll(members, weights, ...)  ->

When a collector dies, its callers go to the next-nearest with the same number. Where it died while it handed the roll
out, those who have it tell it to the next-nearest, and that one to all who are in it. A higher number always wins:
whoever waits in an older roll and hears of a newer one moves on to it. Where views of who is there differ, two may
collect the same number: everybody moves to the nearer of those who invite.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from shoal.core.errors import CallTimeout, NobodyThere, PeerLost, ProtocolError, RefusedError, RemoteError, RoundError
from shoal.net.envelope import Message
from shoal.net.host import PARTED, Host
from shoal.overlay.member_record import TRAINING, Record
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.planning.collector import believable, collector_of, roll_deadline_seconds
from shoal.protocols.open_roll import OpenRoll, asking_to_wait
from shoal.protocols.roll_passing import ELSEWHERE, RollPassing
from shoal.protocols.roll_record import (
    CALL,
    SERIES,
    STEP,
    TRAIN,
    Here,
    Invite,
    Invited,
    Roll,
    Stand,
    check_here,
    close_roll,
    makes_sense,
    number_in,
    outcome_of,
)
from shoal.tensors.flat import Shapes

MOVED, NEARER, CUT_OFF = "moved", "nearer", "cut off"
"""Codes of refusals: that number is over; another one collects it, or a newer; who called is alone by now."""
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.05, 0.8  # after the first refusal, and after many
MAX_DIALS, INVITE_SECONDS = 64, 2.0


class RollBook:
    """Both sides of the rolls at one peer. `newest[series]` is the highest number that is over, as far as it knows."""

    def __init__(self, host: Host, members: Membership, register: Register) -> None:
        self._host, self._members, self._register = host, members, register
        self.newest: dict[str, int] = {}
        self.in_averaging = False  # of parameters
        self._tried: dict[str, int] = {}
        self._invited: dict[str, tuple[int, str]] = {}
        self._open: dict[tuple[str, int], OpenRoll] = {}
        self._closed: dict[str, int] = {}
        self._dialling = asyncio.Semaphore(MAX_DIALS)
        self._rolls: dict[str, Roll] = {}
        self._passing = RollPassing(host, self._held, lambda: self._asked.wait())  # noqa: PLW0108  a new one each time
        self._asking: dict[str, tuple[int, str]] = {}
        self._asked = asyncio.Event()
        self.on_invite: list[Callable[[], None]] = []
        host.serve(Here, self._here)
        host.serve(Invite, self._take_invitation)
        host.on_lost.append(self._lost)
        members.on_rolls.append(self._hear_rolls)
        members.on_change.append(self._members_changed)

    def invited_to(self, series: str) -> bool:
        """Whether an averaging is being collected that this peer has not called for yet."""
        return self._invitation(series)[0] >= self._next(series)

    def collecting(self) -> bool:
        """Whether others wait for a roll that this peer collects."""
        return bool(self._open)

    def _next(self, series: str) -> int:
        return 1 + max(self.newest.get(series, 0), self._tried.get(series, 0))

    def _invitation(self, series: str) -> tuple[int, str]:
        """The newest number that is being collected, and the nearest of its collectors that was heard of."""
        return self._invited.get(series, (0, ""))

    # -- the caller

    async def call(
        self, series: str, weight: float, bandwidth: float | None, shapes: Shapes, timeout_seconds: float,
        stand: Stand | None = None,
    ) -> Roll:  # fmt: skip
        """Take part in the next averaging of a series and get its roll.

        Raises NobodyThere, TensorError (our shapes are not the others'), OutOfStep (nor is our `stand` theirs), or
        RoundError when the collector was lost.
        """
        until = self._host.clock.now() + timeout_seconds
        number, lost, asked, pause = 0, 0, 0, RETRY_SECONDS
        while True:
            candidates = self._candidates(series, asked)
            asked = number = self._tried[series] = number or max(self._next(series), self._invitation(series)[0])
            collector = self._collector(series, number, candidates)
            left = max(0.1, until - self._host.clock.now())
            here = Here(series, number, weight, bandwidth, shapes, left / 2, stand, tuple(self._members.me.endpoints))
            try:
                roll = await self._ask(collector, here, left)
            except PeerLost:
                lost = number
                if self._host.clock.now() < until:  # the next-nearest collects the same averaging
                    await self._host.clock.sleep(RETRY_SECONDS)
                    continue
                failure: Exception = RoundError(f"collector {collector[:8]} was lost", number)
            except (CallTimeout, TimeoutError):
                failure = RoundError(f"collector {collector[:8]} did not close the roll in time", number)
            except RefusedError as error:
                if error.code in (MOVED, NEARER) and self._host.clock.now() < until:
                    await self._follow(error.reason, series, number, collector)
                    number = self._moved_on(error, series, number, lost)
                    await self._host.clock.sleep(0 if number == 0 else pause)
                    pause = min(2 * pause, LONGEST_RETRY_SECONDS)
                    continue
                failure = outcome_of(error, collector, number)
            except ProtocolError as error:
                failure = RoundError(f"collector {collector[:8]}: {error}", number)
            else:
                if makes_sense(roll, self._host.peer_id):
                    self._rolls[series] = roll
                    self._note(series, number)
                    self._register.hear_roll(roll.members, roll.places, training=series != CALL)
                    return roll
                failure = RoundError(f"collector {collector[:8]} sent a roll that makes no sense", number)
            self._note(series, number)
            raise failure

    def _candidates(self, series: str, asked: int) -> dict[str, Record]:
        """Who may collect. `asked`: the number that this caller called for already, 0 for none."""
        candidates = self._participants(series)
        if len(candidates) < 2 and asked:
            raise RoundError("all others were lost", asked)
        if len(candidates) < 2:
            raise NobodyThere("no other peer takes part in averagings now")
        return candidates

    async def _follow(self, told: str, series: str, number: int, collector: str) -> None:
        """A nearer collector that has not heard of this peer invites it by the one that refused."""
        if who := await self._passing.follow(told, lambda who: self._nearest(series, number, (who, collector)) == who):
            self._hear_invitation(series, number, who)

    def _moved_on(self, error: RefusedError, series: str, number: int, lost: int) -> int:
        """The number to call for now: 0 for the next one. Raises RoundError where the others went on without us."""
        over = number_in(error.reason.partition(" ")[0])
        self._note(series, over)
        if self._invitation(series)[0] > number:
            return 0  # a newer averaging is under way
        if lost == number <= over and error.code == MOVED:
            raise RoundError("the others went on without this peer", number) from None
        return 0 if number <= over and lost != number else number  # the same one has a nearer collector

    def _collector(self, series: str, number: int, candidates: Iterable[str]) -> str:
        """The nearest of those we know and of those who said that they collect: views of who is there may differ."""
        invited_number, inviter = self._invitation(series)
        if invited_number == number and self._is_live(inviter):
            candidates = {*candidates, inviter}
        return self._nearest(series, number, candidates)

    def _nearest(self, series: str, number: int, candidates: Iterable[str]) -> str:
        charter = self._members.charter
        return collector_of(charter.charter_id if charter else "", series, number, candidates)

    async def _ask(self, collector: str, here: Here, timeout_seconds: float) -> Roll:
        """The roll that it closes; RefusedError(nearer) on news of a newer number, or of a nearer collector."""
        is_superseded = asyncio.Event()

        def newer() -> None:
            number, _ = self._invitation(here.series)
            if number > here.number or (
                number == here.number and self._collector(here.series, number, (collector,)) != collector
            ):
                is_superseded.set()

        self.on_invite.append(newer)
        newer()
        self._asking[here.series] = here.number, collector
        superseded = asyncio.create_task(is_superseded.wait(), name="hear of a newer roll")
        asking = asyncio.create_task(self._roll_from(collector, here, timeout_seconds), name="ask for the roll")
        try:
            await asyncio.wait((asking, superseded), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise self._moved(here.series, NEARER)
        finally:
            self.on_invite.remove(newer)
            asking.cancel()
            superseded.cancel()
            await asyncio.gather(asking, superseded, return_exceptions=True)
            self._asking.pop(here.series, None)
            self._asked.set()
            self._asked = asyncio.Event()

    async def _roll_from(self, collector: str, here: Here, timeout_seconds: float) -> Roll:
        if collector == self._host.peer_id:
            async with asyncio.timeout(timeout_seconds):
                return await self._collect(self._host.peer_id, here)
        await self._register.reach(collector)
        try:
            return await self._host.call(collector, here, Roll, timeout_seconds=timeout_seconds)
        except RefusedError as error:
            if error.code != ELSEWHERE:
                raise
            taken = await self._passing.take(error.reason, here.series, here.number)
        return taken or await self._host.call(collector, here, Roll, timeout_seconds=timeout_seconds)

    # -- the collector

    async def _here(self, peer_id: str, here: Here) -> Message:
        return await self._collect(peer_id, here)

    async def _collect(self, caller: str, here: Here) -> Roll:
        key = here.series, here.number
        check_here(here)
        if (held := self._held(*key)) and caller in held.members:
            return held
        is_over = here.number <= self._closed.get(here.series, 0)
        if is_over or here.series not in SERIES or not believable(here.number, self._host.clock.wall()):
            raise self._moved(here.series)
        if self._collector(*key, (self._host.peer_id,)) != self._host.peer_id:
            raise self._moved(here.series, NEARER)  # its invitation is on the way to the caller
        roll = self._open.get(key)
        if roll is None:
            roll = self._open[key] = OpenRoll(self._host.clock.now())
            self._host.spawn(self._run(key, roll, here.patience_seconds), f"roll {here.series} {here.number}")
        roll.callers[caller] = here
        roll.changed.set()
        try:
            outcome = (await asyncio.shield(roll.closed)).get(caller)
        except asyncio.CancelledError:
            roll.callers.pop(caller, None)  # it moved on to a newer averaging
            raise
        if isinstance(outcome, Roll):
            self._passing.check(outcome, caller)
            return outcome
        raise outcome or self._moved(here.series, NEARER if roll.superseded else MOVED)

    def _moved(self, series: str, code: str = MOVED) -> RefusedError:
        nearer = self._passing.nearer(self._invitation(series)[1]) if code == NEARER else ""
        return RefusedError(str(self.newest.get(series, 0)) + nearer, code)

    async def _run(self, key: tuple[str, int], roll: OpenRoll, patience_seconds: float) -> None:
        """Invite, gather until all are here or the deadline passed, close."""
        series, number = key
        self._hear_invitation(series, number, self._host.peer_id)
        if series == TRAIN and self.in_averaging:
            roll.busy[self._host.peer_id] = None
        self._invite_all(series, number, roll)
        if series != STEP:
            self._host.spawn(roll.look(self._register.look_for_newcomers), "look for newcomers")
        deadline_seconds = patience_seconds
        if series != CALL:
            step_seconds = [record.step_seconds for record in self._participants(series).values()]
            behind_seconds = [record.behind_seconds for record in asking_to_wait(self._register, series)]
            deadline_seconds = roll_deadline_seconds(step_seconds + behind_seconds)
        try:
            async with asyncio.timeout(None) as limit:
                while not (roll.superseded or roll.found or self._all_called(series, number, roll)):
                    limit.reschedule(roll.closes_at(deadline_seconds, patience_seconds))
                    roll.changed.clear()
                    await roll.changed.wait()
                    self._invite_all(series, number, roll)
        except TimeoutError:
            pass  # those who called are the roll
        finally:
            del self._open[key]
        if roll.superseded:
            roll.closed.set_result({})
            return
        went_on = bool(roll.lost) or self.newest.get(series, 0) >= number
        self._closed[series] = max(number, self._closed.get(series, 0))
        self._note(series, number)
        if roll.found:
            self._rolls[series] = roll.found
            roll.closed.set_result(dict.fromkeys(roll.found.members, roll.found))
            return
        callers = {peer_id: here for peer_id, here in roll.callers.items() if self._is_live(peer_id)}
        if went_on and len(callers) == 1:
            roll.closed.set_result(dict.fromkeys(callers, RefusedError("all others were lost, or went on", CUT_OFF)))
            return
        roll.closed.set_result(close_roll(self._host.random.randbytes(16).hex(), series, number, callers))

    def _lost(self, who: str, reason: str, polite: bool) -> None:
        """Its call is gone with its link; if it lives it calls again."""
        if reason == PARTED:
            return
        for roll in self._open.values():
            roll.lost[who] = None
            roll.callers.pop(who, None)
            roll.changed.set()

    def _invite_all(self, series: str, number: int, roll: OpenRoll) -> None:
        """Once each, also those who begin to train meanwhile. Who is invited is waited for until it answers."""
        for peer_id in self._participants(series):
            if peer_id != self._host.peer_id and peer_id not in roll.invited:
                roll.invited[peer_id] = roll.unanswered[peer_id] = None
                self._host.spawn(self._invite(peer_id, Invite(series, number), roll), "invite")

    async def _invite(self, peer_id: str, invite: Invite, roll: OpenRoll) -> None:
        try:
            if not self._host.linked(peer_id):
                roll.dialled[peer_id] = None
                async with self._dialling:
                    await self._register.reach(peer_id)
            told = await self._host.call(peer_id, invite, Invited, timeout_seconds=INVITE_SECONDS)
        except RemoteError:
            told = Invited()  # it calls, or it does not
        if peer_id in roll.dialled:
            del roll.dialled[peer_id]
            roll.reached_at = self._host.clock.now()
        if told.busy:
            roll.busy[peer_id] = None
        found = told.roll
        if found and (found.series, found.number) == (invite.series, invite.number) and makes_sense(found, peer_id):
            roll.found = found
        roll.unanswered.pop(peer_id, None)
        roll.changed.set()

    def _all_called(self, series: str, number: int, roll: OpenRoll) -> bool:
        """Whether nobody is waited for: neither to call, nor to say whether it has the roll already."""
        awaited = self._awaited(series, number)
        if series == STEP:
            awaited -= roll.far_behind(self._participants(STEP))
            awaited |= {record.peer_id for record in asking_to_wait(self._register, series)}
        return not roll.is_looking and awaited | roll.unanswered.keys() <= roll.callers.keys()

    # -- both

    def _held(self, series: str, number: int) -> Roll | None:
        """The record of this very number, where this peer got it."""
        roll = self._rolls.get(series)
        return roll if roll and roll.number == number else None

    def _participants(self, series: str) -> dict[str, Record]:
        return self._register.everybody(None if series == CALL else TRAINING)

    def _awaited(self, series: str, number: int) -> set[str]:
        """Whoever may still call for this number: those who have it behind them will not."""
        mine = self._host.peer_id
        return {
            peer_id
            for peer_id, record in self._participants(series).items()
            if (self.newest if peer_id == mine else record.rolls).get(series, 0) < number
        }

    def _is_live(self, peer_id: str) -> bool:
        return peer_id == self._host.peer_id or self._host.linked(peer_id)

    async def _take_invitation(self, peer_id: str, invite: Invite) -> Message:
        series, number = invite.series, invite.number
        if series not in SERIES or not believable(number, self._host.clock.wall()):
            return Invited()
        self._hear_invitation(series, number, peer_id)
        while self._asks_another(series, number, peer_id):
            await self._asked.wait()  # its roll may be on the way
        return Invited(self._held(series, number), busy=series == TRAIN and self.in_averaging)

    def _asks_another(self, series: str, number: int, inviter: str) -> bool:
        """Whether this peer has called for the number at a third one, which the inviter may have seen die."""
        asked_number, collector = self._asking.get(series, (0, ""))
        return asked_number == number and collector not in (inviter, self._host.peer_id)

    def _hear_invitation(self, series: str, number: int, inviter: str) -> None:
        known, _ = self._invitation(series)
        if number < known or (number == known and self._collector(series, number, (inviter,)) != inviter):
            return
        self._invited[series] = number, inviter
        for notice in list(self.on_invite):
            notice()
        for (other, older), roll in self._open.items():
            if other == series and (older < number or (older == number and inviter != self._host.peer_id)):
                roll.superseded = True
                roll.changed.set()

    def _note(self, series: str, number: int) -> None:
        if self.newest.get(series, 0) < number and believable(number, self._host.clock.wall()):
            self.newest[series] = number
            self._members.update(rolls=dict(self.newest))

    def _hear_rolls(self, rolls: dict[str, int]) -> None:
        for series in SERIES:
            self._note(series, rolls.get(series, 0))

    def _members_changed(self) -> None:
        for roll in self._open.values():
            roll.changed.set()
