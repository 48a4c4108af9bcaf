"""How a group ends equal when members die: the take-over of a share, and the closing exchange (design, section 5).

**Take-over.** Each part has an order of reducers: its owner, then the members after it. Who misses parts of a dead
owner asks the next in their order, who reduces them anew, as the next attempt: it asks all members for their values. A
member that holds a lower attempt gives that instead, and then no new one is needed.

**Closing exchange.** Once it holds every part, a member takes nothing more but by fetching. All exchange which versions
they hold, and fetch the lower ones; only when all lists of an exchange are in, so that nobody fetches from a member
that another has already seen die. A member ends when the lowest versions are the owners' own, or when two successive
exchanges show the same and nobody was lost in between; otherwise it goes on, (members lost + 2) times at most.
"""

from __future__ import annotations

import asyncio
import itertools

from shoal.core.errors import PeerLost, ProtocolError, RemoteError, RoundError
from shoal.net.stream import Stream, StreamEnded
from shoal.planning.versions import Versions, is_settled, lowest_versions
from shoal.protocols.reducer import Reducer
from shoal.protocols.round_record import AskVersions, Given, Recover, VersionsHeld, Want
from shoal.protocols.round_state import CLOSING, DIGEST_BYTES, FAILED, Round

TAKE_OVER_SECONDS = 6.0
"""A take-over may take this long, or 3 x what the round took until then: it is about as much work again."""
LIST_SECONDS, ANSWER_SECONDS = 15.0, 10.0
"""How long a live member may take until it holds every part, before the others close without it; and for one part."""


def failed(round_: Round, reason: str) -> RoundError:
    """This member keeps the values it had."""
    return RoundError(reason, round_.group.roll.number, round_.group.members)


# -- take-over


async def take_over(round_: Round, reducer: Reducer, owner: int) -> None:
    """Get what is missing of a share from the first in its order that lives. Raises RoundError when nobody does."""
    for number in round_.order(owner)[1:]:
        who = round_.group.members[number]
        if round_.whole(owner):
            return
        if number == round_.me:
            await reduce_anew(round_, reducer, owner)
            await round_.until(lambda: round_.whole(owner))
        elif who not in round_.lost:
            try:
                async with asyncio.timeout(_take_over_seconds(round_)):
                    await round_.unless_lost(who, _fetch(round_, who, round_.missing(owner)))
            except RemoteError as error:
                round_.hear(who, error)  # the next in the order
            except TimeoutError:
                round_.host.log.add("late", "its take-over of a share took too long", who)
    if not round_.whole(owner):
        raise failed(round_, f"nobody is left to reduce the share of {round_.group.members[owner][:8]}")


def _take_over_seconds(round_: Round) -> float:
    return max(TAKE_OVER_SECONDS, 3 * (round_.host.clock.now() - round_.started_at))


async def reduce_anew(round_: Round, reducer: Reducer, owner: int) -> None:
    """Reduce what is missing of another's share, from the values of all who live."""
    if round_.state == FAILED or round_.me == owner or round_.me not in round_.order(owner):
        return
    indices = [index for index in round_.missing(owner) if not reducer.reducing(index)]
    if not indices:
        return  # it is under way
    round_.host.log.add("warning", f"takes over {len(indices)} parts of its share", round_.group.members[owner])
    reducer.reduce(indices, round_.order(owner).index(round_.me))
    if round_.mass > 0:
        for index in indices:
            reducer.contribute(round_.host.peer_id, index, round_.own_values(index))
    await asyncio.gather(*(_pull(round_, reducer, who, indices) for who in round_.others()))


async def _pull(round_: Round, reducer: Reducer, who: str, indices: list[int]) -> None:
    """One member's values of the parts that are reduced anew here, or the lower attempt that it holds."""

    async def parts() -> None:
        async with round_.host.stream(who, Recover(round_.group.where)) as stream:
            for index in indices:
                if not reducer.reducing(index):
                    continue
                given, payload = await _ask(stream, index, values=True)
                if given.mean is not None:
                    reducer.drop(index)
                    round_.hold(index, round_.read_mean(given.mean, payload))
                elif reducer.reducing(index):
                    reducer.claim(who, given.source, given.mass)
                    if given.mass > 0:
                        reducer.contribute(who, index, round_.read_values(index, payload))

    limit = _take_over_seconds(round_) / 2  # those who wait for us wait longer
    try:
        async with asyncio.timeout(limit):
            await round_.unless_lost(who, parts())
    except RemoteError as error:
        round_.hear(who, error)
        reducer.leave_out(who, str(error), indices)
    except TimeoutError:
        reducer.leave_out(who, f"late: it did not give its values within {limit:.1f} s", indices)


async def _fetch(round_: Round, who: str, indices: list[int], *, closing: bool = False) -> None:
    """The means of these parts, in the version that this member holds."""
    async with round_.host.stream(who, Recover(round_.group.where)) as stream:
        for index in indices:
            given, payload = await _ask(stream, index, values=False)
            if given.mean is None:
                raise ProtocolError(f"no mean of part {index}")
            round_.hold(index, round_.read_mean(given.mean, payload), fetched=closing)


async def _ask(stream: Stream, index: int, *, values: bool) -> tuple[Given, memoryview]:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await stream.send(Want(index, values))
            given, payload = await stream.receive(Given)
    except StreamEnded:
        raise PeerLost("it ended before its last answer") from None
    except TimeoutError:
        raise PeerLost(f"it did not answer within {ANSWER_SECONDS:g} s") from None
    if given.index != index or (given.mean is not None and given.mean.index != index):
        raise ProtocolError(f"part {given.index} where {index} was asked for")
    return given, payload


# -- closing


async def close(round_: Round, reducer: Reducer) -> int:
    """Agree on one version of every part; returns how many exchanges it took. Raises RoundError: not agreed."""
    round_.state = CLOSING
    if reducer.clean:
        return 0
    before: Versions | None = None
    lost_before: dict[str, str] = {}
    for exchange in itertools.count(1):
        round_.lists.append(round_.versions())
        round_.change()
        lists = await _gather_lists(round_, exchange)
        if round_.cut_off:
            raise failed(round_, round_.cut_off)
        if not lists:
            raise failed(round_, "everybody else was lost")
        lowest, lost = lowest_versions([round_.versions(), *lists.values()]), dict(round_.lost)
        await _fetch_lower(round_, lowest, lists)
        if is_settled(round_.versions(), lowest, before, somebody_was_lost=lost.keys() != lost_before.keys()):
            return exchange
        if exchange >= len(round_.lost) + 2:
            break
        before, lost_before = lowest, lost
    raise failed(round_, f"not agreed after {exchange} exchanges")


async def _gather_lists(round_: Round, exchange: int) -> dict[str, Versions]:
    """The list of each member that is not lost, once all are in."""
    others = round_.others()
    answers = await asyncio.gather(*(_list_of(round_, who, exchange) for who in others))
    return {who: versions for who, versions in zip(others, answers, strict=True) if versions is not None}


async def _list_of(round_: Round, who: str, exchange: int) -> Versions | None:
    ask = AskVersions(round_.group.where, exchange)
    try:
        answer = await round_.unless_lost(
            who, round_.host.call(who, ask, VersionsHeld, timeout_seconds=LIST_SECONDS)
        )  # fmt: skip
    except RemoteError as error:
        round_.hear(who, error)
        round_.lose(who, str(error))
        return None
    count = len(round_.group.members)
    fits = all(0 <= attempt < count and len(digest) == DIGEST_BYTES for attempt, digest in answer.versions)
    if not fits or len(answer.versions) != len(round_.parts):
        round_.lose(who, "it sent a list of versions that makes no sense")
        return None
    return tuple((attempt, digest) for attempt, digest in answer.versions)


async def _fetch_lower(round_: Round, lowest: Versions, lists: dict[str, Versions]) -> None:
    """Fetch each lower version from a member that listed it; where all of those die, the own one stays."""
    for who, listed in lists.items():
        lower = [
            index
            for index, version in enumerate(lowest)
            if version < round_.versions()[index] and listed[index] == version
        ]
        if not lower or who in round_.lost:
            continue
        try:
            await round_.unless_lost(who, _fetch(round_, who, lower, closing=True))
        except ProtocolError as error:
            round_.lose(who, f"it does not give what it listed: {error}")
        except RemoteError as error:
            round_.hear(who, error)
