"""Who of the connections that nobody has authenticated yet may shake hands now, who waits, and who has to go.

A handshake costs memory, waiting costs next to none: few are inside at once. A peer needs milliseconds for it, whoever
means harm stays as long as it is let. So under a flood the newest go in first, and whoever has been inside for a while
makes room for them. Those from the address with the most connections go before others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

INSIDE, INSIDE_PER_ADDRESS = 64, 48
WAITING_PER_ADDRESS = 0.5
"""Of all that may wait: what those from one address may take up."""
SETTLED_SECONDS = 1.0
"""Nobody is sent away earlier than this: many peers that come in one moment are no flood."""

Guest = TypeVar("Guest")


@dataclass
class Step(Generic[Guest]):
    """What follows: who goes in, who is sent away, and when to look again (None: only when somebody comes or goes)."""

    enter: list[Guest] = field(default_factory=list)
    leave: list[Guest] = field(default_factory=list)
    again_at: float | None = None


class Crowd(Generic[Guest]):
    """Everybody outside and inside, by address, in the order in which they came."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._waiting: dict[str, dict[Guest, float]] = {}
        self._inside: dict[str, dict[Guest, float]] = {}

    def arrive(self, guest: Guest, address: str, now: float) -> Step[Guest]:
        """Somebody came."""
        step = Step[Guest]()
        waiting = self._waiting.setdefault(address, {})
        waiting[guest] = now
        if len(waiting) > self.max_waiting * WAITING_PER_ADDRESS or _count(self._waiting) > self.max_waiting:
            fullest = max(self._waiting, key=lambda place: len(self._waiting[place]))
            crowded = address if len(waiting) > self.max_waiting * WAITING_PER_ADDRESS else fullest
            step.leave.append(_take(self._waiting, crowded, next(iter(self._waiting[crowded]))))
        return self._fill(step, now)

    def gone(self, guest: Guest, address: str, now: float) -> Step[Guest]:
        """Somebody is authenticated, was refused, or gave up."""
        for side in (self._waiting, self._inside):
            if guest in side.get(address, ()):
                _take(side, address, guest)
        return self.look(now)

    def look(self, now: float) -> Step[Guest]:
        """Whether time alone has changed something."""
        return self._fill(Step(), now)

    def _fill(self, step: Step[Guest], now: float) -> Step[Guest]:
        while self._waiting:
            free = [place for place in self._waiting if len(self._inside.get(place, ())) < INSIDE_PER_ADDRESS]
            has_room = free and _count(self._inside) < INSIDE
            if not has_room:
                fullest = max(self._inside, key=lambda place: len(self._inside[place]))
                oldest, since = next(iter(self._inside[fullest].items()))
                if now < since + SETTLED_SECONDS:
                    step.again_at = since + SETTLED_SECONDS
                    break
                step.leave.append(_take(self._inside, fullest, oldest))
                continue
            place = max(free, key=lambda place: next(reversed(self._waiting[place].values())))
            newest = _take(self._waiting, place, next(reversed(self._waiting[place])))
            self._inside.setdefault(place, {})[newest] = now
            step.enter.append(newest)
        return step


def _count(side: dict[str, dict[Guest, float]]) -> int:
    return sum(map(len, side.values()))


def _take(side: dict[str, dict[Guest, float]], address: str, guest: Guest) -> Guest:
    del side[address][guest]
    if not side[address]:
        del side[address]
    return guest
