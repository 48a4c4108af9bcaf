"""The real replica: a model in the user's thread. Its parameters are written there only, and only at a safe point.

The network thread leaves requests in a mailbox; the user's thread works them off after each optimizer step, at
`sync_point`, and while it waits in `attach`, `average` or `leave`. A step without requests costs a few microseconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.core.errors import ModelMismatch, RoundError
from shoal.protocols.replica import Snapshot, State
from shoal.tensors.flat import Vectors, all_finite, pack, shapes_of
from shoal.tensors.memory import Memory
from shoal.tensors.mixing import apply_difference, apply_exact
from shoal.training.schema import attached, check_unchanged

Result = TypeVar("Result")
STEP_SMOOTHING = 0.2
FIRST_STEP_SECONDS = 2.0
"""How long a state is waited for before the first step; then the one of `attach` is given."""


class Mailbox:
    """Work that other threads leave for the user's thread."""

    def __init__(self) -> None:
        self._requests: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()

    async def ask(self, work: Callable[[], Result]) -> Result:
        """From the network thread: run `work` at the next safe point and return its result."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Result] = loop.create_future()

        def answer(value: Any, error: Exception | None) -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(value)
            else:
                answered.set_exception(error)

        def at_safe_point() -> None:
            if answered.cancelled():
                return
            value: Any = None
            error: Exception | None = None
            try:
                value = work()
            except Exception as problem:  # noqa: BLE001  raised again where it was asked for
                error = problem
            except BaseException:
                error = RoundError("the training thread was interrupted")
                raise
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(answer, value, error)

        self._requests.append(at_safe_point)
        self._wake.set()
        return await answered

    def work(self) -> None:
        """From the user's thread: a safe point."""
        while self._requests:
            self._requests.popleft()()

    def work_until(self, done: Future[Any], timeout_seconds: float) -> bool:
        """From the user's thread: one long safe point until `done`, or until the time is over. Returns whether done."""
        done.add_done_callback(lambda future: self._wake.set())
        until = time.monotonic() + timeout_seconds
        while not done.done():
            self._wake.clear()
            self.work()
            if done.done():
                break
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._wake.wait(left)
        return True


class ThreadReplica:
    """A model and its optimizer as strategies and downloads see them."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mailbox: Mailbox, batch_size: int | None
    ) -> None:
        self._model, self._optimizer, self._mailbox = model, optimizer, mailbox
        self._batch_size = batch_size
        self._attached = attached(model, optimizer)
        self.schema = self._attached.schema
        self.shapes = shapes_of(self._attached.tensors)
        self.steps = 0
        self.step_seconds = 0.0
        self.last_average: Vectors | None = None
        self._memory = Memory(kept=2)  # of the snapshot, and of what the tensors become
        self._inherited_steps = 0
        self._samples = self._samples_averaged = 0.0
        self._counted: float | None = None
        self._last_step_at: float | None = None
        self._notice: tuple[int, Callable[[], None], asyncio.AbstractEventLoop] | None = None
        self._untouched: State | None = self._take_state()  # until the first step: it can be given without a safe point

    @property
    def progress(self) -> int:
        return self._inherited_steps + self.steps

    # -- the user's thread

    def count(self, samples: float) -> None:
        """How many samples the next step is."""
        self._counted = (self._counted or 0.0) + samples

    def step_done(self) -> None:
        """After each optimizer step: count it, then a safe point."""
        now = time.monotonic()
        self.steps += 1
        self._untouched = None
        self._samples += self._counted if self._counted is not None else (self._batch_size or 1)
        self._counted = None
        self._mailbox.work()
        if self._last_step_at is not None:
            seconds = now - self._last_step_at
            self.step_seconds += (STEP_SMOOTHING if self.step_seconds else 1.0) * (seconds - self.step_seconds)
        self._last_step_at = now
        if self._notice is not None and self.steps >= self._notice[0]:
            _, notice, loop = self._notice
            self._notice = None
            loop.call_soon_threadsafe(notice)

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

    # -- at a safe point

    def _take_snapshot(self) -> Snapshot:
        self._attached = check_unchanged(self._model, self._optimizer, self.schema)
        vectors = pack(self._attached.tensors, self._memory)
        return Snapshot(vectors, self.steps, self._samples, self._samples - self._samples_averaged)

    def _apply(self, average: Vectors, snapshot: Snapshot) -> int:
        self._attached = check_unchanged(self._model, self._optimizer, self.schema)
        try:
            apply_difference(self._attached.tensors, average, snapshot.vectors, self._memory)
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
        self._inherited_steps = state.progress - self.steps
        self._samples_averaged = self._samples
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
                same_shape = value.numel() == 1 or value.shape == self._attached.parameters[name].shape
                if not same_shape or not all_finite(value):
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


def signature(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer and the options that decide what state it keeps: another's state does not fit."""
    options = sorted(
        f"{name}={bool(value)}"
        for name, value in optimizer.param_groups[0].items()
        if name in ("amsgrad", "centered", "momentum", "nesterov")
    )
    return f"{type(optimizer).__name__}({', '.join(options)})"
