"""Whether two peers' optimizers are of one kind: of one class, with the same state, with the same options."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose

import torch

from shoal.core.errors import AttachError

DECIDE_STATE = "amsgrad", "centered", "momentum", "nesterov"
ARE_OF_THE_MACHINE = "foreach", "fused", "capturable", "differentiable"
"""Ways to compute the same step."""

Scalars = dict[str, float | int | bool | None]


def signature(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer and the options that decide what state it keeps: another's state does not fit."""
    options = sorted(
        f"{name}={bool(value)}" for name, value in optimizer.param_groups[0].items() if name in DECIDE_STATE
    )
    return f"{type(optimizer).__name__}({', '.join(options)})"


def options_of_optimizer(optimizer: torch.optim.Optimizer) -> Scalars:
    """The numbers among the options of each of its groups, named options/GROUP/NAME."""
    found: Scalars = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, given in group.items():
            if name in ("params", *ARE_OF_THE_MACHINE):
                continue
            value = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
            parts = value if isinstance(value, tuple | list) else [value]
            for place, part in enumerate(parts):
                if isinstance(part, bool | int | float):
                    found[f"options/{number}/{name}" + (f"[{place}]" if part is not value else "")] = part
    return found


def check_options(optimizer: torch.optim.Optimizer, of_run: Mapping[str, object]) -> None:
    """In gradient mode all must step alike. Raises AttachError with the first option that is not as in the run.

    `of_run`: what a donor told, and its `class`; empty at a founder.
    """
    if not of_run:
        return
    if of_run.get("class") != signature(optimizer):
        raise AttachError(
            f"this peer's optimizer is {signature(optimizer)}, the run's is {of_run.get('class')}: with "
            f"average='gradients' all peers take the same step"
        )
    ours = options_of_optimizer(optimizer)
    for name in (*ours, *(name for name in of_run if name.startswith("options/") and name not in ours)):
        value, theirs = ours.get(name), of_run.get(name)  # what one of two versions of PyTorch has not counts as off
        if not isclose(float(value or 0), float(theirs or 0), rel_tol=1e-6):  # type: ignore[arg-type]
            _, group, option = (*name.split("/", 2), "")[:3]
            raise AttachError(
                f"{option} of the optimizer's group {group} is {value} here, {theirs} in the run: with "
                f"average='gradients' all peers take the same step (and pass their scheduler to attach)"
            )
