"""Floor 4: one algorithm, one page."""

from __future__ import annotations

from shoal.core.errors import CharterMismatch
from shoal.overlay.charter import Options
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

AnyStrategy = AllReduce | Moshpit
STRATEGIES: dict[str, type[AnyStrategy]] = {"AllReduce": AllReduce, "Moshpit": Moshpit}


def build_strategy(options: Options) -> AnyStrategy:
    """The strategy that a charter names. Raises CharterMismatch when this shoal does not have it."""
    name = options.get("name")
    if name not in STRATEGIES:
        raise CharterMismatch("strategy", f"one of {', '.join(STRATEGIES)}", name)
    values = {field: value for field, value in options.items() if field != "name"}
    return STRATEGIES[str(name)](**values)  # type: ignore[arg-type]
