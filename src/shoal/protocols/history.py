"""What became of this peer's averagings: the figures of its report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shoal.core.errors import RoundError
from shoal.core.events import EventLog
from shoal.protocols.outcome import Outcome

KEPT, KEPT_STEPS = 10_000, 1_000
NOT_DONE, THREE_IN_A_ROW = "not done within", 3


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


@dataclass(frozen=True)
class Given:
    """What one peer gave to a step. `batches`: ranges of its own batches, counted from 1, both ends included."""

    samples: float
    batches: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step of the swarm (gradient mode), as it was taken here.

    `given`: what each peer gave whose gradient is wholly in it; `exact`: nobody else's is in it in part. `why` this
    peer stopped to gather, see planning/gathering.py.
    """

    step: int
    at_seconds: float
    given: dict[str, Given]
    why: str
    exact: bool
    gathering_seconds: float
    averaging_seconds: float

    @property
    def samples(self) -> float:
        """Of all that gave."""
        return sum(given.samples for given in self.given.values())


class History:
    """The averagings of one peer, the newest 10,000 of each kind, and its newest 1,000 global steps."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.applied: deque[Averaging] = deque(maxlen=KEPT)
        self.failures: deque[AveragingFailure] = deque(maxlen=KEPT)
        self.applied_count = 0
        self._too_slow = 0
        self.steps: deque[GlobalStep] = deque(maxlen=KEPT_STEPS)
        self.samples_per_second = 0.0
        """Of all peers together, in gradient mode."""

    def averaged(self, outcome: Outcome, stale_steps: int) -> None:
        """An averaging was applied."""
        self._too_slow = 0
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

    def stepped(self, step: GlobalStep) -> None:
        """A global step was taken."""
        self._too_slow = 0
        self.steps.append(step)
        self.applied_count += 1
        exact = "" if step.exact else ", not exact"
        self._log.add("averaged", f"step {step.step}: {step.samples:g} samples of {len(step.given)} peers{exact}")

    def failed(self, error: Exception) -> None:
        """An averaging failed."""
        number, members = (error.number, error.members) if isinstance(error, RoundError) else (0, ())
        reason = error.reason if isinstance(error, RoundError) else str(error)
        self.failures.append(AveragingFailure(number, self._log.seconds(), members, reason))
        self._log.add("failed", str(error))
        self._too_slow = self._too_slow + 1 if reason.startswith(NOT_DONE) else 0
        if self._too_slow == THREE_IN_A_ROW:
            self._log.add("advice", f"three averagings in a row: {reason}. Make timeout_seconds longer")
