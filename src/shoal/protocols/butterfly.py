"""Butterfly all-reduce in one group (Moshpit reference, section 2.3), streamed part by part.

The flat vectors are cut into shares, one for each member, by bandwidth; a share into parts. Member i opens one stream
to each other member k, sends its values of k's share part by part, and receives the means of k's parts on the same one:

    member i                                  reducer k
      Begin(round, source, mass)     ->
      Part(0), values                ->         sums up, weighted
      Part(1), values                ->         once all who live have delivered part 0:
                                     <-       Mean(0, version, weight), values
      ...                                       ...
                                     <-       Mean(n), values

A member sends 2 s (n-1)/n bytes for a vector of s bytes. A sender that dies, or is late, is left out of the parts that
it has not delivered: the mean of each part is over those who did. Where a reducer dies, the next member in its parts'
order takes them over, and a closing exchange makes all who live hold the same versions (see agreement.py). Nothing is
written anywhere but into a new result, so a failed round leaves every value as it was.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import median

from shoal.core.errors import PeerLost, ProtocolError, RemoteError, RoundError
from shoal.core.tasks import contained, root_cause
from shoal.net.stream import Stream, StreamEnded
from shoal.protocols.agreement import close, failed, take_over
from shoal.protocols.reducer import BEGIN_SECONDS, STALL_SECONDS, Reducer
from shoal.protocols.round_record import Begin, Ended, Group, PartMeanSent, PartSent
from shoal.protocols.round_state import Round
from shoal.protocols.rounds import Rounds
from shoal.tensors.flat import Vectors, as_bytes

REDUCERS_WATCH_SECONDS = 0.5
LATE_REDUCER_SECONDS = 5.0
"""A reducer is given up when it would end this much after the group's median, and beyond 3 x of it.

Nobody is judged earlier than that: it may itself still wait for a sender that it is about to leave out.
"""


@dataclass(frozen=True)
class PartReport:
    """One part: elements [start, stop) of flat vector number `vector`, reduced by `reducer` in `attempt`.

    Its values are the mean, over a total `weight`, of those of `contributors`.
    """

    vector: int
    start: int
    stop: int
    attempt: int
    reducer: str
    contributors: tuple[str, ...]
    weight: float


@dataclass(frozen=True)
class RoundReport:
    """One group round, as one member saw it. `left_out` and `lost` give the reason for each peer id.

    `lost`: gone, or given up, in the round. `exchanges`: lists of versions exchanged at its end; none where all was
    clean. `averaged`: the share of elements that have a mean, 0 to 1.
    """

    round_index: int
    members: tuple[str, ...]
    left_out: dict[str, str]
    lost: dict[str, str]
    exchanges: int
    bytes_sent: int
    bytes_received: int
    obtaining_seconds: float
    closing_seconds: float
    parts: tuple[PartReport, ...]

    @property
    def averaged(self) -> float:
        elements = sum(part.stop - part.start for part in self.parts)
        return sum(part.stop - part.start for part in self.parts if part.weight > 0) / elements if elements else 1.0

    @property
    def contributed(self) -> tuple[str, ...]:
        """Members whose values are in every part, or stand in it for others of the same source."""
        inside = [set(part.contributors) for part in self.parts]
        return tuple(who for who in self.members if all(who in part for part in inside))


@dataclass(frozen=True)
class RoundResult:
    """New vectors, and the `mass` that they stand for: the total weight in them."""

    vectors: Vectors
    mass: float
    report: RoundReport

    @property
    def weights(self) -> tuple[float, ...]:
        """The total weight of each part."""
        return tuple(part.weight for part in self.report.parts)


async def butterfly(
    rounds: Rounds, group: Group, vectors: Vectors, *, source: str, mass: float, part_bytes: int, timeout_seconds: float
) -> RoundResult:
    """Average `vectors` over the members of a group; `source` and `mass` say what this member's stand for.

    Raises RoundError, and then nothing was changed.
    """
    host = rounds.host
    clock, sent, received = host.clock, host.sent.total_bytes, host.received.total_bytes
    round_ = Round(host, group, vectors, source, mass, part_bytes, rounds.dropped, rounds.memory)
    reducer = Reducer(round_)
    rounds.open(round_, reducer)
    started_at = clock.now()
    try:
        async with asyncio.timeout(timeout_seconds):
            await contained(_obtain(round_, reducer, rounds.last(group.roll.series)))
            obtained_at = clock.now()
            exchanges = await contained(close(round_, reducer))
    except TimeoutError:
        failure: BaseException = failed(
            round_, f"not done within the {timeout_seconds:.1f} s that timeout_seconds left it"
        )
    except ExceptionGroup as errors:
        failure = root_cause(errors)
    except RoundError as error:
        failure = error
    except asyncio.CancelledError:
        round_.fail()
        raise
    else:
        report = RoundReport(
            group.round_index, group.members, dict(reducer.left_out), dict(round_.lost), exchanges,
            host.sent.total_bytes - sent, host.received.total_bytes - received,
            obtained_at - started_at, clock.now() - obtained_at, _part_reports(round_),
        )  # fmt: skip
        vectors = round_.settle()
        rounds.ended(round_)
        return RoundResult(vectors, _mass(report.parts), report)
    round_.fail()
    raise failure


def _part_reports(round_: Round) -> tuple[PartReport, ...]:
    members = round_.group.members
    return tuple(
        PartReport(
            part.vector, part.start, part.stop, held.version[0],
            members[round_.order(owner)[held.version[0]]], tuple(members[n] for n in held.contributors), held.weight,
        )
        for part, owner, held in zip(round_.parts, round_.owners, round_.held, strict=True)
        if held is not None
    )  # fmt: skip


def _mass(parts: tuple[PartReport, ...]) -> float:
    """The weight behind the result: the same number at all members, since they agree on the parts."""
    weights = {part.weight for part in parts}
    if len(weights) < 2:
        return weights.pop() if weights else 0.0
    sizes = [part.stop - part.start for part in parts]
    return sum(part.weight * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)


async def _obtain(round_: Round, reducer: Reducer, last: Ended | None) -> None:
    """Reduce the own share, and exchange with the reducer of each other one, all at once, until all is held."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reducer.watch(), name="watch")
        tasks.create_task(_lose_late_reducers(round_), name="watch reducers")
        tasks.create_task(_reduce_own(round_, reducer), name="own share")
        for who in round_.others():
            if not round_.host.linked(who):
                tasks.create_task(_meet(round_, who), name="meet")
        for number in dict.fromkeys(round_.owners):
            if number != round_.me:
                tasks.create_task(_from_reducer(round_, reducer, number, last), name="exchange")


async def _meet(round_: Round, who: str) -> None:
    """Connect to a member that this peer has no link to. It is lost where that fails, or where it fell silent."""
    if reason := round_.host.silent.get(who):
        round_.lose(who, reason)
        return
    remote = round_.host.remotes.get(who)
    try:
        await round_.host.link(remote.endpoints if remote else (), who)
    except RemoteError as error:
        round_.lose(who, f"it can't be reached: {error}")


async def _reduce_own(round_: Round, reducer: Reducer) -> None:
    """Add this member's own values to its own share, and wait until every part of it is whole."""
    for index in reducer.share if round_.mass > 0 else ():
        if reducer.reducing(index):
            reducer.contribute(round_.host.peer_id, index, round_.own_values(index))
        await asyncio.sleep(0)
    await round_.until(lambda: round_.whole(round_.me), round_.me)


async def _from_reducer(round_: Round, reducer: Reducer, number: int, last: Ended | None) -> None:
    """All parts of one member's share: from itself, or, when it dies, from those who take over."""
    who = round_.group.members[number]

    def is_needless() -> bool:
        held = [round_.held[index] for index in round_.owned_by(number)] if round_.whole(number) else []
        return who in round_.lost or any(one.version[0] > 0 for one in held if one is not None)

    try:
        if exchange := await round_.unless(is_needless, _exchange(round_, number, last), number):
            exchange.result()
    except (RemoteError, ExceptionGroup) as error:
        cause = root_cause(error) if isinstance(error, ExceptionGroup) else error
        if not isinstance(cause, RemoteError):
            raise cause from None
        round_.hear(who, cause)
    if round_.cut_off:
        raise failed(round_, round_.cut_off)
    if not round_.whole(number):
        await take_over(round_, reducer, number)


async def _exchange(round_: Round, number: int, last: Ended | None) -> None:
    """The member's side of one stream: its values to one reducer, that reducer's means back."""
    begin = Begin(round_.group.where, round_.source, round_.mass, last)
    indices = round_.owned_by(number)
    async with round_.host.stream(round_.group.members[number], begin) as stream, asyncio.TaskGroup() as both_ways:
        if round_.mass > 0:
            both_ways.create_task(_contribute(stream, round_, indices), name="send parts")
        await _collect(stream, round_, indices)


async def _contribute(stream: Stream, round_: Round, indices: list[int]) -> None:
    for index in indices:
        await stream.send(PartSent(index), as_bytes(round_.own_values(index)))


async def _collect(stream: Stream, round_: Round, indices: list[int]) -> None:
    stream.place([as_bytes(round_.place(index)) for index in indices])
    for index in indices:
        try:
            message, payload = await stream.receive(PartMeanSent)
        except StreamEnded:
            raise PeerLost("it ended before its last mean") from None
        if message.index != index:
            raise ProtocolError(f"mean {message.index} where part {index} was due")
        round_.hold(index, round_.read_mean(message, payload))


async def _lose_late_reducers(round_: Round) -> None:
    """Give up a reducer that lives but does not deliver: silent for long, or far slower than all the others."""
    host = round_.host
    started_at = looked_at = host.clock.now()
    owners = [number for number in dict.fromkeys(round_.owners) if number != round_.me]
    began: dict[int, tuple[float, int]] = {}
    ended: dict[int, float] = {}
    while not all(map(round_.whole, owners)):
        try:
            async with asyncio.timeout(REDUCERS_WATCH_SECONDS):
                await round_.until(lambda: all(map(round_.whole, owners)))
        except TimeoutError:
            now = host.clock.now()
            if now - looked_at > REDUCERS_WATCH_SECONDS + STALL_SECONDS:
                started_at, began, ended = now, {}, {}  # our own stall is no lateness of theirs
            for number, reason in _late_reducers(round_, owners, began, ended, now, started_at):
                round_.lose(round_.group.members[number], f"late: {reason}")
        looked_at = host.clock.now()


def _late_reducers(
    round_: Round, owners: list[int], began: dict[int, tuple[float, int]], ended: dict[int, float], now: float,
    started_at: float,
) -> list[tuple[int, str]]:  # fmt: skip
    """`began`: after how many seconds means of a share were first seen, and how many; `ended`: when it was whole.

    The end of the others is predicted from their pace since then: before, they waited for the slowest sender. A mean
    that is under way counts.
    """
    elapsed = now - started_at
    shares = {number: round_.owned_by(number) for number in owners}
    held = {number: len(share) - len(round_.missing(number)) for number, share in shares.items()}
    ended |= {number: elapsed for number in owners if number not in ended and held[number] == len(shares[number])}
    began |= {number: (elapsed, count) for number, count in held.items() if count and number not in began}
    ends = dict(ended)
    for number, (began_at, first) in began.items():
        if number not in ended and elapsed > began_at:
            missing = len(shares[number]) - held[number]
            ends[number] = elapsed + missing * (elapsed - began_at) / (held[number] - first + 1)
    limit = max(3 * median(ends.values()), median(ends.values()) + LATE_REDUCER_SECONDS) if len(ends) > 2 else None
    late = []
    for number in owners:
        remote = round_.host.remotes.get(round_.group.members[number])
        if round_.whole(number) or remote is None:
            continue
        silent = now - max(started_at, remote.bulk.last_heard)
        if silent > BEGIN_SECONDS and silent > BEGIN_SECONDS + 2 * remote.bulk.patience_seconds():
            late.append((number, f"silent for {silent:.1f} s"))
        elif limit is not None and elapsed > LATE_REDUCER_SECONDS and ends.get(number, elapsed) > limit:
            pace = f"{held[number]} of {len(shares[number])} means in {elapsed:.1f} s"
            late.append((number, f"{pace}, it would take more than 3 x the group's median"))
    return late
