"""How a strategy's options are checked, and written into the charter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from shoal.core.errors import OptionError
from shoal.overlay.charter import Options

EVERY_SECONDS = 2.0
"""How often is averaged where neither seconds nor steps are given."""


def check_number(
    field: str, value: object, low: float, high: float, *, whole: bool = False, optional: bool = False
) -> None:
    """Raises OptionError unless `value` is a finite number within [low, high] (or None where that is allowed)."""
    bounds = f"{'a whole number' if whole else 'a number'} from {low:g} to {high:g}" + (" or None" if optional else "")
    if value is None and optional:
        return
    right_type = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not right_type or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type,operator]
        raise OptionError(field, value, bounds)


def check_averaging(strategy: Any) -> None:
    """The options that all averaging strategies have. `every_seconds` is 2 where neither it nor steps are given."""
    if strategy.every_steps is None and strategy.every_seconds is None:
        object.__setattr__(strategy, "every_seconds", EVERY_SECONDS)
    check_number("every_seconds", strategy.every_seconds, 0.01, 86400, optional=True)
    check_number("every_steps", strategy.every_steps, 1, 10**9, whole=True, optional=True)
    if strategy.every_seconds is not None and strategy.every_steps is not None:
        raise OptionError("every_seconds", strategy.every_seconds, "left out where every_steps is given")
    check_number("timeout_seconds", strategy.timeout_seconds, 1, 3600)
    check_number("part_bytes", strategy.part_bytes, 1024, 4 << 20, whole=True)


def options_of(strategy: Any) -> Options:
    """A strategy as the charter holds it: its name and its options."""
    return {"name": type(strategy).__name__, **dataclasses.asdict(strategy)}
