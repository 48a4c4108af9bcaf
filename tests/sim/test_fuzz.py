"""One fuzz target per message type, at live peers in virtual time. SHOAL_FUZZ_INPUTS makes the inputs more.

A peer that knows the secret calls, opens streams and answers with valid, mutated and random messages. Nothing comes of
it but refusals: no fault at any host, nothing that the loop complains of, and afterwards the honest average as ever.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest
from attacker import Attacker

import peers
from fuzzing import ITEMS, NOTICES, REPLIES, Fuzzer
from peers import Node
from shoal.core.errors import AveragingError, DownloadError, RemoteError, ShoalError
from shoal.core.loop import run_virtual
from shoal.net.envelope import Done, Message
from shoal.net.stream import Stream, StreamEnded
from shoal.overlay.charter import Charter
from shoal.overlay.directory import Directory
from shoal.overlay.member_record import TRAINING
from shoal.planning.penalties import Penalties
from shoal.protocols.download import Download
from shoal.protocols.outcome import Outcome
from shoal.protocols.replica import State
from shoal.protocols.roll_record import CALL, TRAIN
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

INPUTS = int(os.environ.get("SHOAL_FUZZ_INPUTS", "25"))
HONEST, SIZE = 3, 3000
CHARTER = Charter("r", "charter", "registrar", -math.inf, strategy={"name": "AllReduce"}, schema=[])
ROWS = np.random.default_rng(9).normal(size=(HONEST, SIZE)).astype(np.float32)


def served() -> list[dict[str, type[Message]]]:
    """What a whole peer serves: its calls, notices and streams, by their names on the wire."""

    async def main() -> list[dict[str, type[Message]]]:
        async with peers.nodes(1) as (node,):
            host = node.peer.host
            tables = host.call_handlers, host.notice_handlers, host.stream_handlers
            return [{name: kind for name, (kind, _) in table.items()} for table in tables]

    return run_virtual(main())


CALLS, TOLD, STREAMS = served()


def test_every_call_and_stream_that_is_served_has_a_target() -> None:
    """The targets come from the handlers; what belongs to each is told in tests/fuzzing.py."""
    assert set(CALLS.values()) == set(REPLIES), "tell there what a new call is answered with"
    assert set(TOLD.values()) == set(NOTICES), "tell there what is new"
    assert set(STREAMS.values()) == set(ITEMS), "tell there what is sent on a new stream"


Attack = Callable[[list[Node], Attacker], Awaitable[None]]


def attacked(seed: str, attack: Attack, *, prepare: Callable[[Node, Fuzzer], None] | None = None) -> None:
    """Three honest peers that average all the while, and afterwards exactly. `prepare` makes a fourth one hostile."""

    async def main() -> None:
        async with peers.nodes(HONEST + (prepare is not None)) as group:
            honest = group[:HONEST]
            for node in group:
                node.peer.donor.take_state = _state
                _go_on_with_ours(node)
            texts = [node.id for node in group] + [f"host-{number}:1" for number in range(HONEST)]
            fuzzer = Fuzzer(seed, texts)
            if prepare is not None:
                prepare(group[HONEST], fuzzer)
            watching = asyncio.create_task(_learn_words(honest, fuzzer))
            averaging = asyncio.create_task(_average_on(honest))
            await attack(group, Attacker(honest[0].transport.network, fuzzer))
            for task in (averaging, watching):
                task.cancel()
            ended = await asyncio.gather(averaging, watching, return_exceptions=True)
            assert [type(one) for one in ended] == [asyncio.CancelledError] * 2, ended
            for node in group[HONEST:]:
                node.transport.crash()
            await asyncio.sleep(70)  # of meetings and rolls that the attack opened
            assert [str(fault) for node in group for fault in node.peer.host.faults] == []
            for one in honest:
                _go_on_with_ours(one)
                for other in honest:
                    if one is not other and not one.peer.host.linked(other.id):
                        await one.peer.host.link(other.peer.host.endpoints, other.id)
                one.peer.members.members.update(
                    {other.id: peers._record(other.peer) for other in honest if other is not one}
                )
            for series in (TRAIN, CALL) * 2:
                outcomes = await peers.average(honest, AllReduce(), ROWS, series=series)
                assert all(isinstance(one, Outcome) and one.exact for one in outcomes), outcomes
                assert np.abs(peers.held(outcomes, ROWS) - ROWS.mean(0)).max() < 1e-6

    run_virtual(main(), limit_seconds=1e5)


def _go_on_with_ours(node: Node) -> None:
    """Whoever knows the secret may say that it has a run of more steps, and then ours yields."""
    node.peer.members.charter = CHARTER
    node.peer.members.update(progress=2**63 - 1, state=TRAINING)


async def _state() -> State:
    vectors = peers.vectors_of(ROWS[0])
    return State(vectors, scalars={"step": 1}, optimizer="SGD", progress=5, number=1)


async def _learn_words(group: list[Node], fuzzer: Fuzzer) -> None:
    """The names of the rounds and images that are open now: what nobody could guess, an attacker in the roll knows."""
    known = len(fuzzer.texts)
    while True:
        rounds = [where for node in group for where in node.peer.rounds._rounds]
        fuzzer.texts[known:] = [
            *(where.roll_id for where in rounds[-4:]), *(image for node in group for image in node.peer.donor._images)
        ]  # fmt: skip
        await asyncio.sleep(0.05)


async def _average_on(group: list[Node]) -> None:
    strategies = [AllReduce(timeout_seconds=5.0), Moshpit(group_size=3), Moshpit(group_size=3, plain_rounds=2)]
    for number in range(10**6):
        outcomes = await peers.average(group, strategies[number % 3], ROWS, timeout_seconds=5.0)
        unexpected = [one for one in outcomes if not isinstance(one, Outcome | AveragingError | RemoteError)]
        assert not unexpected, unexpected
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", [*CALLS, *TOLD])
def test_a_call(name: str) -> None:
    async def attack(group: list[Node], attacker: Attacker) -> None:
        await attacker.call(group[0].peer.host, (CALLS | TOLD)[name], INPUTS)

    attacked(name, attack)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream(name: str) -> None:
    async def attack(group: list[Node], attacker: Attacker) -> None:
        await attacker.stream(group[0].peer.host, STREAMS[name], ITEMS[STREAMS[name]][0], INPUTS)

    attacked(name, attack)


@pytest.mark.parametrize("name", CALLS)
def test_an_answer(name: str) -> None:
    """A member of the run whose answers are not to be trusted."""

    def prepare(node: Node, fuzzer: Fuzzer) -> None:
        async def answer(peer_id: str, request: Message) -> Message:
            return msgspec.Raw(fuzzer.body(REPLIES[CALLS[name]]))  # type: ignore[return-value]

        fuzzer.me = node.id
        node.peer.host.serve(CALLS[name], answer)

    attacked(f"answer {name}", _use_the_member, prepare=prepare)


@pytest.mark.parametrize("name", STREAMS)
def test_what_comes_back_on_a_stream(name: str) -> None:
    def prepare(node: Node, fuzzer: Fuzzer) -> None:
        async def serve(stream: Stream, request: Message) -> None:
            there, back = ITEMS[STREAMS[name]]
            try:
                while True:
                    if there is not Done:
                        await stream.receive(there)
                    await stream.send(msgspec.Raw(fuzzer.body(back)), fuzzer.payload())  # type: ignore[arg-type]
            except StreamEnded:
                return

        fuzzer.me = node.id
        node.peer.host.serve_stream(STREAMS[name], serve)

    attacked(f"back {name}", _use_the_member, prepare=prepare)


async def _use_the_member(group: list[Node], _: Attacker) -> None:
    """All that a peer asks of another, again and again, of the last one too."""
    hostile = group[-1]
    directories: list[Directory] = [node.peer.members.directory for node in group]
    for directory in directories[:-1]:
        directory.meet(hostile.id, [str(endpoint) for endpoint in hostile.peer.host.endpoints])
    rows = np.vstack([ROWS, ROWS[:1]])
    strategies = [AllReduce(timeout_seconds=5.0), Moshpit(group_size=3), Moshpit(group_size=3, plain_rounds=2)]
    shapes = [((SIZE,), "float32")]
    for number in range(max(2, INPUTS // 20)):
        for node in group[:-1]:
            peer = node.peer
            try:
                await peer.members.meet(list(hostile.peer.host.endpoints), hostile.id)
            except ShoalError:
                pass  # it is refused, or what it answered makes no sense
            _go_on_with_ours(node)
            peer.host._door._penalties = Penalties()  # it gets another chance
            if not peer.host.linked(hostile.id):
                await peer.host.link(hostile.peer.host.endpoints, hostile.id)
            peer.members.members[hostile.id] = peers._record(hostile.peer)
            peer.host.know(hostile.id, hostile.peer.host.endpoints)
            await peer.members.directory.get("key")
            await peer.members.directory.store("key", b"value", 60)
            try:
                await Download(peer.host, peer.members, peer.compute, shapes).run()
            except DownloadError:
                pass  # which says that nobody could give it
            await peer.mean_gradients.fetch(1, shapes)
        outcomes = await peers.average(group, strategies[number % 3], rows, timeout_seconds=5.0)
        unexpected = [one for one in outcomes if not isinstance(one, Outcome | AveragingError | RemoteError)]
        assert not unexpected, unexpected
        await asyncio.sleep(1)
