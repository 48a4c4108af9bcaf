"""How the roll of a large swarm is handed out: by its members, or its collector's line would be full for seconds.

A roll of 1024 members has 84 KB, and a line of 100 Mbit/s takes 7 s to send it to all of them. So the collector gives
it to the first member of each block, and tells the others of that block to take it there:

    member                       collector                        first of its block
      Here             ->
                       <-          elsewhere(who, digest, place)
      TakeRoll(n)                  ->                               once it has it:
                                   <-                               Roll

Neighbours in the roll share a group, so they need a link in any case. Where that first one dies, or gives another roll
than the collector's, the member calls the collector again and gets it from there.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from shoal.core.address import parse_endpoint
from shoal.core.errors import AddressError, RefusedError, RemoteError
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.protocols.roll_record import Roll

ELSEWHERE = "elsewhere"
BLOCK, LARGE_ROLL = 32, 64
TAKE_SECONDS = 5.0


class TakeRoll(Message, frozen=True):
    """Give me the roll of this number, as soon as you have it."""

    series: str
    number: int


class RollPassing:
    """Both sides of it at one peer. `held(series, number)`: the roll of that number, where this peer has it; what
    `asked()` awaits is over whenever this peer may have got one."""

    def __init__(
        self, host: Host, held: Callable[[str, int], Roll | None], asked: Callable[[], Awaitable[object]]
    ) -> None:
        self._host, self._held, self._asked = host, held, asked
        host.serve(TakeRoll, self._give)

    def check(self, roll: Roll, caller: str) -> None:
        """At the collector: whether it gives the caller its roll itself. Raises RefusedError, elsewhere."""
        number = roll.members.index(caller)
        first = number - number % BLOCK
        who = roll.members[first]
        if len(roll.members) > LARGE_ROLL and first != number and self._host.peer_id not in (who, caller):
            place = next(iter(roll.places[first]), "") if roll.places else ""
            raise RefusedError(f"{who} {_digest(roll)} {place}", ELSEWHERE)

    async def take(self, told: str, series: str, number: int) -> Roll | None:
        """The roll from where the collector said it is; None where that is not to be had."""
        who, _, rest = told.partition(" ")
        digest, _, place = rest.partition(" ")
        try:
            if not self._host.linked(who):
                await self._host.link([parse_endpoint(place)], who)
            roll = await self._host.call(who, TakeRoll(series, number), Roll, timeout_seconds=TAKE_SECONDS)
        except (RemoteError, AddressError):
            return None
        return roll if _digest(roll) == digest else None

    def nearer(self, who: str) -> str:
        """The end of a refusal that sends a caller to a nearer collector: who that is, and where."""
        remote = self._host.remotes.get(who)
        return f" {who} {remote.endpoints[0]}" if remote and remote.endpoints else ""

    async def follow(self, told: str, is_nearer: Callable[[str], bool]) -> str:
        """Link to the collector that a refusal names, if it is nearer; empty where there is none."""
        _, who, place = [*told.split(" "), "", ""][:3]
        if not who or not is_nearer(who):
            return ""
        try:
            if not self._host.linked(who):
                await self._host.link([parse_endpoint(place)], who)
        except (RemoteError, AddressError):
            return ""
        return who

    async def _give(self, peer_id: str, take: TakeRoll) -> Message:
        try:
            async with asyncio.timeout(TAKE_SECONDS):
                while (roll := self._held(take.series, take.number)) is None:
                    await self._asked()
        except TimeoutError:
            raise RefusedError("this peer has no roll of that number") from None
        if peer_id not in roll.members:
            raise RefusedError("a stranger to this roll")
        return roll


def _digest(roll: Roll) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(roll), digest_size=16).hexdigest()
