"""Butterfly all-reduce in one group (Moshpit reference, section 2.3), streamed part by part.

The flat vectors are cut into shares, one for each member, by bandwidth; a share into parts. Member i opens one stream
to each other member k, sends its values of k's share part by part, and receives the means of k's parts on the same one:

    member i                                  reducer k
      Begin(roll)                    ->
      Part(0), values                ->         sums up, weighted
      Part(1), values                ->         once all who live have delivered part 0:
                                     <-       Mean(0, weight), values
      ...                                       ...
                                     <-       Mean(n), values

A member sends 2 s (n-1)/n bytes for a vector of s bytes. A sender that dies, or is late, is left out of the parts that
it has not delivered: the mean of each part is over those who did. A reducer that dies fails the round for now. Nothing
is written anywhere but into a new result, so a failed round leaves every value as it was.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.core.errors import PeerLost, ProtocolError, RefusedError, RemoteError, RoundError
from shoal.core.tasks import contained
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.net.stream import Stream, StreamEnded
from shoal.planning.lateness import predicted_stragglers
from shoal.planning.shares import Part, cut_parts, shares_by_bandwidth
from shoal.protocols.roll_record import Roll
from shoal.tensors.flat import ITEM_BYTES, WIRE_DTYPES, Vectors, as_bytes
from shoal.tensors.mixing import PartMean

WATCH_SECONDS = 0.1
FETCH_SECONDS = 10.0
"""How long a member may take for one part's mean before nobody waits for it: 0.5 MB at 0.4 Mbit/s."""
FAILED = "round failed"
ROLL_WAIT_SECONDS = 5.0
"""A member may hear of the roll a moment later than those who open streams to it."""


class Begin(Message, frozen=True):
    """The stream's first word: which roll it belongs to."""

    roll_id: str


class PartSent(Message, frozen=True):
    """A contributor's values of part `index` of the receiver's share; the payload holds them."""

    index: int


class PartMeanSent(Message, frozen=True):
    """The mean of part `index`, over a total `weight`; without weight there is no payload and values stay."""

    index: int
    weight: float


@dataclass(frozen=True)
class Outcome:
    """What an averaging brought: new vectors, and who is in them."""

    vectors: Vectors
    roll: Roll
    contributed: tuple[str, ...]
    """Members whose values are in every part that this member reduced."""
    exact: bool
    """Every part's weight is the roll's total weight: nobody is missing anywhere."""


@dataclass
class _Reduction:
    """One part on its way: who still has to deliver it, and the sum so far."""

    waiting: dict[str, None]
    mean: PartMean | None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    weight: float = 0.0


class Reducer:
    """What one member reduces in one round: its own share."""

    def __init__(self, host: Host, roll: Roll, parts: list[Part], out: Vectors) -> None:
        self._host, self.parts, self._out = host, parts, out
        self._weights = dict(zip(roll.members, roll.weights, strict=True))
        contributors = [peer_id for peer_id, weight in self._weights.items() if weight > 0]
        self.reductions = [_Reduction(dict.fromkeys(contributors), PartMean(part.stop - part.start)) for part in parts]
        self.delivered = dict.fromkeys(contributors, 0)
        self.left_out: dict[str, str] = {}
        self.unserved = {peer_id: math.inf for peer_id in roll.members if peer_id != host.peer_id}
        self.failure = ""
        self._progressed = asyncio.Event()
        for index in range(len(parts)):
            self._finish_if_whole(index)

    def contribute(self, sender: str, index: int, values: Tensor) -> None:
        """Add a sender's values of one part. What came too late, twice, or from nobody in the roll changes nothing."""
        if not 0 <= index < len(self.parts):
            raise ProtocolError(f"part {index} of {len(self.parts)}")
        reduction = self.reductions[index]
        if sender not in reduction.waiting or reduction.mean is None:
            return
        if len(values) != self.parts[index].stop - self.parts[index].start:
            raise ProtocolError(f"part {index} has {len(values)} values")
        if not reduction.mean.add(values, self._weights[sender]):
            self.leave_out(sender, "its values are not finite")
            return
        del reduction.waiting[sender]
        self.delivered[sender] += 1
        self._finish_if_whole(index)

    def leave_out(self, sender: str, reason: str) -> None:
        """Go on without the parts that this sender has not delivered."""
        if sender in self.left_out or self.delivered.get(sender, len(self.parts)) == len(self.parts):
            return
        self.left_out[sender] = reason
        self._host.log.add("late" if reason.startswith("late") else "warning", f"left out: {reason}", sender)
        for index, reduction in enumerate(self.reductions):
            if reduction.waiting.pop(sender, 0) is None:
                self._finish_if_whole(index)

    def _finish_if_whole(self, index: int) -> None:
        reduction = self.reductions[index]
        if reduction.waiting or reduction.mean is None:
            return
        reduction.mean.write(self.values(index))
        reduction.weight, reduction.mean = reduction.mean.weight, None
        reduction.done.set()
        self._progressed.set()

    def values(self, index: int) -> Tensor:
        """Where the mean of a part is written."""
        part = self.parts[index]
        return self._out[part.vector][part.start : part.stop]

    def fail(self, reason: str) -> None:
        """Tell the members that wait for this share why it will not come."""
        self.failure = self.failure or reason
        for reduction in self.reductions:
            reduction.done.set()

    async def watch(self) -> None:
        """Leave out whoever is dead, silent for too long, or far slower than the others; return when all are served."""
        started_at = self._host.clock.now()
        while self._unfinished():
            self._progressed.clear()
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    while self._unfinished():
                        await self._progressed.wait()
                        self._progressed.clear()
            except TimeoutError:
                self._leave_out_late(self._host.clock.now(), started_at)

    def _unfinished(self) -> bool:
        """Whether a part lacks a contribution, or a live member may still fetch means of this share."""
        if any(reduction.waiting for reduction in self.reductions):
            return True
        missing = (peer_id for peer_id in self.unserved if peer_id not in self.left_out)
        return bool(self.parts) and any(self._host.linked(peer_id) for peer_id in missing)

    def serving(self, peer_id: str) -> None:
        """This member has just taken another part's mean."""
        self.unserved[peer_id] = self._host.clock.now()

    def served(self, peer_id: str) -> None:
        """This member has fetched all it wanted, or broke off."""
        self.unserved.pop(peer_id, None)
        self._progressed.set()

    def _leave_out_late(self, now: float, started_at: float) -> None:
        if not any(reduction.waiting for reduction in self.reductions):
            for peer_id, taken_at in list(self.unserved.items()):
                self.unserved[peer_id] = min(taken_at, now)
                if now - taken_at > FETCH_SECONDS:
                    self.served(peer_id)
        for sender, count in self.delivered.items():
            if sender == self._host.peer_id or count == len(self.parts):
                continue
            if not self._host.linked(sender):
                self.leave_out(sender, "it is not connected")
                continue
            bulk = self._host.remotes[sender].bulk
            silent_seconds = now - max(started_at, bulk.last_heard)
            if silent_seconds > bulk.patience_seconds():
                self.leave_out(sender, f"late: silent for {silent_seconds:.1f} s")
        fractions = {sender: count / len(self.parts) for sender, count in self.delivered.items()} if self.parts else {}
        for sender in predicted_stragglers(fractions, now - started_at):
            self.leave_out(sender, "late: it would take more than 3 x the group's median")


class Rounds:
    """The group rounds under way at one peer; streams find theirs by its roll."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reducers: dict[str, tuple[Roll, Reducer]] = {}
        self._opened = asyncio.Event()
        host.serve_stream(Begin, self._serve)

    def open(self, roll: Roll, reducer: Reducer) -> None:
        """Serve the streams of this roll from now on; the last but one of its series is forgotten."""
        earlier = [old for old, (of, _) in self._reducers.items() if of.series == roll.series]
        for old in earlier[:-1]:
            del self._reducers[old]
        self._reducers[roll.roll_id] = roll, reducer
        self._opened.set()
        self._opened = asyncio.Event()

    async def _serve(self, stream: Stream, begin: Begin) -> None:
        """The reducer's side of one stream."""
        try:
            async with asyncio.timeout(ROLL_WAIT_SECONDS):
                while begin.roll_id not in self._reducers:
                    await self._opened.wait()
        except TimeoutError:
            raise RefusedError("this roll is not open here") from None
        roll, reducer = self._reducers[begin.roll_id]
        if stream.peer_id not in roll.members:
            raise RefusedError("a stranger to this roll")
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._receive(stream, reducer), name="receive parts")
                both_ways.create_task(self._send(stream, reducer), name="send means")
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        finally:
            reducer.served(stream.peer_id)

    async def _receive(self, stream: Stream, reducer: Reducer) -> None:
        sender = stream.peer_id
        try:
            while True:
                message, payload = await stream.receive(PartSent)
                if not 0 <= message.index < len(reducer.parts):
                    raise ProtocolError(f"part {message.index} of {len(reducer.parts)}")
                dtype = WIRE_DTYPES[reducer.parts[message.index].vector]
                if len(payload) % dtype.itemsize or not len(payload):
                    raise ProtocolError(f"a part of {len(payload)} bytes")
                reducer.contribute(sender, message.index, torch.frombuffer(payload, dtype=dtype))
        except StreamEnded:
            reducer.leave_out(sender, "it ended before its last part")
        except RemoteError as error:
            reducer.leave_out(sender, str(error))
            raise

    async def _send(self, stream: Stream, reducer: Reducer) -> None:
        for index, reduction in enumerate(reducer.reductions):
            await reduction.done.wait()
            if reducer.failure:
                raise RefusedError(reducer.failure, FAILED)
            payload = as_bytes(reducer.values(index)) if reduction.weight > 0 else b""
            await stream.send(PartMeanSent(index, reduction.weight), payload)
            reducer.serving(stream.peer_id)


async def butterfly(
    host: Host, rounds: Rounds, roll: Roll, vectors: Vectors, *, part_bytes: int, timeout_seconds: float
) -> Outcome:
    """Average `vectors` over the members of a roll. Returns new vectors; raises RoundError and then changed nothing."""
    owned = cut_parts([len(vector) for vector in vectors], ITEM_BYTES, shares_by_bandwidth(roll.bandwidths), part_bytes)
    result = vectors[0].clone(), vectors[1].clone()
    me = roll.members.index(host.peer_id)
    reducer = Reducer(host, roll, owned[me], result)
    rounds.open(roll, reducer)
    weights: list[float] = []  # of every part
    try:
        async with asyncio.timeout(timeout_seconds):
            await contained(_all_streams(host, roll, owned, reducer, vectors, result, weights))
    except asyncio.CancelledError:
        reducer.fail("its reducer broke off")
        raise
    except TimeoutError:
        failure: Exception = RoundError(f"not done within {timeout_seconds:g} s", roll.number, tuple(roll.members))
    except ExceptionGroup as errors:
        failure = root_cause(errors)
    else:
        total = sum(roll.weights)
        exact = all(abs(weight - total) <= 1e-9 * total for weight in weights)
        return Outcome(result, roll, tuple(who for who in reducer.delivered if who not in reducer.left_out), exact)
    reducer.fail(failure.reason if isinstance(failure, RoundError) else "an error at the reducer")
    raise failure


async def _all_streams(
    host: Host, roll: Roll, owned: list[list[Part]], reducer: Reducer, vectors: Vectors, result: Vectors,
    weights: list[float],
) -> None:  # fmt: skip
    """Reduce the own share, and exchange with the reducer of each other one, all at once."""
    weight = roll.weights[roll.members.index(host.peer_id)]
    mine = vectors if weight > 0 else None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reducer.watch(), name="watch")
        tasks.create_task(_reduce_own(reducer, host.peer_id, mine, weights), name="own share")
        for peer_id, parts in zip(roll.members, owned, strict=True):
            if peer_id != host.peer_id and parts:
                tasks.create_task(_exchange(host, roll, peer_id, parts, mine, result, weights), name="exchange")


async def _reduce_own(reducer: Reducer, me: str, mine: Vectors | None, weights: list[float]) -> None:
    """Add this member's own values to its own share, and wait until every part of it is whole."""
    if mine is not None:
        for index, part in enumerate(reducer.parts):
            reducer.contribute(me, index, mine[part.vector][part.start : part.stop])
            await asyncio.sleep(0)
    for reduction in reducer.reductions:
        await reduction.done.wait()
        weights.append(reduction.weight)


async def _exchange(
    host: Host, roll: Roll, peer_id: str, parts: list[Part], mine: Vectors | None, result: Vectors, weights: list[float]
) -> None:
    """The member's side of one stream: its values to one reducer, that reducer's means back. Raises RoundError."""
    try:
        async with host.stream(peer_id, Begin(roll.roll_id)) as stream, asyncio.TaskGroup() as both_ways:
            if mine is not None:
                both_ways.create_task(_contribute(stream, parts, mine), name="send parts")
            both_ways.create_task(_collect(stream, parts, result, weights), name="receive means")
    except (RemoteError, ExceptionGroup) as error:
        cause = root_cause(error)
        if isinstance(cause, RefusedError) and cause.code == FAILED:
            reason = cause.reason
        elif isinstance(cause, PeerLost):
            reason = f"{peer_id[:8]} died before it sent all of its share"
        elif isinstance(cause, RemoteError):
            reason = f"{peer_id[:8]}: {cause}"
        else:
            raise cause from None
        raise RoundError(reason, roll.number, tuple(roll.members)) from None


async def _contribute(stream: Stream, parts: list[Part], mine: Vectors) -> None:
    for index, part in enumerate(parts):
        await stream.send(PartSent(index), as_bytes(mine[part.vector][part.start : part.stop]))


async def _collect(stream: Stream, parts: list[Part], result: Vectors, weights: list[float]) -> None:
    for index, part in enumerate(parts):
        try:
            message, payload = await stream.receive(PartMeanSent)
        except StreamEnded:
            raise ProtocolError("it ended before its last mean") from None
        target = result[part.vector][part.start : part.stop]
        if message.index != index or len(payload) != (target.nbytes if message.weight > 0 else 0):
            raise ProtocolError(f"mean {message.index} of {len(payload)} bytes where part {index} was due")
        if message.weight > 0:
            means = torch.frombuffer(payload, dtype=target.dtype)
            if not torch.isfinite(means).all():
                raise ProtocolError(f"mean {index} is not finite")
            target.copy_(means)
        weights.append(message.weight)


def root_cause(error: BaseException) -> Exception:
    """The first error of a group that says most: one that a reducer passed on before a connection that merely broke."""
    flat: list[Exception] = []

    def gather(one: BaseException) -> None:
        if isinstance(one, BaseExceptionGroup):
            for inner in one.exceptions:
                gather(inner)
        elif isinstance(one, Exception):
            flat.append(one)

    gather(error)
    return min(flat, key=lambda one: isinstance(one, PeerLost))
