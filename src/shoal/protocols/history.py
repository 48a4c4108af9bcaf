"""What became of this peer's averagings: the figures of its report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shoal.core.errors import RoundError
from shoal.core.events import EventLog
from shoal.protocols.outcome import Outcome

KEPT = 10_000


@dataclass(frozen=True)
class Averaging:
    """One averaging that was applied. `stale_steps`: local steps between its snapshot and its application.

    `rounds_done` of `rounds_planned` group rounds succeeded; `failures` says why the others did not.
    """

    number: int
    at_seconds: float
    members: tuple[str, ...]
    contributed: tuple[str, ...]
    exact: bool
    rounds_done: int
    rounds_planned: int
    failures: tuple[str, ...]
    stale_steps: int


@dataclass(frozen=True)
class AveragingFailure:
    """One averaging that failed and changed nothing."""

    number: int
    at_seconds: float
    members: tuple[str, ...]
    reason: str


class History:
    """The averagings of one peer, the newest 10,000 of each kind."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.applied: deque[Averaging] = deque(maxlen=KEPT)
        self.failures: deque[AveragingFailure] = deque(maxlen=KEPT)
        self.applied_count = 0

    def averaged(self, outcome: Outcome, stale_steps: int) -> None:
        """An averaging was applied."""
        roll = outcome.roll
        entry = Averaging(
            roll.number, self._log.seconds(), tuple(roll.members), outcome.contributed, outcome.exact,
            outcome.rounds_done, outcome.rounds_planned, outcome.failures, stale_steps,
        )  # fmt: skip
        self.applied.append(entry)
        self.applied_count += 1
        met = f"number {roll.number} with {len(roll.members)} members"
        rounds = f", {outcome.rounds_done} of {outcome.rounds_planned} rounds" if outcome.failures else ""
        self._log.add("averaged", met + rounds + ("" if outcome.exact else ", not exact"))

    def failed(self, error: Exception) -> None:
        """An averaging failed."""
        number, members = (error.number, error.members) if isinstance(error, RoundError) else (0, ())
        reason = error.reason if isinstance(error, RoundError) else str(error)
        self.failures.append(AveragingFailure(number, self._log.seconds(), members, reason))
        self._log.add("failed", str(error))
