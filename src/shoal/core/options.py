"""How an option is checked where it is given: strategies and scenarios are frozen dataclasses of options."""

from __future__ import annotations

import math

from shoal.core.errors import OptionError


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
