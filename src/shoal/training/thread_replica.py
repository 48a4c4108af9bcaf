"""The real replica: a model in the user's thread. Its parameters are written there only, and only at a safe point.

The network thread leaves requests in a mailbox; the user's thread works them off after each optimizer step, at
`sync_point`, and while it waits in `attach`, `average` or `leave`. A step without requests costs a few microseconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from shoal.core.errors import ModelMismatch
from shoal.protocols.replica import Everything, Figures, GradientSum, Snapshot, State, StopRule
from shoal.tensors.flat import Shapes, Vectors, all_finite, pack, shapes_of
from shoal.tensors.memory import Memory
from shoal.tensors.mixing import apply_difference, apply_exact
from shoal.training.gradient_sums import GradientSums
from shoal.training.mailbox import Mailbox
from shoal.training.optimizer_options import check_options, options_of_optimizer, signature
from shoal.training.schema import attached, check_unchanged

Rule = tuple[Callable[[Figures], str], Future[GradientSum]]
STEP_SMOOTHING, LONGEST_STEP = 0.2, 4.0
"""A step that took more than 4 x the usual was a pause: an evaluation, a checkpoint. Who has become slower is, soon."""
FIRST_STEP_SECONDS = 2.0
"""How long a state is waited for before the first step; then the one of `attach` is given."""


class ThreadReplica:
    """A model and its optimizer as strategies and downloads see them."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mailbox: Mailbox, batch_size: int | None,
        scheduler: Any = None,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._mailbox = model, optimizer, mailbox
        self._batch_size, self._scheduler = batch_size, scheduler
        self._attached = attached(model, optimizer)
        self.schema = self._attached.schema
        self.shapes = shapes_of(self._attached.tensors)
        self.steps = 0
        self.step_seconds = 0.0
        self.last_average: Vectors | None = None
        self._memory = Memory(kept=1)  # of the snapshot
        self._inherited_steps = self._global_steps = 0
        self._samples = self._samples_averaged = self._step_samples = 0.0
        self._sums: GradientSums | None = None
        self._run_options: dict[str, Any] = {}
        self.samples_dropped = 0.0
        self._stop_rule: Rule | None = None  # set and taken back by the network thread, at any moment
        self._held: Future[None] | None = None
        self._over = False
        self._counted: float | None = None
        self._last_step_at: float | None = None
        self._notice: tuple[int, Callable[[], None], asyncio.AbstractEventLoop] | None = None
        self._untouched: State | None = self._take_state()  # until the first step: it can be given without a safe point

    @property
    def progress(self) -> int:
        return self._inherited_steps + (self._global_steps if self._sums else self.steps)

    @property
    def gradient_shapes(self) -> Shapes:
        assert self._sums is not None
        return self._sums.shapes

    def figures(self) -> Figures:
        rate = self._step_samples / self.step_seconds if self.step_seconds else 0.0
        return Figures(
            steps=self.steps, step_seconds=self.step_seconds, progress=self.progress,
            gathered=self._sums.samples if self._sums else 0.0, samples_per_second=rate, waits=self._held is not None,
        )  # fmt: skip

    # -- the user's thread

    def count(self, samples: float) -> None:
        """How many samples the next step is."""
        self._counted = (self._counted or 0.0) + samples

    def step_done(self) -> None:
        """After each optimizer step: count it, then a safe point. In gradient mode it may wait here for the swarm."""
        if self._sums is not None and self._sums.stepping:
            return  # the swarm's step, not the loop's
        now = time.monotonic()
        samples = self._counted if self._counted is not None else float(self._batch_size or 1)
        self._counted = None
        self.steps += 1
        self._untouched = None
        self._samples += samples
        if self._last_step_at is not None:
            self._measure(now - self._last_step_at, samples)
        if self._sums is not None:
            self._sums.add(samples, self.steps)
        self._mailbox.work()
        if (rule := self._stop_rule) is not None:
            self._ask_rule(rule)
        elif self._sums is not None and not self._over:
            self._held = Future()  # the strategy is about to say when to stop, or repairs this replica
            if self._over:
                self._release()  # it ended in this very moment
        if (held := self._held) is not None:
            self._mailbox.work_until(held, math.inf)
        self._last_step_at = now if self._sums is None else time.monotonic()  # what was waited for is no work
        if self._notice is not None and self.steps >= self._notice[0]:
            _, notice, loop = self._notice
            self._notice = None
            loop.call_soon_threadsafe(notice)

    def _measure(self, seconds: float, samples: float) -> None:
        share = STEP_SMOOTHING if self.step_seconds else 1.0
        if self.step_seconds:
            seconds = min(seconds, LONGEST_STEP * self.step_seconds)
        self.step_seconds += share * (seconds - self.step_seconds)
        self._step_samples += share * (samples - self._step_samples)

    def end(self) -> None:
        """From any thread: nobody will take the step that the training thread waits for, or might wait for."""
        self._over = True
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None and not held.done():
            held.set_result(None)

    def detach(self) -> None:
        """The optimizer's steps are its own again."""
        self.end()
        if self._sums is not None:
            self._sums.detach()

    # -- the network thread

    def notify_at(self, steps: int, notice: Callable[[], None]) -> bool:
        self._notice = steps, notice, asyncio.get_running_loop()
        return self.steps >= steps

    async def snapshot(self) -> Snapshot:
        return await self._mailbox.ask(self._take_snapshot)

    async def offer(self, average: Vectors, snapshot: Snapshot) -> int:
        return await self._mailbox.ask(lambda: self._apply(average, snapshot))

    async def state(self) -> State:
        if (untouched := self._untouched) is not None:
            try:
                async with asyncio.timeout(FIRST_STEP_SECONDS):
                    return await self._mailbox.ask(self._take_state)
            except TimeoutError:
                return untouched
        return await self._mailbox.ask(self._take_state)

    async def install(self, state: State) -> None:
        await self._mailbox.ask(lambda: self._install(state))

    async def gather(self, max_grad_norm: float | None) -> None:
        await self._mailbox.ask(lambda: self._begin_to_gather(max_grad_norm))

    async def gradient_sum(self, why_stop: StopRule) -> GradientSum:
        answered: Future[GradientSum] = Future()
        time_of_loop = asyncio.get_running_loop().time
        self._stop_rule = lambda figures: why_stop(figures, time_of_loop()), answered
        asking = asyncio.create_task(self._mailbox.ask(self._reconsider))
        try:
            return await asyncio.wrap_future(answered)
        finally:
            self._stop_rule = None
            asking.cancel()

    async def step(self, mean: Vectors, *, missed: bool) -> None:
        await self._mailbox.ask(lambda: self._step(mean, missed=missed))

    async def everything(self) -> Everything:
        return await self._mailbox.ask(self._take_everything)

    async def replace(self, vectors: Vectors) -> None:
        await self._mailbox.ask(lambda: self._replace(vectors))

    # -- at a safe point, in gradient mode

    def _begin_to_gather(self, max_grad_norm: float | None) -> None:
        if self._sums is None:
            self._inherited_steps, self._global_steps = self.progress, 0
            self._sums = GradientSums(self._optimizer, self._attached, max_grad_norm, self._scheduler)
            self._last_step_at = time.monotonic()
        self.samples_dropped += self._sums.samples
        self._sums.clear()
        self._sums.set_scheduler(self.progress)
        run_options, self._run_options = self._run_options, {}  # as they were in the state that was just installed
        check_options(self._optimizer, run_options)

    def _reconsider(self) -> None:
        """Asked for a sum while the thread waits: stop again at once, or let it go on."""
        rule = self._stop_rule
        if rule is None or self._held is None:
            return
        if self._sums is None or self._sums.samples == 0 or not self._ask_rule(rule):
            self._release()

    def _ask_rule(self, rule: Rule) -> bool:
        """Stop, and give what was gathered, where the rule says so, unless the sum is not asked for any more."""
        assert self._sums is not None
        why_stop, answered = rule
        why = why_stop(self.figures())
        if not why or not answered.set_running_or_notify_cancel():
            return False
        self._stop_rule = None
        self._held = self._held or Future()
        try:
            self._look_at_model()
            sums = self._sums
            answered.set_result(GradientSum(
                sums.take(), sums.shapes, sums.samples, list(sums.batches),
                self.progress, sums.sketch(), sums.rows(), why,
            ))  # fmt: skip
        except Exception as error:  # noqa: BLE001  raised again where it was asked for
            answered.set_exception(error)
        return True

    @property
    def batches_left_out(self) -> int:
        """Batches whose gradient was not finite."""
        return self._sums.left_out if self._sums else 0

    def _step(self, mean: Vectors, *, missed: bool) -> None:
        assert self._sums is not None
        self.samples_dropped += self._sums.samples if missed else 0
        self._look_at_model()
        self._untouched = None
        self._sums.step(mean)
        self._global_steps += 1

    def _take_everything(self) -> Everything:
        assert self._sums is not None
        self._look_at_model()
        tensors = self._sums.everything()
        return Everything(pack(tensors), shapes_of(tensors), self.progress, self._sums.sketch(), self._sums.rows())

    def _replace(self, vectors: Vectors) -> None:
        assert self._sums is not None
        self._look_at_model()
        apply_exact(self._sums.everything(), vectors)

    # -- at a safe point

    def _look_at_model(self) -> None:
        """Its tensors as they are now: a module may have replaced a buffer. Raises SchemaChanged."""
        self._attached = check_unchanged(self._model, self._optimizer, self.schema)
        if self._sums is not None:
            self._sums.look_at(self._attached)

    def _take_snapshot(self) -> Snapshot:
        self._look_at_model()
        vectors = pack(self._attached.tensors, self._memory)
        return Snapshot(vectors, self.steps, self._samples, self._samples - self._samples_averaged)

    def _apply(self, average: Vectors, snapshot: Snapshot) -> int:
        self._look_at_model()
        try:
            apply_difference(self._attached.tensors, average, snapshot.vectors)
        finally:  # it is written whole even where an interrupt ends it
            self._samples_averaged = snapshot.samples
            self.last_average = average
        return self.steps - snapshot.steps

    def _take_state(self) -> State:
        extras: dict[str, torch.Tensor] = {}
        scalars: dict[str, float | int | bool | None] = {}
        for name, parameter in self._attached.parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    extras[f"optimizer/{name}/{key}"] = value.detach().to("cpu", copy=True)
                elif value is None or isinstance(value, bool | int | float):
                    scalars[f"optimizer/{name}/{key}"] = value
        for name, buffer in self._attached.local_buffers.items():
            extras[f"buffer/{name}"] = buffer.detach().to("cpu", copy=True)
        scalars |= options_of_optimizer(self._optimizer)
        return State(pack(self._attached.tensors), extras, scalars, signature(self._optimizer), self.progress)

    def _install(self, state: State) -> None:
        """Everything is checked before the first value is written."""
        buffers = {
            name: state.extras.get(f"buffer/{name}", buffer) for name, buffer in self._attached.local_buffers.items()
        }
        for name, buffer in self._attached.local_buffers.items():
            if (buffers[name].shape, buffers[name].dtype) != (buffer.shape, buffer.dtype):
                raise ModelMismatch(
                    f"this model's buffer {name} is {tuple(buffer.shape)} {buffer.dtype}, "
                    f"the run's is {tuple(buffers[name].shape)} {buffers[name].dtype}"
                )
        moments = self._optimizer_state(state)
        apply_exact(self._attached.tensors, state.vectors)
        with torch.no_grad():
            for name, buffer in self._attached.local_buffers.items():
                buffer.copy_(buffers[name])
        for name, parameter in self._attached.parameters.items():
            self._optimizer.state.pop(parameter, None)
            if moments.get(name):
                self._optimizer.state[parameter] = moments[name]
        self._inherited_steps += state.progress - self.progress
        self._samples_averaged = self._samples
        self._run_options = {"class": state.optimizer, **state.scalars}
        self.last_average = None
        self._untouched = state if self._untouched is not None else None

    def _optimizer_state(self, state: State) -> dict[str, dict[str, Any]]:
        """The donor's optimizer state by parameter; empty where it does not fit, so that ours starts afresh."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self._attached.parameters}
        if state.optimizer != signature(self._optimizer):
            return {}
        for path, value in (*state.extras.items(), *state.scalars.items()):
            kind, _, rest = path.partition("/")
            name, _, key = rest.rpartition("/")
            if kind != "optimizer" or name not in found:
                continue
            if isinstance(value, torch.Tensor):
                fits = value.numel() <= max(1, self._attached.parameters[name].numel())  # some keep rows and columns
                if not fits or not all_finite(value):
                    return {}
            found[name][key] = self._placed(value, key, name)
        return found

    def _placed(self, value: Any, key: str, name: str) -> Any:
        """Optimizer state on its parameter's device; step counters stay on the CPU unless the optimizer is fused."""
        if not isinstance(value, torch.Tensor):
            return value
        parameter = self._attached.parameters[name]
        group = next(group for group in self._optimizer.param_groups if any(p is parameter for p in group["params"]))
        if key == "step" and not (group.get("fused") or group.get("capturable")):
            return value.clone()
        return value.to(parameter.device, copy=True)
