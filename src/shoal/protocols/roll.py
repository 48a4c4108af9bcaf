"""The roll: one agreed list of who takes part in an averaging (design, section 5).

Averagings are numbered per series ("train" for the strategy's, "call" for swarm.average). For number n the live member
nearest to hash(run, series, n) is the collector: it invites the others, gathers `Here` from the callers, closes when
all that it expects have called or the deadline passed, and returns one record to all.

    caller                            collector                       the others
      Here(n, weight, shapes)   ->      open, Invite(n)       ->        each: due; Here(n) from the next safe point
                                <-      Roll(members, weights, ...)  ->

When a collector dies, its callers go to the next-nearest with the same number; if some had their roll already, two
rolls exist, each exact over those who take part in it. A higher number always wins: whoever waits in an older roll
and hears of a newer one moves on to it. Where views of who is there differ, two may collect the same number: everybody
moves to the nearer of those who invite.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.core.errors import CallTimeout, NobodyThere, PeerLost, ProtocolError, RefusedError, RoundError
from shoal.net.envelope import Done, Message
from shoal.net.host import Host
from shoal.overlay.membership import TRAINING, Membership, Record
from shoal.planning.collector import collector_of, roll_deadline_seconds
from shoal.protocols.roll_record import (
    CALL,
    MAX_NUMBER,
    TRAIN,
    Here,
    Invite,
    Roll,
    check_here,
    close_roll,
    learn_places,
    makes_sense,
    number_in,
    outcome_of,
)
from shoal.tensors.flat import Shapes

MOVED = "moved"
RETRY_SECONDS = 0.05


@dataclass
class _OpenRoll:
    callers: dict[str, Here] = field(default_factory=dict)
    superseded: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Future[dict[str, Roll | RefusedError]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RollBook:
    """Both sides of the rolls at one peer. `newest[series]` is the highest number that is over, as far as it knows."""

    def __init__(self, host: Host, members: Membership) -> None:
        self._host, self._members = host, members
        self.newest: dict[str, int] = {}
        self._tried: dict[str, int] = {}
        self._invited: dict[str, tuple[int, str]] = {}
        self._open: dict[tuple[str, int], _OpenRoll] = {}
        self._closed: dict[str, int] = {}
        self.on_invite: list[Callable[[], None]] = []
        host.serve(Here, self._here)
        host.serve(Invite, self._take_invitation)
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
        self, series: str, weight: float, bandwidth: float | None, shapes: Shapes, timeout_seconds: float
    ) -> Roll:
        """Take part in the next averaging of a series and get its roll.

        Raises NobodyThere, TensorError (our shapes are not the others'), or RoundError when the collector was lost.
        """
        until = self._host.clock.now() + timeout_seconds
        number = 0
        while True:
            candidates = self._participants(series)
            if len(candidates) < 2:
                raise NobodyThere("no other peer takes part in averagings now")
            number = self._tried[series] = number or max(self._next(series), self._invitation(series)[0])
            collector = self._collector(series, number, candidates)
            left = max(0.1, until - self._host.clock.now())
            here = Here(series, number, weight, bandwidth, shapes, left / 2)
            try:
                roll = await self._ask(collector, here, left)
            except PeerLost:
                if self._host.clock.now() < until:  # the next-nearest collects the same averaging
                    await self._host.clock.sleep(RETRY_SECONDS)
                    continue
                failure: Exception = RoundError(f"collector {collector[:8]} was lost", number)
            except (CallTimeout, TimeoutError):
                failure = RoundError(f"collector {collector[:8]} did not close the roll in time", number)
            except RefusedError as error:
                if error.code == MOVED and self._host.clock.now() < until:
                    over = number_in(error.reason)
                    self._note(series, over)
                    if over >= number or self._invitation(series)[0] > number:
                        number = 0  # a newer averaging is under way; else the same one has a nearer collector
                    await self._host.clock.sleep(0 if number == 0 else RETRY_SECONDS)
                    continue
                failure = outcome_of(error, collector, number)
            except ProtocolError as error:
                failure = RoundError(f"collector {collector[:8]}: {error}", number)
            else:
                if makes_sense(roll, self._host.peer_id):
                    self._note(series, number)
                    learn_places(self._host, roll)
                    return roll
                failure = RoundError(f"collector {collector[:8]} sent a roll that makes no sense", number)
            self._note(series, number)
            raise failure

    def _collector(self, series: str, number: int, candidates: Iterable[str]) -> str:
        """The nearest of those we know and of those who said that they collect: views of who is there may differ."""
        invited_number, inviter = self._invitation(series)
        if invited_number == number and self._is_live(inviter):
            candidates = {*candidates, inviter}
        return collector_of(self._key, series, number, candidates)

    async def _ask(self, collector: str, here: Here, timeout_seconds: float) -> Roll:
        """The roll that it closes; RefusedError(moved) on news of a newer number, or of a nearer collector."""
        is_superseded = asyncio.Event()

        def newer() -> None:
            number, _ = self._invitation(here.series)
            if number > here.number or (
                number == here.number and self._collector(here.series, number, (collector,)) != collector
            ):
                is_superseded.set()

        self.on_invite.append(newer)
        newer()
        superseded = asyncio.create_task(is_superseded.wait(), name="hear of a newer roll")
        asking = asyncio.create_task(self._roll_from(collector, here, timeout_seconds), name="ask for the roll")
        try:
            await asyncio.wait((asking, superseded), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise self._moved(here.series)
        finally:
            self.on_invite.remove(newer)
            asking.cancel()
            superseded.cancel()
            await asyncio.gather(asking, superseded, return_exceptions=True)

    async def _roll_from(self, collector: str, here: Here, timeout_seconds: float) -> Roll:
        if collector == self._host.peer_id:
            async with asyncio.timeout(timeout_seconds):
                return await self._collect(self._host.peer_id, here)
        return await self._host.call(collector, here, Roll, timeout_seconds=timeout_seconds)

    # -- the collector

    async def _here(self, peer_id: str, here: Here) -> Message:
        return await self._collect(peer_id, here)

    async def _collect(self, caller: str, here: Here) -> Roll:
        key = here.series, here.number
        check_here(here)
        if here.number <= self._closed.get(here.series, 0) or here.series not in (TRAIN, CALL):
            raise self._moved(here.series)
        if self._collector(*key, (self._host.peer_id,)) != self._host.peer_id:
            raise self._moved(here.series)  # a nearer one collects it: its invitation is on the way to the caller
        roll = self._open.get(key)
        if roll is None:
            roll = self._open[key] = _OpenRoll()
            self._host.spawn(self._run(key, roll, here.patience_seconds), f"roll {here.series} {here.number}")
        roll.callers[caller] = here
        roll.changed.set()
        try:
            outcome = (await asyncio.shield(roll.closed)).get(caller)
        except asyncio.CancelledError:
            roll.callers.pop(caller, None)  # it moved on to a newer averaging
            raise
        if isinstance(outcome, Roll):
            return outcome
        raise outcome or self._moved(here.series)

    def _moved(self, series: str) -> RefusedError:
        return RefusedError(str(self.newest.get(series, 0)), MOVED)

    async def _run(self, key: tuple[str, int], roll: _OpenRoll, patience_seconds: float) -> None:
        """Invite, gather until all are here or the deadline passed, close."""
        series, number = key
        invited: dict[str, None] = {}
        self._hear_invitation(series, number, self._host.peer_id)
        if series == TRAIN:
            steps = [record.step_seconds for record in self._participants(series).values()]
            patience_seconds = min(patience_seconds, roll_deadline_seconds(steps))
        try:
            async with asyncio.timeout(patience_seconds):
                while not (roll.superseded or self._awaited(series, number) <= roll.callers.keys()):
                    for peer_id in self._participants(series):  # who begins to train meanwhile, too
                        if peer_id not in invited:
                            self._host.tell(peer_id, Invite(series, number))
                            invited[peer_id] = None
                    roll.changed.clear()
                    await roll.changed.wait()
        except TimeoutError:
            pass  # those who called are the roll
        finally:
            del self._open[key]
        if roll.superseded:
            roll.closed.set_result({})
            return
        self._closed[series] = max(number, self._closed.get(series, 0))
        self._note(series, number)
        callers = {peer_id: here for peer_id, here in roll.callers.items() if self._is_live(peer_id)}
        roll_id = self._host.random.randbytes(16).hex()
        roll.closed.set_result(close_roll(roll_id, series, number, callers, self._members.places()))

    # -- both

    @property
    def _key(self) -> str:
        charter = self._members.charter
        return charter.charter_id if charter else ""

    def _participants(self, series: str) -> dict[str, Record]:
        return self._members.with_me(TRAINING if series == TRAIN else None)

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
        if invite.series in (TRAIN, CALL) and 0 < invite.number <= MAX_NUMBER:
            self._hear_invitation(invite.series, invite.number, peer_id)
        return Done()

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
        if self.newest.get(series, 0) < number <= MAX_NUMBER:
            self.newest[series] = number
            self._members.update(rolls=dict(self.newest))

    def _members_changed(self) -> None:
        for record in self._members.members.values():
            for series, number in record.rolls.items():
                if series in (TRAIN, CALL):
                    self._note(series, number)
        for roll in self._open.values():
            roll.changed.set()
