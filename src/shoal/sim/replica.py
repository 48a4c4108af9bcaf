"""A replica without a training thread: a flat vector that moves by a known amount at each step of virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from shoal.core.clock import Clock
from shoal.protocols.replica import Snapshot, State
from shoal.tensors.flat import Shapes, Vectors, pack, shapes_of
from shoal.tensors.mixing import apply_difference, apply_exact

Result = TypeVar("Result")


class VirtualReplica:
    """A copy of `values`, `tensors[0]`, grows by `drift` each `step_seconds`; requests are worked off after each step.

    The drift stands for the optimizer: it makes every step visible in the values, so a lost one can be counted.
    """

    def __init__(self, values: Tensor, *, drift: float, step_seconds: float, samples_per_step: float = 1.0) -> None:
        self.tensors = [values.clone()]
        self.shapes: Shapes = shapes_of(self.tensors)
        self.steps = 0
        self.step_seconds = step_seconds
        self.last_average: Vectors | None = None
        self._drift, self._samples_per_step = drift, samples_per_step
        self._inherited_steps = 0
        self._steps_averaged = 0
        self._requests: list[Callable[[], None]] = []
        self._notice: tuple[int, Callable[[], None]] | None = None
        self._training = False

    @property
    def progress(self) -> int:
        return self._inherited_steps + self.steps

    async def train(self, clock: Clock) -> None:
        """Step for ever once `begin` was called; before that, only the safe points of a peer that waits in attach."""
        while True:
            await clock.sleep(self.step_seconds)
            if self._training:
                self.tensors[0].add_(self._drift)
                self.steps += 1
            requests, self._requests = self._requests, []
            for request in requests:
                request()
            if self._notice and self.steps >= self._notice[0]:
                _, notice = self._notice
                self._notice = None
                notice()

    def begin(self) -> None:
        """The state is the run's now: train."""
        self._training = True

    def notify_at(self, steps: int, notice: Callable[[], None]) -> bool:
        self._notice = steps, notice
        return self.steps >= steps

    async def snapshot(self) -> Snapshot:
        def take() -> Snapshot:
            samples = self.steps * self._samples_per_step
            weight = (self.steps - self._steps_averaged) * self._samples_per_step
            return Snapshot(pack(self.tensors), self.steps, samples, weight)

        return await self._ask(take)

    async def offer(self, average: Vectors, snapshot: Snapshot) -> int:
        def apply() -> int:
            apply_difference(self.tensors, average, snapshot.vectors)
            self._steps_averaged, self.last_average = snapshot.steps, average
            return self.steps - snapshot.steps

        return await self._ask(apply)

    async def state(self) -> State:
        steps = {"steps": torch.tensor([self.steps])}
        return await self._ask(lambda: State(pack(self.tensors), steps, progress=self.progress))

    async def install(self, state: State) -> None:
        def take_over() -> None:
            apply_exact(self.tensors, state.vectors)
            self._inherited_steps = state.progress - self.steps
            self._steps_averaged, self.last_average = self.steps, None

        await self._ask(take_over)

    async def _ask(self, work: Callable[[], Result]) -> Result:
        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def at_safe_point() -> None:
            if not answered.done():
                answered.set_result(work())

        self._requests.append(at_safe_point)
        return await answered
