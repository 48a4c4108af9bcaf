"""What members say of themselves, and to each other when they meet."""

from __future__ import annotations

import msgspec

from shoal.net.envelope import Message
from shoal.overlay.charter import Charter, Options, Schema

TRAINER, SEED = "trainer", "seed"
JOINED, CATCHING_UP, TRAINING = "joined", "catching up", "training"


class Record(Message, frozen=True):
    """What a peer says of itself. `born` and `version` order its records; `rolls` is its newest number per series.

    In gradient mode `gathered` samples are those towards its next step, and `waits` says that it has stopped for it. A
    newcomer that can not keep up with the steps it missed needs `behind_seconds` for them, and asks to be waited for.
    """

    peer_id: str
    endpoints: list[str]
    born: float
    role: str = TRAINER
    state: str = JOINED
    version: int = 0
    steps: int = 0
    progress: int = 0
    step_seconds: float = 0.0
    gathered: float = 0.0
    samples_per_second: float = 0.0
    waits: bool = False
    behind_seconds: float = 0.0
    averagings: int = 0
    bandwidth: float | None = None
    first_batch: str = ""
    rolls: dict[str, int] = msgspec.field(default_factory=dict)


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
