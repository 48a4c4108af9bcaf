"""Peers with all that an averaging needs (rolls, meetings, rounds) on memory hosts in virtual time, without a world.

Who is there is given, not told each second: sixty-four peers cost seconds. No peer trains; averagings are called.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from group import meet, members
from shoal.core.address import Endpoint
from shoal.core.clock import Clock, virtual_wall
from shoal.core.compute import VirtualCompute
from shoal.core.errors import PeerLost
from shoal.net.channel import Channel
from shoal.net.memory import MemoryTransport
from shoal.overlay.member_record import TRAINER, TRAINING, Record
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.protocols.outcome import Outcome
from shoal.protocols.peer import Peer
from shoal.protocols.roll_record import TRAIN
from shoal.strategies import AnyStrategy
from shoal.tensors.flat import Vectors


@dataclass
class Node:
    """`before[t]`: the values (float32 or float64, whichever there are) that this peer took into round t, from 0."""

    peer: Peer
    transport: MemoryTransport
    before: dict[int, np.ndarray]

    @property
    def id(self) -> str:
        return self.peer.id


@contextlib.asynccontextmanager
async def nodes(
    count: int, links: Iterable[tuple[int, int]] | None = None, wall_offsets: Sequence[float] | None = None
) -> AsyncIterator[list[Node]]:
    """All know each other as training. `links`: pairs that are connected; all of them where it is None."""
    pairs = list(itertools.combinations(range(count), 2))
    async with members(count, set(pairs)) as group:
        found = []
        for number, member in enumerate(group):
            if wall_offsets is not None:
                member.host.clock = Clock(lambda ahead=wall_offsets[number]: virtual_wall() + ahead)
            known = Membership(member.host, role=TRAINER)
            peer = Peer(member.host, known, Register(known), VirtualCompute())
            peer.members.update(state=TRAINING)
            found.append(Node(peer, member.transport, {}))
            _watch(found[-1])
        wanted = pairs if links is None else links
        await asyncio.gather(*(meet(group[one].host, group[other].host) for one, other in wanted))
        records = {node.id: _record(node.peer) for node in found}
        for node in found:
            node.peer.members.members.update({who: one for who, one in records.items() if who != node.id})
        try:
            yield found
        finally:
            for node in found:
                node.peer.host.on_lost.clear()  # the end of the test is nobody's loss


def _record(peer: Peer) -> Record:
    return Record(peer.id, [str(endpoint) for endpoint in peer.host.endpoints], born=0.0, state=TRAINING)


def _watch(node: Node) -> None:
    opens = node.peer.rounds.open

    def watched(round_, reducer) -> None:
        node.before[round_.group.round_index] = flat(round_.vectors)
        opens(round_, reducer)

    node.peer.rounds.open = watched


def flat(vectors: Vectors) -> np.ndarray:
    """A copy of the one that is not empty."""
    return next((vector.numpy().copy() for vector in vectors if len(vector)), np.empty(0))


def vectors_of(row: np.ndarray) -> Vectors:
    empty = {np.float32: torch.float64, np.float64: torch.float32}[row.dtype.type]
    pair = torch.from_numpy(row.copy()), torch.empty(0, dtype=empty)
    return pair if row.dtype == np.float32 else (pair[1], pair[0])


async def average(
    group: Sequence[Node],
    strategy: AnyStrategy,
    rows: np.ndarray,
    *,
    series: str = TRAIN,
    weights: Mapping[int, float] | Sequence[float] | None = None,
    absent: Sequence[int] = (),
    deaths: Mapping[int, float] | None = None,
    timeout_seconds: float | None = None,
) -> list[Outcome | BaseException | None]:
    """What each one's averaging returned or raised; None for those who do not call.

    `deaths`: after how many seconds a peer dies.
    """
    shapes = [((rows.shape[1],), str(rows.dtype))]

    async def one(number: int, node: Node) -> Outcome | None:
        if number in absent:
            return None
        if number in (deaths or {}):
            asyncio.get_running_loop().call_later(deaths[number], _die, node, asyncio.current_task())
        weight = 1.0 if weights is None else weights[number]
        return await strategy.all_reduce(
            node.peer, series, vectors_of(rows[number]), weight, shapes, timeout_seconds=timeout_seconds
        )

    for node in group:
        node.before.clear()
    return await asyncio.gather(*(one(number, node) for number, node in enumerate(group)), return_exceptions=True)


def _die(node: Node, averaging: asyncio.Task[Outcome | None]) -> None:
    """Nothing comes from it any more: it dials nobody either."""
    node.transport.crash()
    node.transport.dial = _dial_of_the_dead
    averaging.cancel()


async def _dial_of_the_dead(endpoint: Endpoint) -> Channel:
    raise PeerLost("this machine is dead")


def held(outcomes: Sequence[Outcome | BaseException | None], rows: np.ndarray) -> np.ndarray:
    """(peers, size): what each one has after the averaging; whoever has no result keeps its row."""
    after = [
        flat(outcome.vectors) if isinstance(outcome, Outcome) else row
        for outcome, row in zip(outcomes, rows, strict=True)
    ]
    return np.stack(after)


def after_each_round(group: Sequence[Node], outcomes: Sequence[Outcome], rounds: int) -> list[np.ndarray]:
    """(peers, size) after each round, where all peers took part in every one."""
    for node, outcome in zip(group, outcomes, strict=True):
        assert isinstance(outcome, Outcome), repr(outcome)
        assert outcome.rounds_done == len(node.before) == rounds
    last = np.stack([flat(outcome.vectors) for outcome in outcomes])
    return [*(np.stack([node.before[number] for node in group]) for number in range(1, rounds)), last]
