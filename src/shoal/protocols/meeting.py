"""Matchmaking by meeting point, for plain Moshpit All-Reduce: no roll of everybody, no leader that is elected.

Everybody who has the same group key asks the same member, the one nearest to the key's hash. It lets them wait until
the window after the first is over, splits them evenly, in random order, where they are more than a group may have, and
returns one record to all. So there are no cycles of peers that wait for each other, no clocks that must agree, and
nobody is sent away because a group is full.

Averagings are numbered. Whoever begins one tells its neighbours, who pass it on: all begin it about together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.core.errors import CallTimeout, NobodyThere, PeerLost, ProtocolError, RefusedError, RoundError
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.overlay.member_record import TRAINING
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.planning.collector import believable, collector_of
from shoal.planning.keys import Key, split_crowd
from shoal.protocols.roll_record import (
    PLAIN,
    Here,
    Roll,
    check_here,
    close_roll,
    makes_sense,
    outcome_of,
)

ANSWER_SECONDS = 3.0
"""How much longer than the window a caller waits for the record."""
MAX_GROUP, MAX_KEY, LONGEST_WINDOW_SECONDS = 1024, 200, 60.0
RETRY_SECONDS = 0.05


class Meet(Message, frozen=True):
    """I look for a group with this key, of at most `most` members; I wait `here.patience_seconds` for others."""

    key: str
    most: int
    here: Here


class Start(Message, frozen=True):
    """Averaging `number` begins."""

    number: int


@dataclass
class _Gathering:
    most: int
    callers: dict[str, Here] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Future[dict[str, Roll | RefusedError]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Meetings:
    """Both sides of the meetings at one peer, and where it is in the chain of keys.

    `number` is the averaging that it began last, `heard` the newest that anybody began.
    """

    def __init__(self, host: Host, members: Membership, register: Register) -> None:
        self._host, self._members, self._register = host, members, register
        self._gatherings: dict[str, _Gathering] = {}
        self.number = self.heard = 0
        self.key: Key | None = None
        self.on_start: list[Callable[[], None]] = []
        host.serve(Meet, self._serve)
        host.hear(Start, self._hear)

    @property
    def invited(self) -> bool:
        """Whether others have begun an averaging that this peer has not."""
        return self.heard > self.number

    def begin(self) -> int:
        """Begin the next averaging, or the one that others began; returns its number."""
        self.number = self.heard = max(self.number + 1, self.heard)
        self._host.tell(self._members.others(TRAINING), Start(self.number))
        return self.number

    def _hear(self, peer_id: str, start: Start) -> None:
        charter = self._members.charter
        meets = charter is None or bool((charter.strategy or {}).get("plain_rounds"))  # else nobody would answer to it
        if meets and self.heard < start.number and believable(start.number, self._host.clock.wall()):
            self.heard = start.number
            for notice in self.on_start:
                notice()

    async def meet(self, key: str, most: int, here: Here, timeout_seconds: float) -> Roll:
        """The group of those who meet at this key now. Raises NobodyThere or RoundError."""
        meet = Meet(key, most, here)
        until = self._host.clock.now() + min(timeout_seconds, here.patience_seconds + ANSWER_SECONDS)
        while True:
            candidates = self._register.everybody(TRAINING)
            if len(candidates) < 2:
                raise NobodyThere("no other peer takes part in averagings now")
            charter = self._members.charter
            point = collector_of(charter.charter_id if charter else "", f"meeting {key}", 0, candidates)
            limit = max(0.0, until - self._host.clock.now())
            try:
                async with asyncio.timeout(limit):
                    if point == self._host.peer_id:
                        roll = await self._gather(point, meet)
                    else:
                        await self._register.reach(point)
                        roll = await self._host.call(point, meet, Roll, timeout_seconds=limit)
            except PeerLost:
                if limit == 0.0:
                    raise RoundError(f"the meeting point {point[:8]} was lost", here.number) from None
                await self._host.clock.sleep(RETRY_SECONDS)
                continue  # the next-nearest is the meeting point now
            except (TimeoutError, CallTimeout):
                raise RoundError(f"the meeting point {point[:8]} did not answer in time", here.number) from None
            except RefusedError as error:
                raise outcome_of(error, point, here.number) from None
            except ProtocolError as error:
                raise RoundError(f"meeting point {point[:8]}: {error}", here.number) from None
            if makes_sense(roll, self._host.peer_id) and len(roll.members) <= most and roll.number == here.number:
                self._register.hear_roll(roll.members, roll.places, training=True)
                return roll
            raise RoundError(f"meeting point {point[:8]} sent a group that makes no sense", here.number)

    # -- the meeting point

    async def _serve(self, peer_id: str, meet: Meet) -> Message:
        return await self._gather(peer_id, meet)

    async def _gather(self, caller: str, meet: Meet) -> Roll:
        check_here(meet.here)
        if not 2 <= meet.most <= MAX_GROUP or len(meet.key) > MAX_KEY or meet.here.series != PLAIN:
            raise ProtocolError(f"a meeting of {meet.most} at {meet.key[:MAX_KEY]!r}")
        gathering = self._gatherings.get(meet.key)
        if gathering is None:
            gathering = self._gatherings[meet.key] = _Gathering(meet.most)
            window_seconds = min(meet.here.patience_seconds, LONGEST_WINDOW_SECONDS)
            self._host.spawn(self._close(meet.key, gathering, window_seconds, meet.here.number), "meeting")
        gathering.callers[caller] = meet.here
        gathering.changed.set()
        try:
            outcome = (await asyncio.shield(gathering.closed)).get(caller)
        except asyncio.CancelledError:
            gathering.callers.pop(caller, None)
            raise
        if isinstance(outcome, Roll):
            return outcome
        raise outcome or RefusedError("the group closed without this peer")

    async def _close(self, key: str, gathering: _Gathering, window_seconds: float, number: int) -> None:
        """When the window is over, or everybody is here: as many groups as needed, of nearly equal size."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(window_seconds):
                while not self._register.everybody(TRAINING).keys() <= gathering.callers.keys():
                    gathering.changed.clear()
                    await gathering.changed.wait()
        del self._gatherings[key]
        callers = sorted(gathering.callers)
        self._host.random.shuffle(callers)
        outcome: dict[str, Roll | RefusedError] = {}
        for group in split_crowd(callers, gathering.most):
            group_id = self._host.random.randbytes(16).hex()
            members = {peer_id: gathering.callers[peer_id] for peer_id in group}
            outcome |= close_roll(group_id, PLAIN, number, members)
        gathering.closed.set_result(outcome)
