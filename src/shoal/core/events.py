"""What happened, in order, with the reason: a bounded log that the report, the screen and the tests read.

Strangers can cause refusals, as many as they like. They are kept apart, so that they push nothing else out, and of a
flood of them only some are told, with a count of the rest.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.gauges import Allowance

KEPT_EVENTS, KEPT_REFUSALS = 1000, 200
"""Older events are forgotten, their counts are not."""
REFUSALS_AT_ONCE, REFUSALS_PER_SECOND = 50, 0.2
MAX_REASON_CHARS = 500
REFUSED = "refused"


@dataclass(frozen=True)
class Event:
    """One thing that happened, seen from one peer.

    `kind` is one of joined, left, lost, refused, averaged, failed, late, downloaded, behind, repaired, diverged,
    yielded, warning, advice (something a person should change), fault (a defect of shoal). docs/reference/errors.md
    has an example of each. `peer_id` is the other peer that it is about; empty where it is about none, or this one.
    `at_seconds` counts from the moment this peer joined.
    """

    at_seconds: float
    kind: str
    peer_id: str
    reason: str

    def __str__(self) -> str:
        who = f" {self.peer_id[:8]}" if self.peer_id else ""
        return f"{self.at_seconds:8.1f} s  {self.kind}{who}: {self.reason}"


class EventLog:
    """Collects events; `on_event` sees each one as it happens (on the network thread)."""

    def __init__(self, now: Callable[[], float], on_event: Callable[[Event], None] | None = None) -> None:
        self._now = now
        self._started_at = now()
        self._on_event = on_event
        self._events: deque[tuple[int, Event]] = deque(maxlen=KEPT_EVENTS)
        self._refusals: deque[tuple[int, Event]] = deque(maxlen=KEPT_REFUSALS)
        self._told = {
            side: Allowance(REFUSALS_AT_ONCE, REFUSALS_PER_SECOND, self._started_at) for side in (True, False)
        }
        self._untold = 0
        self._serials = itertools.count()
        self.counts: Counter[str] = Counter()

    @property
    def recent(self) -> list[Event]:
        """The events that are kept, oldest first."""
        return [event for _, event in sorted([*self._events, *self._refusals], key=lambda entry: entry[0])]

    def seconds(self) -> float:
        """Seconds since this peer joined; on the loop only."""
        return self._now() - self._started_at

    def add(self, kind: str, reason: str, peer_id: str = "") -> None:
        """Record one event. A callback of the user that raises is itself recorded, and goes no further."""
        self.counts[kind] += 1
        if kind == REFUSED:
            if not self._told[peer_id == ""].take(self._now()):
                self._untold += 1
                return
            if self._untold:
                reason, self._untold = f"{reason[:MAX_REASON_CHARS]} (and {self._untold} refusals before it)", 0
        event = Event(self.seconds(), kind, peer_id, reason[: MAX_REASON_CHARS + 50])
        self._keep(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001  the user's callback is a failure boundary
            self._keep(Event(event.at_seconds, "fault", "", f"on_event raised {error!r}"[:MAX_REASON_CHARS]))
            self.counts["fault"] += 1

    def _keep(self, event: Event) -> None:
        kept = self._refusals if event.kind == REFUSED else self._events
        kept.append((next(self._serials), event))
