"""No wait without an end: Moshpit reference, check 18. All on virtual time.

The default limits are finite; and where a peer keeps its links alive but answers nothing of one kind, from whatever
stage on, every averaging of the others ends within `timeout_seconds`, with a result or an error of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest

import shoal
from peers import Node, average, nodes
from shoal.core.errors import AveragingError, NobodyThere, OptionError, RoundError
from shoal.core.loop import run_virtual
from shoal.planning.collector import collector_of
from shoal.protocols.meeting import Meet
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL, TRAIN, Here
from shoal.protocols.round_record import AskVersions, Begin, Recover
from shoal.strategies import STRATEGIES, AnyStrategy
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit
from shoal.training.settings import read_settings
from shoal.training.swarm import Swarm

ROWS = np.random.default_rng(18).normal(size=(6, 3000)).astype(np.float32)
GRACE_SECONDS = 0.5
"""An averaging whose time is over ends at once; a last message or two may be on its way."""


# ---------------------------------------------------------------- the defaults


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_check_18_every_time_limit_of_a_strategy_is_finite_and_none_can_be_infinite(strategy) -> None:
    limits = [field.name for field in dataclasses.fields(strategy) if field.name.endswith("_seconds")]
    assert "timeout_seconds" in limits
    gradients = {"average": "gradients", "target_batch": 32}
    for name in limits:
        mode = gradients if name == "gather_timeout_seconds" else {}
        assert 0 < getattr(strategy(**mode), name) < math.inf
        for value in (math.inf, math.nan, -1.0, 1e9):
            with pytest.raises(OptionError) as refused:
                strategy(**mode, **{name: value})
            assert refused.value.field == name
    with pytest.raises(OptionError):
        strategy(timeout_seconds=None)


def test_check_18_the_calls_of_the_public_face_have_finite_limits() -> None:
    assert inspect.signature(Swarm.average).parameters["timeout_seconds"].default == 30.0
    assert inspect.signature(shoal.join).parameters["join_timeout_seconds"].default is None
    assert read_settings("birds", None, None, None, None, None).join_timeout_seconds == 10.0
    for value in (math.inf, math.nan, 0.0, -1.0):
        with pytest.raises(OptionError):
            read_settings("birds", None, None, None, None, value)


# ---------------------------------------------------------------- somebody is silent


async def silence(*_: Any) -> Any:
    await asyncio.Event().wait()


def hush(node: Node, stage: str) -> None:
    """From now on this peer answers no message of one stage, or of all; its heartbeats go on."""
    calls = {"collector": [Here], "meeting point": [Meet], "closing": [AskVersions], "reducer": [], "everything": []}
    streams = {"reducer": [Begin, Recover], "closing": [Recover]}
    everything = [Here, Meet, AskVersions], [Begin, Recover]
    for kind in everything[0] if stage == "everything" else calls[stage]:
        node.peer.host.serve(kind, silence)
    for kind in everything[1] if stage == "everything" else streams.get(stage, []):
        node.peer.host.serve_stream(kind, silence)


async def timed(
    group: list[Node], strategy: AnyStrategy, series: str, timeout_seconds: float, silent: int, **how: Any
) -> list[Outcome | BaseException]:
    """What the peers got that are not silent; each of them within its time."""
    began, seconds = asyncio.get_running_loop().time(), []
    averages = type(strategy).all_reduce

    async def watched(self: AnyStrategy, *arguments: Any, **named: Any) -> Outcome:
        try:
            return await averages(self, *arguments, **named)
        finally:
            seconds.append(asyncio.get_running_loop().time() - began)

    watching = type("Watched", (type(strategy),), {"all_reduce": watched})(**dataclasses.asdict(strategy))
    found = await average(group, watching, ROWS[: len(group)], series=series, timeout_seconds=timeout_seconds, **how)
    assert max(seconds) <= timeout_seconds + GRACE_SECONDS, f"{max(seconds):.1f} s of {timeout_seconds}"
    return [one for number, one in enumerate(found) if number != silent and number not in how.get("deaths", {})]


STAGES = ["collector", "meeting point", "reducer", "closing", "everything"]
WAYS = {
    "allreduce": (AllReduce(), CALL),
    "moshpit call": (Moshpit(group_size=3), CALL),
    "moshpit train": (Moshpit(group_size=3), TRAIN),
    "plain": (Moshpit(group_size=3, plain_rounds=2), TRAIN),
}


@pytest.mark.parametrize("timeout_seconds", [2.0, 8.0, 20.0])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_check_18_with_a_silent_peer_every_averaging_ends_in_time(stage, way, timeout_seconds) -> None:
    """It calls for the averaging itself, so that the others count on it, and is the one whom they all ask."""
    strategy, series = WAYS[way]

    async def main() -> None:
        async with nodes(6) as group:
            for node in group:
                node.peer.meetings.key = (0,)
            silent = whom_all_ask(group, series, way)
            hush(group[silent], stage)
            deaths = {(silent + 1) % 6: 0.3} if stage == "closing" else {}
            found = await timed(group, strategy, series, timeout_seconds, silent, deaths=deaths)
            for one in found:
                assert isinstance(one, Outcome | AveragingError), repr(one)
                if isinstance(one, RoundError):
                    assert one.reason

    run_virtual(main(), limit_seconds=100)


def whom_all_ask(group: list[Node], series: str, way: str) -> int:
    ids = [node.id for node in group]
    if way == "plain":
        return ids.index(collector_of("", "meeting 1.0 (0,)", 0, ids))
    return ids.index(collector_of("", series, 1, ids))


@pytest.mark.parametrize("way", WAYS)
def test_check_18_a_silent_reducer_is_given_up_and_the_others_have_a_result(way) -> None:
    """Not only in time: what the silent one would have reduced is taken over.

    In a grid one peer may fail for it: who shares a group of two with the silent one, and comes to the next round
    when its members have gone on.
    """
    strategy, series = WAYS[way]

    async def main() -> None:
        async with nodes(6) as group:
            for node in group:
                node.peer.meetings.key = (0,)
            silent = (whom_all_ask(group, series, way) + 1) % 6
            hush(group[silent], "reducer")
            found = await timed(group, strategy, series, 60.0, silent)
            results = [one for one in found if isinstance(one, Outcome)]
            assert len(results) >= (5 if way in ("allreduce", "plain") else 4), found
            assert all(np.isfinite(one.vectors[0].numpy()).all() for one in results)

    run_virtual(main(), limit_seconds=100)


@pytest.mark.parametrize("way", WAYS)
def test_check_18_alone_it_is_nobody_there_at_once(way) -> None:
    strategy, series = WAYS[way]

    async def main() -> None:
        async with nodes(1) as group:
            with pytest.raises(NobodyThere):
                raise (await average(group, strategy, ROWS[:1], series=series))[0]
            assert asyncio.get_running_loop().time() < 0.01

    run_virtual(main(), limit_seconds=100)
