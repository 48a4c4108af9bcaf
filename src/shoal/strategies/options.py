"""How a strategy's options are checked, and written into the charter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from shoal.core.errors import OptionError
from shoal.overlay.charter import Options


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


def options_of(strategy: Any) -> Options:
    """A strategy as the charter holds it: its name and its options."""
    return {"name": type(strategy).__name__, **dataclasses.asdict(strategy)}
