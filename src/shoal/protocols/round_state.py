"""What one member of a group round knows: which parts it holds, in which version, and who was lost.

obtaining   parts come in, from their owners or from those who took over; a lower version replaces a higher one
closing     every part is held; from now on a version changes only by fetching, in the closing exchange
over        settled (this result stands) or failed (every value is as it was before)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from shoal.core.errors import PeerLost, ProtocolError, RefusedError, RemoteError
from shoal.net.host import Host
from shoal.planning.shares import Part, cut_parts, shares_by_bandwidth
from shoal.planning.versions import Version, Versions, reducer_order
from shoal.protocols.round_record import LEFT_OUT, Given, Group, PartMeanSent
from shoal.tensors.flat import ITEM_BYTES, WIRE_DTYPES, Vectors, all_finite, as_bytes, empty_vectors
from shoal.tensors.memory import Memory

DIGEST_BYTES = 16
OBTAINING, CLOSING, SETTLED, FAILED = "obtaining", "closing", "settled", "failed"

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Held:
    """One part's mean in one version. `values` is None where nobody had weight: everyone's own values stay."""

    version: Version
    weight: float
    contributors: tuple[int, ...]
    values: Tensor | None


def held_as(attempt: int, weight: float, contributors: tuple[int, ...], values: Tensor) -> Held:
    """A mean that this member has just reduced."""
    content = as_bytes(values) if weight > 0 else b""
    return Held((attempt, xxhash.xxh3_128_digest(content)), weight, contributors, values if weight > 0 else None)


class Round:
    """One group round at one member. `vectors` are its own values, `source` and `mass` what they stand for."""

    def __init__(
        self, host: Host, group: Group, vectors: Vectors, source: str, mass: float, part_bytes: int,
        dropped: Counter[str], memory: Memory,
    ) -> None:  # fmt: skip
        shares = shares_by_bandwidth(group.bandwidths)
        owned = cut_parts([len(vector) for vector in vectors], ITEM_BYTES, shares, part_bytes)
        self.host, self.group, self.vectors, self.source, self.mass = host, group, vectors, source, mass
        self._memory = memory
        self._result = self._new_result()
        self._replaced = False  # whether a mean was: who fetched it may still be sent what lies in the result
        self.started_at = host.clock.now()
        self.before_seconds = 0.0  # how long the earlier rounds of its averaging took here
        self.ended_at: float | None = None
        self.me = group.members.index(host.peer_id)
        self.parts: list[Part] = [part for share in owned for part in share]
        self.owners = [number for number, share in enumerate(owned) for _ in share]
        self._shares: dict[int, list[int]] = {}
        for index, owner in enumerate(self.owners):
            self._shares.setdefault(owner, []).append(index)
        self._missing = {owner: len(share) for owner, share in self._shares.items()}
        self.held: list[Held | None] = [None] * len(self.parts)
        self.state = OBTAINING
        self.lists: list[Versions] = []
        self.lost: dict[str, str] = {}
        self.left: dict[str, None] = {}  # those of the lost who said goodbye
        self.broke_off: dict[str, None] = {}
        self.dropped = dropped
        self.on_lost: list[Callable[[str, str], None]] = []
        self.refused_by: dict[str, None] = {}
        self.cut_off = ""
        self._waiting: dict[int | None, dict[asyncio.Future[None], Callable[[], Any]]] = {}

    # -- waiting

    def change(self, owner: int | None = None) -> None:
        """Wake those who wait for what is now true; of a change of one owner's parts few have to know."""
        owners = self._waiting if owner is None else (None, owner)
        for waiter, condition in [entry for who in owners for entry in self._waiting.get(who, {}).items()]:
            if not waiter.done() and condition():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], Any], owner: int | None = None) -> None:
        """Return as soon as the condition holds. It is looked at after every change of this round; with `owner` not
        after those that are about another one's parts."""
        while not condition():
            with self._waiter(condition, owner) as waiter:
                await waiter

    async def unless(
        self, is_needless: Callable[[], bool], work: Coroutine[Any, Any, Result], owner: int | None = None
    ) -> asyncio.Task[Result] | None:
        """Await work in a task, and return that, its failure not raised; None where it was needless and was ended."""
        task = asyncio.create_task(work)
        try:
            with self._waiter(is_needless, owner) as waiter:
                task.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
                if not is_needless():
                    await waiter
            return task if task.done() else None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.cancelled():
                task.exception()  # it may come too late for anybody to ask for it

    async def unless_lost(self, who: str, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work that needs this member. Raises PeerLost as soon as it is lost, whatever the work waits for."""
        task = await self.unless(lambda: who in self.lost, work)
        if task is None:
            raise PeerLost(f"{who[:8]}: {self.lost[who]}")
        return task.result()

    @contextlib.contextmanager
    def _waiter(self, condition: Callable[[], Any], owner: int | None) -> Iterator[asyncio.Future[None]]:
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(owner, {})
        waiters[waiter] = condition
        try:
            yield waiter
        finally:
            del waiters[waiter]

    # -- the others

    def others(self) -> list[str]:
        """The members that are not lost, but this one."""
        return [who for who in self.group.members if who != self.host.peer_id and who not in self.lost]

    def lose(self, who: str, reason: str, *, politely: bool = False) -> None:
        """This member is out of the round, here, whatever becomes of it: its connection broke, or it is too late.

        `politely`: it said goodbye, over a connection that stood: so it is not this peer that was cut off.
        """
        if who in self.lost or who not in self.group.members or who == self.host.peer_id:
            return
        self.lost[who] = reason
        if politely:
            self.left[who] = None
        for notice in self.on_lost:
            notice(who, reason)
        self.change()

    def hear(self, who: str, error: RemoteError) -> None:
        """What a member's refusal means for this round.

        It left us out: then it is lost to us. One may be wrong about us: whoever accepts both ends equal with both. If
        two went on without us, they may end without anybody whom we still reach: we are the ones cut off.
        """
        if not isinstance(error, RefusedError):
            return
        if error.code == LEFT_OUT:
            self.refused_by[who] = None
            if len(self.refused_by) > 1:
                self.cut_off = f"{len(self.refused_by)} members went on without this peer ({error.reason})"
                self.change()
        self.lose(who, error.reason)

    # -- the parts

    def owned_by(self, number: int) -> list[int]:
        """The parts of one member's share."""
        return self._shares.get(number, [])

    def whole(self, number: int) -> bool:
        """Whether every part of one member's share is held here."""
        return not self._missing.get(number)

    def missing(self, number: int) -> list[int]:
        """The parts of one member's share that are not held here."""
        return [index for index in self.owned_by(number) if self.held[index] is None]

    def order(self, number: int) -> list[int]:
        """Who reduces the parts of a share: the owner, then those who take over."""
        return reducer_order(number, self.group.bandwidths)

    def own_values(self, index: int) -> Tensor:
        """This member's values of a part."""
        part = self.parts[index]
        return self.vectors[part.vector][part.start : part.stop]

    def place(self, index: int) -> Tensor:
        """Where the mean of a part is in the result, for its first version."""
        part = self.parts[index]
        return self._result[part.vector][part.start : part.stop]

    def hold(self, index: int, held: Held, *, fetched: bool = False) -> None:
        """Keep the lowest version of a part. Once closing began, only a fetched one counts."""
        current = self.held[index]
        if self.state != OBTAINING and not fetched:
            self.dropped["a result after closing"] += 1
        elif current is None or held.version < current.version:
            self._missing[self.owners[index]] -= current is None
            self._replaced |= current is not None
            self.held[index] = held
            self.change(self.owners[index])

    def versions(self) -> Versions:
        """What is held of each part, once every part is."""
        return tuple(held.version for held in self.held if held is not None)

    # -- parts on the wire

    def read_values(self, index: int, payload: memoryview) -> Tensor:
        """The values of a part that somebody sent. Raises ProtocolError."""
        if not 0 <= index < len(self.parts):
            raise ProtocolError(f"part {index} of {len(self.parts)}")
        part = self.parts[index]
        dtype = WIRE_DTYPES[part.vector]
        if len(payload) != (part.stop - part.start) * dtype.itemsize:
            raise ProtocolError(f"part {index} of {len(payload)} bytes")
        return torch.frombuffer(payload, dtype=dtype)

    def read_mean(self, message: PartMeanSent, payload: memoryview) -> Held:
        """A mean that somebody sent. Raises ProtocolError."""
        index, weight = message.index, message.weight
        if not 0 <= weight <= self.group.most_mass or not 0 <= message.attempt < len(self.group.members):
            raise ProtocolError(f"mean {index} of weight {weight} in attempt {message.attempt}")
        contributors, members = message.contributors, range(len(self.group.members))
        if len(message.digest) != DIGEST_BYTES or len(set(contributors)) < len(contributors):
            raise ProtocolError(f"mean {index} has no digest, or a contributor twice")
        if not all(number in members for number in contributors):
            raise ProtocolError(f"mean {index} has contributors that are no members")
        values = None
        if weight > 0:
            values = self.read_values(index, payload)
            if not all_finite(values):
                raise ProtocolError(f"mean {index} is not finite")
        elif len(payload) or not 0 <= index < len(self.parts):
            raise ProtocolError(f"mean {index} has no weight, and {len(payload)} bytes")
        return Held((message.attempt, message.digest), weight, tuple(message.contributors), values)

    def mean_message(self, index: int) -> tuple[PartMeanSent, memoryview]:
        """What is held of a part, ready to be sent."""
        held = self.held[index]
        assert held is not None
        payload = as_bytes(held.values) if held.values is not None else memoryview(b"")
        return PartMeanSent(index, *held.version, held.weight, list(held.contributors)), payload

    def given(self, index: int, *, values: bool) -> tuple[Given, memoryview]:
        """The answer to Want: what is held, else this member's own values."""
        if self.held[index] is not None or not values:
            mean, payload = self.mean_message(index)
            return Given(index, mean), payload
        if self.mass == 0:
            return Given(index, None), memoryview(b"")
        return Given(index, None, self.source, self.mass), as_bytes(self.own_values(index))

    # -- the end

    def _new_result(self) -> Vectors:
        return empty_vectors((len(self.vectors[0]), len(self.vectors[1])), self._memory)

    def settle(self) -> Vectors:
        """The result stands: new vectors, and what the others may still ask for lies in them."""
        if self._replaced:
            self._result = self._new_result()
        for index, held in enumerate(self.held):
            assert held is not None
            target = self.place(index)
            values = self.own_values(index) if held.values is None else held.values
            if values.data_ptr() != target.data_ptr():
                target.copy_(values)
            self.held[index] = replace(held, values=None if held.values is None else target)
        self.vectors, self.state, self.ended_at = self._result, SETTLED, self.host.clock.now()
        self.change()
        return self._result

    def fail(self) -> None:
        """This member keeps the values it had; whoever still asks is told so."""
        self.state, self.ended_at = FAILED, self.host.clock.now()
        self.held = [None] * len(self.parts)
        self.vectors = self._result = self.vectors[0][:0], self.vectors[1][:0]
        self.change()
