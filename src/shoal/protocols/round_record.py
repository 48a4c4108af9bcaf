"""What is said in a group round, and what a group is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.net.envelope import Message
from shoal.protocols.roll_record import Roll

LEFT_OUT, FAILED, CLOSED, STRANGER, DUPLICATE = "left out", "round failed", "round closed", "stranger", "duplicate"
"""Codes of refusals: you are lost here; this member's round failed; it is long over; you are not in it; not twice."""


class Where(Message, frozen=True):
    """Which group round: of which averaging, roll, round (from 0) and group (its first member's number)."""

    series: str
    number: int
    roll_id: str
    round_index: int
    first: int


class Ended(Message, frozen=True):
    """How a round ended: a digest of the versions of all parts."""

    where: Where
    versions: bytes


class Begin(Message, frozen=True):
    """Opens the stream to a reducer. All members with one `source` hold one value; it weighs `mass`, once.

    `last`: the sender's last round of this series that succeeded. Members of one round ended it equal, unless one was
    cut off: here it learns of it.
    """

    where: Where
    source: str
    mass: float
    last: Ended | None = None


class PartSent(Message, frozen=True):
    """The sender's values of part `index`; the payload holds them."""

    index: int


class PartMeanSent(Message, frozen=True):
    """The mean of part `index` in one version, over a total `weight`; without weight there is no payload.

    `contributors`: numbers, within the group, of those whose values are in it.
    """

    index: int
    attempt: int
    digest: bytes
    weight: float
    contributors: list[int]


class Recover(Message, frozen=True):
    """Opens a stream on which parts are asked for, when their owner did not deliver them."""

    where: Where


class Want(Message, frozen=True):
    """Give me the mean of part `index` (reduce it, where it is missing), or with `values` your values of it."""

    index: int
    values: bool


class Given(Message, frozen=True):
    """The answer to Want: a mean that is held, or else, where they were asked for, the member's own values."""

    index: int
    mean: PartMeanSent | None
    source: str = ""
    mass: float = 0.0


class AskVersions(Message, frozen=True):
    """Which version of each part do you hold as exchange number `exchange` of this round begins?"""

    where: Where
    exchange: int


class VersionsHeld(Message, frozen=True):
    """(attempt, digest) of each part."""

    versions: list[tuple[int, bytes]]


@dataclass(frozen=True)
class Group:
    """The members of one group round, the same at each of them: it follows from the roll.

    `numbers`: their places in the roll; `masses`: the weight of each one's source, as planned.
    """

    roll: Roll
    round_index: int
    numbers: tuple[int, ...]
    masses: tuple[float, ...]

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Their peer ids."""
        return tuple(self.roll.members[number] for number in self.numbers)

    @cached_property
    def bandwidths(self) -> tuple[float | None, ...]:
        """Bytes per second, as the roll says."""
        return tuple(self.roll.bandwidths[number] for number in self.numbers)

    @cached_property
    def most_mass(self) -> float:
        """More than this no honest member claims: where rounds failed, some weights may count again in later ones."""
        return sum(self.roll.weights) * len(self.roll.members)

    @cached_property
    def where(self) -> Where:
        """What this round is called in messages."""
        roll = self.roll
        return Where(roll.series, roll.number, roll.roll_id, self.round_index, self.numbers[0])


def whole_group(roll: Roll, round_index: int = 0) -> Group:
    """Everybody in the roll, in one group."""
    return Group(roll, round_index, tuple(range(len(roll.members))), tuple(roll.weights))
