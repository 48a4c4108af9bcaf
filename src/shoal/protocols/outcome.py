"""What one averaging brought."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocols.butterfly import RoundReport, RoundResult
from shoal.protocols.roll_record import Roll
from shoal.tensors.flat import Vectors


@dataclass(frozen=True)
class Outcome:
    """What an averaging brought: new vectors, and how it went.

    `rounds` reports the group rounds that succeeded here, `failures` gives the reason for each that did not. `exact`:
    the last round's mass is the roll's total weight, so the result is the weighted mean over the whole roll.
    """

    vectors: Vectors
    roll: Roll
    rounds_planned: int
    rounds: tuple[RoundReport, ...]
    failures: tuple[str, ...]
    exact: bool

    @property
    def rounds_done(self) -> int:
        """How many group rounds succeeded here."""
        return len(self.rounds)

    @property
    def contributed(self) -> tuple[str, ...]:
        """Members whose values went whole into the groups that this peer was in."""
        return tuple(dict.fromkeys(who for report in self.rounds for who in report.contributed))


def is_exact(roll: Roll, last: RoundResult) -> bool:
    """Whether each part of the last round stands for the whole weight of the roll."""
    total = sum(roll.weights)
    return all(abs(weight - total) <= 1e-9 * total for weight in last.weights)
