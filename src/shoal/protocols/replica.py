"""The seam between a strategy and a model. Two exist: training.ThreadReplica and sim.VirtualReplica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

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


@dataclass(frozen=True, eq=False)
class GradientSum:
    """What was gathered towards one step, when the training thread stopped.

    `vectors` is flat: the mean gradient of each trained parameter over `samples`; one number for each, 1 where it had a
    gradient, since a parameter that nobody used must not be stepped; and the floating buffers. `batches`: the ranges of
    local batches behind it. `rows` names those of the `sketch`. `why`: the reason that ended the gathering.
    """

    vectors: Vectors
    shapes: Shapes
    samples: float
    batches: list[tuple[int, int]]
    step: int
    sketch: bytes
    rows: list[str]
    why: str


@dataclass(frozen=True, eq=False)
class Everything:
    """All that is equal at the replicas of gradient mode: parameters, floating buffers, the optimizer's moments."""

    vectors: Vectors
    shapes: Shapes
    step: int
    sketch: bytes
    rows: list[str]


class Figures(TypedDict):
    """What a replica tells of itself, as in its peer's record."""

    steps: int
    step_seconds: float
    progress: int
    gathered: float
    samples_per_second: float
    waits: bool


StopRule = Callable[[Figures, float], str]
"""From a replica's figures and the loop's time: why it gathers no more; empty: it goes on."""


class Replica(Protocol):
    """A peer's copy of the model, as strategies and downloads see it. Methods answer at the replica's safe points."""

    @property
    def shapes(self) -> Shapes:
        """Shape and dtype of each averaged tensor."""

    @property
    def steps(self) -> int:
        """Optimizer steps of this replica; in gradient mode, batches."""

    @property
    def progress(self) -> int:
        """Optimizer steps behind its state: those of the peer it was taken over from count too."""

    @property
    def last_average(self) -> Vectors | None:
        """What the last averaging brought."""

    def figures(self) -> Figures:
        """How far it is, and how fast."""

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

    # -- gradient mode

    @property
    def gradient_shapes(self) -> Shapes:
        """Those of a GradientSum."""

    async def gather(self, max_grad_norm: float | None) -> None:
        """From now on local steps gather gradients and change nothing. Raises AttachError where that can't be."""

    async def gradient_sum(self, why_stop: StopRule) -> GradientSum:
        """What was gathered when, after a batch, `why_stop` gave a reason. Raises SchemaChanged.

        From then on the training thread waits for the step, or until it is asked for a sum again and there is no reason
        to stop any more. `why_stop` is called in the training thread.
        """

    async def step(self, mean: Vectors, *, missed: bool) -> None:
        """Take one optimizer step with a mean gradient (laid out as a GradientSum), and forget what was gathered.

        `missed`: the others took it without this peer, so what it had gathered is dropped.
        """

    async def everything(self) -> Everything:
        """All that must be equal everywhere, as it is at the next safe point."""

    async def replace(self, vectors: Vectors) -> None:
        """Take over the average of everything."""
