"""Floor 4: one algorithm, one page."""

from __future__ import annotations

from shoal.core.errors import MismatchError, OptionError
from shoal.overlay.charter import Options
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

AnyStrategy = AllReduce | Moshpit
STRATEGIES: dict[str, type[AnyStrategy]] = {"AllReduce": AllReduce, "Moshpit": Moshpit}


def build_strategy(options: Options) -> AnyStrategy:
    """The strategy that a charter names. Raises MismatchError when this version of shoal does not have it."""
    name = options.get("name")
    values = {field: value for field, value in options.items() if field != "name"}
    try:
        return STRATEGIES[str(name)](**values)  # type: ignore[arg-type]
    except KeyError:
        problem = f"this version of shoal has {', '.join(STRATEGIES)}"
    except (TypeError, OptionError) as error:
        problem = f"this version of shoal does not understand its options ({error})"
    raise MismatchError(f"this run's strategy is {name}, and {problem}: install the version that the run has")
