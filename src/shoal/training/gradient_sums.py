"""Gradient mode on a real model: local steps are swallowed, their gradients summed; a global step installs the mean.

The optimizer keeps its own type. A hook takes each gradient before a step and leaves None, so that the step does
nothing; with the swarm's mean gradient installed, the same optimizer takes the real one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.core.errors import AttachError
from shoal.tensors.flat import Shapes, Vectors, pack, shapes_of, slices
from shoal.tensors.sketch import sketch_of
from shoal.training.schema import Attached

AMP = "grad_scale", "found_inf"
"""What a GradScaler sets on an optimizer that divides by the scale itself, for the time of one step."""


class GradientSums:
    """The gradients that one peer has gathered towards the next step. Used at safe points of the training thread."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, attached: Attached, max_grad_norm: float | None, scheduler: Any
    ) -> None:
        _refuse(optimizer, scheduler)
        self._optimizer, self._scheduler, self._max_grad_norm = optimizer, scheduler, max_grad_norm
        self._names = list(attached.parameters)
        self._parameters: list[nn.Parameter] = list(attached.parameters.values())
        self._buffers = list(attached.buffers.values())
        self._sums = [torch.zeros_like(p, dtype=_sum_dtype(p)) for p in self._parameters]
        self._checked = False
        self.stepping = False
        self.left_out = 0
        """Batches without a finite gradient."""
        self.clear()
        if scheduler is not None:
            self._scheduler_start = copy.deepcopy(scheduler.state_dict()), [g["lr"] for g in optimizer.param_groups]
            # the user's loop steps it with each batch; it is to move once per global step
            scheduler.step = lambda *args, **kwargs: None
        self._hook = optimizer.register_step_pre_hook(self._swallow)

    def detach(self) -> None:
        """Steps are local again."""
        self._hook.remove()
        if self._scheduler is not None:
            del self._scheduler.step

    # -- gathering

    def clear(self) -> None:
        """Forget what was gathered."""
        for total in self._sums:
            total.zero_()
        self._used = [False] * len(self._sums)
        self.samples = 0.0
        self.batches: list[tuple[int, int]] = []
        self._before_first: list[Tensor] = []

    @torch.no_grad()
    def _swallow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before each local step."""
        if self.stepping:
            return
        if kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
            raise AttachError("optimizer.step(closure) can't be gathered: call backward() before optimizer.step()")
        if not (self._checked or self._before_first):  # a subclass's step may call a step with hooks of its own
            self._before_first = [parameter.detach().clone() for parameter in self._parameters]
        self._taken = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def add(self, samples: float, batch: int) -> None:
        """After each local step, which did nothing: count its gradient as the mean over `samples` samples."""
        self._check_untouched()
        taken, self._taken = self._taken, []
        scale, found_inf = (getattr(self._optimizer, name, None) for name in AMP)
        present = [gradient for gradient in taken if gradient is not None]
        if not present:
            return  # a step without a backward
        if any(gradient.layout is not torch.strided for gradient in present):
            raise AttachError("sparse gradients can't be gathered: use sparse=False")
        if (found_inf is not None and bool(found_inf)) or not _all_finite(present):
            self.left_out += 1
            return
        weight = samples / float(scale) if scale is not None else samples
        for number, gradient in enumerate(taken):
            if gradient is not None:
                self._sums[number].add_(gradient, alpha=weight)
                self._used[number] = True
        self.samples += samples
        if self.batches and self.batches[-1][1] == batch - 1:
            self.batches[-1] = self.batches[-1][0], batch
        else:
            self.batches.append((batch, batch))

    def _check_untouched(self) -> None:
        """Of the first step: an optimizer that moves parameters without a gradient would part the replicas."""
        if self._checked:
            return
        before, self._before_first, self._checked = self._before_first, [], True
        if not all(map(torch.equal, before, self._parameters)):
            raise AttachError(
                f"{type(self._optimizer).__name__} changes parameters that have no gradient, so its steps can't be "
                f"gathered: use average='parameters', or another optimizer"
            )

    # -- what travels

    @property
    def shapes(self) -> Shapes:
        """Those of what `take` packs."""
        return shapes_of(self._layout())

    def _layout(self) -> list[Tensor]:
        return [*self._sums, torch.tensor([float(used) for used in self._used]), *self._buffers]

    @torch.no_grad()
    def take(self) -> Vectors:
        """The mean gradient over what was gathered, which parameters had one, and the floating buffers."""
        vectors = pack(self._layout())
        for view in slices(vectors, self._sums):
            view.div_(self.samples or 1.0)
        return vectors

    def step(self, mean: Vectors) -> None:
        """Take the real step with a mean gradient."""
        views = slices(mean, self._layout())
        count = len(self._parameters)
        kept = [parameter.grad for parameter in self._parameters]  # a loop may stand between backward and step
        amp = {name: vars(self._optimizer).pop(name) for name in AMP if name in vars(self._optimizer)}
        self.stepping = True
        try:
            for parameter, view, used in zip(self._parameters, views, views[count].tolist(), strict=False):
                parameter.grad = view.to(parameter.device, parameter.dtype, copy=True) if used > 0 else None
            if self._max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
            self._optimizer.step()
            self._advance_scheduler(1)
            with torch.no_grad():
                for buffer, view in zip(self._buffers, views[count + 1 :], strict=True):
                    buffer.copy_(view)
        finally:
            self.stepping = False
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
            vars(self._optimizer).update(amp)
        self.clear()

    def set_scheduler(self, progress: int) -> None:
        """As it is after that many global steps, whatever it was before."""
        if self._scheduler is not None:
            state, rates = self._scheduler_start
            self._scheduler.load_state_dict(copy.deepcopy(state))
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._advance_scheduler(progress)

    def _advance_scheduler(self, steps: int) -> None:
        if self._scheduler is None:
            return
        with warnings.catch_warnings():  # before the first step of a newcomer torch warns of an order that is right
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(steps):
                type(self._scheduler).step(self._scheduler)

    # -- what must be equal

    def _moments(self) -> list[str]:
        """The names of what the optimizer keeps for each value of a parameter."""
        return sorted(
            {
                key
                for parameter, state in self._optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
                and key != "step"
            }
        )  # fmt: skip

    def _moments_of(self, parameter: Tensor, names: Sequence[str]) -> list[Tensor | None]:
        return [self._optimizer.state.get(parameter, {}).get(name) for name in names]

    def everything(self) -> list[Tensor]:
        """Parameters, floating buffers, and the optimizer's moments of the parameters that have been stepped."""
        names = self._moments()
        moments = [moment for p in self._parameters for moment in self._moments_of(p, names) if moment is not None]
        return [*self._parameters, *self._buffers, *moments]

    def sketch(self) -> bytes:
        """Of parameters and moments; its rows are named by `rows`."""
        names = self._moments()
        return sketch_of([row for p in self._parameters for row in (p, *self._moments_of(p, names))])

    def rows(self) -> list[str]:
        """What each row of the sketch is of."""
        names = self._moments()
        return [row for name in self._names for row in (name, *(f"{moment} of {name}" for moment in names))]


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    return all([bool(torch.isfinite(gradient).all()) for gradient in gradients])


def _refuse(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AttachError(
            "LBFGS evaluates the loss many times within one step, so its gradients can't be gathered: "
            "use another optimizer, or average='parameters'"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise AttachError(
            "ReduceLROnPlateau follows each peer's own loss, so learning rates would part: use a scheduler that "
            "depends on the number of steps alone"
        )
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise AttachError("the scheduler belongs to another optimizer than the one that is attached")
