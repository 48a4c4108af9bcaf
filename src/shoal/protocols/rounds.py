"""The group rounds at one peer, served to the other members, also after this peer has gone on.

What does not belong to a round that is open here (a message of a closed roll, of another roll with the same number, or
from a stranger to the roll) changes nothing, is refused with the reason, and is counted in `dropped`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable

from shoal.core.errors import ProtocolError, RefusedError, RemoteError
from shoal.core.tasks import root_cause
from shoal.net.envelope import Message
from shoal.net.host import PARTED, Host
from shoal.net.stream import Stream, StreamEnded
from shoal.protocols.agreement import reduce_anew
from shoal.protocols.reducer import BEGIN_SECONDS, Reducer
from shoal.protocols.roll_record import PLAIN
from shoal.protocols.round_record import (
    CLOSED,
    DUPLICATE,
    LEFT_OUT,
    STRANGER,
    AskVersions,
    Begin,
    Ended,
    PartSent,
    Recover,
    VersionsHeld,
    Want,
    Where,
)
from shoal.protocols.round_record import FAILED as ROUND_FAILED
from shoal.protocols.round_state import DIGEST_BYTES, FAILED, SETTLED, Round
from shoal.tensors.memory import Memory

FIND_SECONDS = BEGIN_SECONDS + 1.0
"""A member may come to a round a moment later than those who open streams to it."""
SIGN_SECONDS = 1.0
"""Between signs of life to them, while the round before goes on here."""
LEFT_OUT_HERE = "left out here: "
KEPT_ROUNDS = 2
"""Of each series: this peer's newest rounds, which the others may still ask for."""


class Rounds:
    """The rounds that are open, and the last ones that were."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._rounds: dict[Where, tuple[Round, Reducer]] = {}
        self._newest: dict[str, Where] = {}
        self._first_began: dict[str, tuple[str, float]] = {}  # of each series: its newest roll, and when that began
        self._ended: dict[str, Ended] = {}
        self._opened = asyncio.Event()
        self.on_open: list[Callable[[Round], None]] = []
        self.dropped: Counter[str] = Counter()
        self.memory = Memory(kept=1)  # of results
        host.serve_stream(Begin, self._reduce)
        host.serve_stream(Recover, self._recover)
        host.serve(AskVersions, self._versions)
        host.on_lost.append(self._lost)

    def open(self, round_: Round, reducer: Reducer) -> None:
        """Serve this round from now on; the oldest of its series is forgotten."""
        where = round_.group.where
        earlier = [old for old in self._rounds if old.series == where.series]
        for old in earlier[: max(0, len(earlier) - KEPT_ROUNDS + 1)]:
            self._rounds.pop(old)[0].on_lost.clear()  # or its values would stay until the garbage is collected
        roll_id, began_at = self._first_began.get(where.series, ("", 0.0))
        if roll_id != where.roll_id:
            began_at = round_.started_at
            self._first_began[where.series] = where.roll_id, began_at
        round_.before_seconds = round_.started_at - began_at
        self._rounds[where] = round_, reducer
        self._newest[where.series] = where
        for notice in self.on_open:
            notice(round_)
        self._opened.set()
        self._opened = asyncio.Event()

    def last(self, series: str) -> Ended | None:
        """How this peer's last round of a series that succeeded ended."""
        return self._ended.get(series)

    def ended(self, round_: Round) -> None:
        """This round succeeded here."""
        where = round_.group.where
        content = b"".join(b"%d %s" % version for version in round_.versions())
        self._ended[where.series] = Ended(where, hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest())

    def _lost(self, who: str, reason: str, polite: bool) -> None:
        if reason == PARTED:
            return  # a new link is made when it is needed
        for round_, _ in self._rounds.values():
            round_.lose(who, "it left" if polite else reason, politely=polite)

    async def _find(self, who: str, where: Where, stream: Stream | None = None) -> tuple[Round, Reducer]:
        """The round that a member means; waits where this peer is not yet there: a little, or until the round before
        has ended. Raises RefusedError."""
        until = self.host.clock.now() + FIND_SECONDS
        while where not in self._rounds and not self._is_over(where):
            try:
                async with asyncio.timeout(SIGN_SECONDS):
                    await self._opened.wait()
            except TimeoutError:
                now = self.host.clock.now()
                if self._comes_later(where):
                    until = now + FIND_SECONDS
                    if stream is not None:
                        stream.give_sign_of_life()
                if now >= until:
                    break  # it is not open here
        if where not in self._rounds:
            self.dropped["a message of a roll that is not open here"] += 1
            raise RefusedError("this round is not open here", CLOSED)
        round_, reducer = self._rounds[where]
        if who not in round_.group.members:
            self.dropped["a message of a stranger to the roll"] += 1
            raise RefusedError("a stranger to this round", STRANGER)
        self._check(round_, who)
        return round_, reducer

    def _is_over(self, where: Where) -> bool:
        """Whether this peer is beyond that round, or in another roll instead. In plain mode each round has its own."""
        newest = self._newest.get(where.series)
        if newest is None:
            return False
        there, here = (where.number, where.round_index), (newest.number, newest.round_index)
        same = there == here if where.series == PLAIN else where.number == newest.number
        return there < here or (same and where.roll_id != newest.roll_id)

    def _comes_later(self, where: Where) -> bool:
        """Whether this peer is in an earlier round of the same roll, which may take long: its group lost somebody."""
        newest = self._newest.get(where.series)
        if newest is None or newest.roll_id != where.roll_id or newest.round_index >= where.round_index:
            return False
        return self._rounds[newest][0].ended_at is None

    def _check(self, round_: Round, who: str) -> None:
        if who in round_.lost:
            self.dropped["a message of a member that was left out"] += 1
            reason = round_.lost[who].removeprefix(LEFT_OUT_HERE)  # it may be what another told us about itself
            raise RefusedError(LEFT_OUT_HERE + reason, LEFT_OUT)
        if round_.state == FAILED:
            raise RefusedError("this round failed here", ROUND_FAILED)

    # -- a reducer's side of its streams

    async def _reduce(self, stream: Stream, begin: Begin) -> None:
        round_, reducer = await self._find(stream.peer_id, begin.where, stream)
        ours = self.last(begin.where.series)
        if ours and begin.last and ours.where == begin.last.where and ours.versions != begin.last.versions:
            self.host.log.add("warning", "its last averaging ended with other values than ours", stream.peer_id)
        if stream.peer_id in reducer.begun:
            self.dropped["a second stream of one member"] += 1
            raise RefusedError("this member has a stream in this round already", DUPLICATE)
        reducer.begun[stream.peer_id] = None
        reducer.claim(stream.peer_id, begin.source, begin.mass)
        wholly = False
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._receive(stream, round_, reducer), name="receive parts")
                await self._send(stream, round_, reducer)
            wholly = True
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        finally:
            reducer.served(stream.peer_id, wholly=wholly)

    async def _receive(self, stream: Stream, round_: Round, reducer: Reducer) -> None:
        try:
            while True:
                message, payload = await stream.receive(PartSent)
                reducer.contribute(stream.peer_id, message.index, round_.read_values(message.index, payload))
        except StreamEnded:
            reducer.leave_out(stream.peer_id, "it ended before its last part", reducer.share)
        except RemoteError as error:
            reducer.leave_out(stream.peer_id, str(error), reducer.share)
            raise

    async def _send(self, stream: Stream, round_: Round, reducer: Reducer) -> None:
        for index in reducer.share:
            await self._until_held(round_, index, stream.peer_id)
            await stream.send(*round_.mean_message(index))
            reducer.serving(stream.peer_id)

    async def _until_held(self, round_: Round, index: int, who: str) -> None:
        await round_.until(lambda: round_.held[index] is not None or round_.state == FAILED, round_.owners[index])
        self._check(round_, who)

    # -- what others ask for when somebody was lost

    async def _recover(self, stream: Stream, recover: Recover) -> None:
        round_, reducer = await self._find(stream.peer_id, recover.where)
        try:
            while True:
                want, _ = await stream.receive(Want)
                self._check(round_, stream.peer_id)
                if not 0 <= want.index < len(round_.parts):
                    raise ProtocolError(f"part {want.index} of {len(round_.parts)}")
                if round_.held[want.index] is None and not want.values:
                    owner = round_.owners[want.index]
                    self.host.spawn(reduce_anew(round_, reducer, owner), "take over a share")
                    await self._until_held(round_, want.index, stream.peer_id)
                await stream.send(*round_.given(want.index, values=want.values))
        except StreamEnded:
            return

    async def _versions(self, who: str, ask: AskVersions) -> Message:
        round_, _ = await self._find(who, ask.where)
        await round_.until(lambda: len(round_.lists) >= ask.exchange or round_.state in (SETTLED, FAILED))
        self._check(round_, who)
        listed = round_.lists[ask.exchange - 1] if 0 < ask.exchange <= len(round_.lists) else round_.versions()
        return VersionsHeld(list(listed))
