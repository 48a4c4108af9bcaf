"""How a strategy's options are checked, and written into the charter."""

from __future__ import annotations

import dataclasses
from typing import Any

from shoal.core.errors import OptionError
from shoal.core.options import check_number
from shoal.overlay.charter import Options

PARAMETERS, GRADIENTS = "parameters", "gradients"
"""What `average` may be."""
EVERY_SECONDS = 2.0
"""How often parameters are averaged where neither seconds nor steps are given."""
GATHER_SECONDS = 600.0
"""How long one large batch is gathered where nothing else is given."""


def check_averaging(strategy: Any) -> None:
    """The options that all averaging strategies have; those of the mode that was not chosen must be left out."""
    if strategy.average not in (PARAMETERS, GRADIENTS):
        raise OptionError("average", strategy.average, f"{PARAMETERS!r} or {GRADIENTS!r}")
    if strategy.average == GRADIENTS:
        _check_gradients(strategy)
    else:
        _left_out(strategy, f"with average={PARAMETERS!r}", "target_batch", "max_grad_norm", "gather_timeout_seconds")
        if strategy.every_steps is None and strategy.every_seconds is None:
            object.__setattr__(strategy, "every_seconds", EVERY_SECONDS)
    check_number("every_seconds", strategy.every_seconds, 0.01, 86400, optional=True)
    check_number("every_steps", strategy.every_steps, 1, 10**9, whole=True, optional=True)
    if strategy.every_seconds is not None and strategy.every_steps is not None:
        raise OptionError("every_seconds", strategy.every_seconds, "left out where every_steps is given")
    check_number("timeout_seconds", strategy.timeout_seconds, 1, 3600)
    check_number("part_bytes", strategy.part_bytes, 1024, 4 << 20, whole=True)


def _check_gradients(strategy: Any) -> None:
    if strategy.target_batch is None:
        raise OptionError("target_batch", None, f"given with average={GRADIENTS!r}: how many samples make one step")
    _left_out(strategy, f"with average={GRADIENTS!r}: target_batch decides when", "every_seconds", "every_steps")
    if strategy.gather_timeout_seconds is None:
        object.__setattr__(strategy, "gather_timeout_seconds", GATHER_SECONDS)
    check_number("target_batch", strategy.target_batch, 1, 2**31, whole=True)
    check_number("max_grad_norm", strategy.max_grad_norm, 1e-9, 1e9, optional=True)
    check_number("gather_timeout_seconds", strategy.gather_timeout_seconds, 0.1, 86400)


def _left_out(strategy: Any, why: str, *fields: str) -> None:
    for field in fields:
        if getattr(strategy, field) is not None:
            raise OptionError(field, getattr(strategy, field), f"left out {why}")


def options_of(strategy: Any) -> Options:
    """A strategy as the charter holds it: its name and its options."""
    return {"name": type(strategy).__name__, **dataclasses.asdict(strategy)}
