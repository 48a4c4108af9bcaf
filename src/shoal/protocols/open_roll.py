"""A roll while its collector gathers it: who has called, who was invited, and until when it stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shoal.core.errors import RefusedError
from shoal.overlay.member_record import CATCHING_UP, Record
from shoal.overlay.register import Register
from shoal.protocols.roll_record import STEP, Here, Roll


@dataclass
class OpenRoll:
    """`opened_at`: on the collector's clock, as all times here."""

    opened_at: float
    callers: dict[str, Here] = field(default_factory=dict)
    invited: dict[str, None] = field(default_factory=dict)
    unanswered: dict[str, None] = field(default_factory=dict)
    """Of those invited."""
    dialled: dict[str, None] = field(default_factory=dict)
    """Of those: there is no link to them yet."""
    busy: dict[str, None] = field(default_factory=dict)
    """Members that are in an averaging now, and will call for this one when that has ended."""
    reached_at: float = 0.0
    """When somebody was last told of this roll who could not be told at its beginning."""
    is_looking: bool = False
    """For newcomers that its collector does not know yet."""
    lost: dict[str, None] = field(default_factory=dict)
    found: Roll | None = None
    """The record of a collector that died while it handed it out."""
    superseded: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Future[dict[str, Roll | RefusedError]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def look(self, look: Callable[[], Awaitable[None]]) -> None:
        """Stay open meanwhile."""
        self.is_looking = True
        try:
            await look()
        finally:
            self.is_looking = False
            self.changed.set()

    def far_behind(self, participants: dict[str, Record]) -> set[str]:
        """Whoever is more than one step behind has to catch up first. One that missed the last step may be back."""
        step = max((here.stand.step for here in self.callers.values() if here.stand), default=0)
        return {peer_id for peer_id, record in participants.items() if record.progress < step - 1}

    def closes_at(self, deadline_seconds: float, patience_seconds: float) -> float:
        """Each member has `deadline_seconds` to call from when it was told; all together `patience_seconds`.

        Members in mid-averaging are waited for: a roll without them would be followed by theirs without its members,
        and the two halves would never average together again.
        """
        latest = self.opened_at + patience_seconds
        if self.is_looking or self.dialled or self.busy.keys() - self.callers.keys() - self.lost.keys():
            return latest
        return min(latest, max(self.opened_at, self.reached_at) + deadline_seconds)


def asking_to_wait(register: Register, series: str) -> list[Record]:
    """Newcomers that would never take the steps which they missed as fast as the others take new ones."""
    everybody = register.everybody(CATCHING_UP).values() if series == STEP else ()
    return [record for record in everybody if record.behind_seconds > 0]
