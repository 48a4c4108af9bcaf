"""A replica without a training thread: a flat vector that moves by a known amount at each step of virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.core.clock import Clock
from shoal.protocols.replica import Everything, Figures, GradientSum, Snapshot, State, StopRule
from shoal.tensors.flat import Shapes, Vectors, pack, shapes_of
from shoal.tensors.mixing import apply_difference, apply_exact
from shoal.tensors.sketch import sketch_of

Result = TypeVar("Result")


class VirtualReplica:
    """A copy of `values`, `tensors[0]`, grows by `drift` each `step_seconds`; requests are worked off after each step.

    The drift stands for the optimizer: it makes every step visible in the values, so a lost one can be counted. In
    gradient mode `gradient(values, batch)` is that of batch number `batch`, and plain SGD with `learning_rate` steps.

    `learn(tensors, step, step_seconds)` makes one whose steps are real.
    """

    def __init__(
        self, values: Tensor, *, drift: float, step_seconds: float, samples_per_step: float = 1.0,
        gradient: Callable[[Tensor, int], Tensor] | None = None, learning_rate: float = 0.1,
    ) -> None:  # fmt: skip
        self.tensors = [values.clone()]
        self.shapes: Shapes = shapes_of(self.tensors)
        self.gradient_shapes: Shapes = [*self.shapes, ((1,), "float32")]
        self.steps = 0
        self.step_seconds = step_seconds
        self.last_average: Vectors | None = None
        self._drift, self._samples_per_step = drift, samples_per_step
        self._gradient, self._learning_rate = gradient, learning_rate
        self._inherited_steps = self._global_steps = 0
        self._steps_averaged = 0
        self._requests: list[Callable[[], None]] = []
        self._asked = asyncio.Event()
        self._notice: tuple[int, Callable[[], None]] | None = None
        self._step: Callable[[int], None] | None = None
        self._cost: Callable[[], float] | None = None
        self._slowness = 1.0
        self._training = self._gathering = self._waits = False
        self._stop_rule: tuple[StopRule, asyncio.Future[GradientSum]] | None = None
        self._forget()

    @classmethod
    def learn(
        cls, tensors: Sequence[Tensor], step: Callable[[int], None], step_seconds: Callable[[], float],
        samples_per_step: float,
    ) -> VirtualReplica:  # fmt: skip
        """A real model's parameters: `step(number)` moves them, and takes `step_seconds()` of virtual time."""
        replica = cls(tensors[0].detach(), drift=0.0, step_seconds=1.0, samples_per_step=samples_per_step)
        replica.tensors = [tensor.detach() for tensor in tensors]
        replica.shapes = shapes_of(replica.tensors)
        replica._step, replica._cost = step, step_seconds
        return replica

    def slow_down(self, factor: float) -> None:
        """Steps take so many times as long from now on."""
        self._slowness *= factor
        self.step_seconds *= factor

    def _forget(self) -> None:
        self._sum, self._samples = torch.zeros_like(self.tensors[0]), 0.0
        self._batches: list[tuple[int, int]] = []

    @property
    def progress(self) -> int:
        return self._inherited_steps + (self._global_steps if self._gathering else self.steps)

    def figures(self) -> Figures:
        return Figures(
            steps=self.steps, step_seconds=self.step_seconds, progress=self.progress, gathered=self._samples,
            samples_per_second=self._samples_per_step / self.step_seconds, waits=self._waits,
        )  # fmt: skip

    async def train(self, clock: Clock) -> None:
        """Step for ever once `begin` was called; before that, one long safe point, as in attach."""
        while not self._training:
            self._work()
            await self._asked.wait()
        while True:
            if self._cost is not None:
                self.step_seconds = self._cost() * self._slowness
            await clock.sleep(self.step_seconds)
            self._step_once()
            self._work()
            if self._stop_rule:
                self._ask_rule()
            while self._waits:
                await self._asked.wait()
                self._work()
            if self._notice and self.steps >= self._notice[0]:
                _, notice = self._notice
                self._notice = None
                notice()

    def _step_once(self) -> None:
        self.steps += 1
        if self._step is not None:
            self._step(self.steps)
            return
        if not self._gathering:
            self.tensors[0].add_(self._drift)
            return
        assert self._gradient is not None
        self._sum += self._gradient(self.tensors[0], self.steps) * self._samples_per_step
        self._samples += self._samples_per_step
        first = self._batches[0][0] if self._batches else self.steps
        self._batches = [(first, self.steps)]

    def _work(self) -> None:
        self._asked.clear()
        requests, self._requests = self._requests, []
        for request in requests:
            request()

    def begin(self) -> None:
        """The state is the run's now: train."""
        self._training = True
        self._asked.set()

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
            self._inherited_steps += state.progress - self.progress
            self._steps_averaged, self.last_average = self.steps, None

        await self._ask(take_over)

    # -- gradient mode

    async def gather(self, max_grad_norm: float | None) -> None:
        def begin() -> None:
            if not self._gathering:
                self._inherited_steps, self._gathering = self.progress, True
            self._forget()

        await self._ask(begin)

    async def gradient_sum(self, why_stop: StopRule) -> GradientSum:
        answered: asyncio.Future[GradientSum] = asyncio.get_running_loop().create_future()
        self._stop_rule = why_stop, answered
        asking = asyncio.create_task(self._ask(self._reconsider), name="reconsider")
        try:
            return await answered
        finally:
            self._stop_rule = None
            asking.cancel()

    def _reconsider(self) -> None:
        if self._stop_rule and self._waits and (self._samples == 0 or not self._ask_rule()):
            self._waits = False

    def _ask_rule(self) -> bool:
        assert self._stop_rule is not None
        why_stop, answered = self._stop_rule
        why = why_stop(self.figures(), asyncio.get_running_loop().time())
        if not why or answered.done():
            return False
        self._stop_rule, self._waits = None, True
        mean = pack([self._sum / max(self._samples, 1.0), torch.tensor([float(self._samples > 0)])])
        answered.set_result(GradientSum(
            mean, self.gradient_shapes, self._samples, list(self._batches), self.progress, sketch_of(self.tensors),
            ["theta"], why,
        ))  # fmt: skip
        return True

    async def step(self, mean: Vectors, *, missed: bool) -> None:
        def take() -> None:
            self.tensors[0].sub_(mean[0][:-1].view_as(self.tensors[0]), alpha=self._learning_rate)
            self._global_steps += 1
            self._forget()

        await self._ask(take)

    async def everything(self) -> Everything:
        return await self._ask(
            lambda: Everything(pack(self.tensors), self.shapes, self.progress, sketch_of(self.tensors), ["theta"])
        )

    async def replace(self, vectors: Vectors) -> None:
        await self._ask(lambda: apply_exact(self.tensors, vectors))

    async def _ask(self, work: Callable[[], Result]) -> Result:
        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def at_safe_point() -> None:
            if not answered.done():
                answered.set_result(work())

        self._requests.append(at_safe_point)
        self._asked.set()
        return await answered
