"""The charter: what the founder of a run fixed, once, for everybody."""

from __future__ import annotations

import msgspec

from shoal.core.errors import CharterMismatch, ModelMismatch
from shoal.net.envelope import Message
from shoal.net.handshake import PROTOCOL_VERSION

Options = dict[str, str | int | float | bool | None]
Schema = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each tensor that is averaged, in order."""
SAME_MODEL = "all peers of a run attach the same model, and train the same parameters of it"


class Charter(Message, frozen=True):
    """`registrar` decides who founds; the rest is None until the founder has attached its model."""

    run: str
    charter_id: str
    registrar: str
    founded_at: float
    protocol: int = PROTOCOL_VERSION
    founder: str | None = None
    strategy: Options | None = None
    schema: Schema | None = None

    @property
    def complete(self) -> bool:
        """Whether a founder has fixed strategy and model."""
        return self.schema is not None

    def completed(self, founder: str, strategy: Options, schema: Schema) -> Charter:
        """The charter as its founder fixes it."""
        return msgspec.structs.replace(self, founder=founder, strategy=strategy, schema=schema)


def check_strategy(charter: Charter, ours: Options | None) -> None:
    """A peer that names no strategy adopts the run's. Raises CharterMismatch with the first field that differs."""
    if ours is None or charter.strategy is None:
        return
    for field in sorted(ours.keys() | charter.strategy.keys(), key=lambda field: (field != "name", field)):
        mine, theirs = ours.get(field), charter.strategy.get(field)
        if mine != theirs:
            raise CharterMismatch("strategy" if field == "name" else f"strategy.{field}", mine, theirs)


def check_schema(charter: Charter, ours: Schema) -> None:
    """Raises ModelMismatch naming the first tensor in which this model is not the run's."""
    if charter.schema is None:
        return
    for mine, theirs in zip(ours, charter.schema, strict=False):
        if mine != theirs:
            raise ModelMismatch(f"this model has {_told(mine)} where the run's model has {_told(theirs)}; {SAME_MODEL}")
    if len(ours) != len(charter.schema):
        longer, whose = (
            (ours, "only this model") if len(ours) > len(charter.schema) else (charter.schema, "only the run's model")
        )
        raise ModelMismatch(f"{whose} has {_told(longer[min(len(ours), len(charter.schema))])}; {SAME_MODEL}")


def _told(entry: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = entry
    return f"{name} {tuple(shape)} {dtype}"


class Standing(Message, frozen=True):
    """What decides which of two runs of one name and secret stays: `progress` counts optimizer steps of its state."""

    progress: int
    founded_at: float
    charter_id: str


def stays(ours: Standing, theirs: Standing) -> bool:
    """Whether our run stays when it meets another of its name and secret: the more trained, then the older one.

    Both ends decide alike, since the last field never ties.
    """
    return (-ours.progress, ours.founded_at, ours.charter_id) < (-theirs.progress, theirs.founded_at, theirs.charter_id)
