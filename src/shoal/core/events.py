"""What happened, in order, with the reason: a bounded log that the report, the screen and the tests read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

KEPT_EVENTS = 1000
"""Older events are forgotten, their counts are not."""


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
        self.recent: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.counts: Counter[str] = Counter()

    def seconds(self) -> float:
        """Seconds since this peer joined; on the loop only."""
        return self._now() - self._started_at

    def add(self, kind: str, reason: str, peer_id: str = "") -> None:
        """Record one event. A callback of the user that raises is itself recorded, and goes no further."""
        event = Event(self.seconds(), kind, peer_id, reason)
        self.recent.append(event)
        self.counts[kind] += 1
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001  the user's callback is a failure boundary
            self.recent.append(Event(event.at_seconds, "fault", "", f"on_event raised {error!r}"))
            self.counts["fault"] += 1
