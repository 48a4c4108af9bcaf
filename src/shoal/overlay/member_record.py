"""What members say of themselves, and to each other when they meet."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.net.envelope import Message
from shoal.overlay.charter import Charter, Options, Schema

TRAINER, SEED = "trainer", "seed"
JOINED, CATCHING_UP, TRAINING = "joined", "catching up", "training"


Word = Annotated[str, msgspec.Meta(max_length=100)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Figure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""No NaN: it is neither newer nor older than anything."""


class Record(Message, frozen=True, omit_defaults=True):
    """What a peer says of itself; what is as by default does not travel.

    `born` and `version` order its records; `rolls` is its newest number per series.
    In gradient mode `gathered` samples are those towards its next step, and `waits` says that it has stopped for it. A
    newcomer that can not keep up with the steps it missed needs `behind_seconds` for them, and asks to be waited for.
    """

    peer_id: str
    endpoints: list[str]
    born: Figure
    role: Word = TRAINER
    state: Word = JOINED
    version: Count = 0
    steps: Count = 0
    progress: Count = 0
    step_seconds: Figure = 0.0
    gathered: Figure = 0.0
    samples_per_second: Figure = 0.0
    waits: bool = False
    behind_seconds: Figure = 0.0
    averagings: Count = 0
    bandwidth: Figure | None = None
    first_batch: Word = ""
    rolls: Annotated[dict[Word, Count], msgspec.Meta(max_length=10)] = msgspec.field(default_factory=dict)

    def listed(self) -> Record:
        """For the register: what changes rarely, so that whoever reads it again finds what it has read before. Figures
        of gradient mode are in it where there are any."""
        gathers = self.gathered > 0 or self.waits
        return Record(
            self.peer_id, self.endpoints, self.born, self.role, self.state,
            progress=self.progress if gathers else 0,
            step_seconds=float(f"{self.step_seconds:.1g}"),
            gathered=self.gathered,
            samples_per_second=self.samples_per_second if gathers else 0.0,
            waits=self.waits, behind_seconds=self.behind_seconds, rolls=self.rolls,
        )  # fmt: skip


class Acquaintance(Message, frozen=True):
    """Somebody who may be found there."""

    peer_id: str
    endpoints: list[str]


class Introduce(Message, frozen=True):
    """The first call on a link. `strategy` is what the caller asked for; None adopts the run's."""

    record: Record
    charter: Charter | None
    strategy: Options | None
    acquaintances: list[Acquaintance]


class Introduced(Message, frozen=True):
    """The answer to Introduce."""

    record: Record
    charter: Charter | None
    acquaintances: list[Acquaintance]


class Status(Message, frozen=True):
    """The sender's newest record."""

    record: Record


class Claim(Message, frozen=True):
    """A peer wants to attach a model: is there a charter already, and if not, may it found the run?"""

    strategy: Options
    schema: Schema


class Claimed(Message, frozen=True):
    """The charter as it stands now: incomplete means wait. `granted`: the caller founds the run with this claim."""

    charter: Charter
    granted: bool


class Complaint(Message, frozen=True):
    """A peer that could not take part says why, so that the reason shows at both ends."""

    reason: str
