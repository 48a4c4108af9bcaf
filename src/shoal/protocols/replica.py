"""The seam between a strategy and a model. Two exist: training.ThreadReplica and sim.VirtualReplica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shoal.tensors.flat import Shapes, Vectors


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The averaged tensors as they were at one safe point. Immutable."""

    vectors: Vectors
    steps: int
    samples: float
    """Samples this replica has trained on, in all, when the snapshot was taken."""
    weight: float
    """Samples since the last averaging that was applied: what this replica weighs in the next one."""


@dataclass(frozen=True, eq=False)
class State:
    """Everything a newcomer takes over: the averaged vectors, and what each donor keeps for itself.

    `vectors` is equal, bit for bit, at all peers that took part in averaging `number`; `extras` (optimizer state,
    integer buffers) is the donor's own.
    """

    vectors: Vectors
    extras: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float | int | bool | None] = field(default_factory=dict)
    optimizer: str = ""
    """The class of the donor's optimizer: its state fits no other."""
    progress: int = 0
    number: int = 0


class Replica(Protocol):
    """A peer's copy of the model, as strategies and downloads see it. Methods answer at the replica's safe points."""

    @property
    def shapes(self) -> Shapes:
        """Shape and dtype of each averaged tensor."""

    @property
    def steps(self) -> int:
        """Optimizer steps of this replica."""

    @property
    def progress(self) -> int:
        """Optimizer steps behind its state: those of the peer it was taken over from count too."""

    @property
    def last_average(self) -> Vectors | None:
        """What the last averaging brought."""

    def notify_at(self, steps: int, notice: Callable[[], None]) -> bool:
        """True when that many steps are done already; else `notice` is called, on the loop, as soon as they are."""

    async def snapshot(self) -> Snapshot:
        """A copy of the averaged tensors at the next safe point. Raises SchemaChanged."""

    async def offer(self, average: Vectors, snapshot: Snapshot) -> int:
        """Apply an average by the difference rule at the next safe point; returns the steps taken meanwhile."""

    async def state(self) -> State:
        """Everything a newcomer takes over, as it is at the next safe point."""

    async def install(self, state: State) -> None:
        """Take over a whole state at the next safe point."""
