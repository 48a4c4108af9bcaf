"""Faults planted in the protocol code, one at a time: chaos has to find each of them.

A mutant is a piece of source text, and what stands there instead. It is put in place by compiling the function anew in
its own module, so a text that is not there any more is an error, not a mutant that nobody notices.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.planning import versions
from shoal.protocols import agreement
from shoal.protocols.reducer import Reducer
from shoal.protocols.roll import RollBook
from shoal.protocols.round_state import Round
from shoal.strategies import moshpit
from shoal.strategies.moshpit import Moshpit
from shoal.tensors.mixing import PartMean


@dataclass(frozen=True)
class Mutant:
    """In function `name` of `owner` (a module or a class), `text` becomes `instead`."""

    owner: Any
    name: str
    text: str
    instead: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        healthy: Callable[..., Any] = vars(self.owner)[self.name]
        source = textwrap.dedent(inspect.getsource(healthy))
        assert source.count(self.text) == 1, f"{self.name} has {self.text!r} {source.count(self.text)} times"
        scope = dict(inspect.unwrap(healthy).__globals__)
        sick = "from __future__ import annotations\n" + source.replace(self.text, self.instead)
        exec(compile(sick, f"<{self.name}>", "exec"), scope)
        places = [self.owner] if inspect.isclass(self.owner) else _importers(self.name, healthy)
        for place in places:
            setattr(place, self.name, scope[self.name])
        try:
            yield
        finally:
            for place in places:
                setattr(place, self.name, healthy)


def _importers(name: str, healthy: Callable[..., Any]) -> list[Any]:
    """Every module of the library that has this function under its name."""
    modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("shoal.")]
    return [module for module in modules if getattr(module, name, None) is healthy]


MUTANTS = {
    "a source counts twice": Mutant(
        Reducer, "contribute",
        "reduction.sources[source] = None",
        "reduction.sources[sender] = None",
    ),
    "a member meets its first group again": Mutant(
        moshpit, "group_in_round",
        "grid_groups(len(roll.members), dims, round_index)",
        "grid_groups(len(roll.members), dims, 0)",
    ),
    "a take-over passes for the owner's own": Mutant(
        agreement, "reduce_anew",
        "reducer.reduce(indices, round_.order(owner).index(round_.me))",
        "reducer.reduce(indices, 0)",
    ),
    "the mass of a group is forgotten": Mutant(
        Moshpit, "all_reduce",
        "vectors, mass = last.vectors, last.mass",
        "vectors = last.vectors",
    ),
    "an old roll is taken for the new one": Mutant(
        RollBook, "_held",
        "roll if roll and roll.number == number else None",
        "roll",
    ),
    "a number is used again": Mutant(
        RollBook, "_next",
        "1 + max(",
        "max(1, ",
    ),
    "nobody closes": Mutant(
        agreement, "close",
        "if reducer.clean:",
        "if True:",
    ),
    "weights do not count": Mutant(
        PartMean, "add",
        "if weight > 0:",
        "if (weight := 1.0) > 0:",
    ),
    "a mean is sent before all have delivered": Mutant(
        Reducer, "_finish",
        "not reduction.waiting:",
        "len(reduction.waiting) < 2:",
    ),
    "any version replaces another": Mutant(
        Round, "hold",
        "elif current is None or held.version < current.version:",
        "else:",
    ),
    "one exchange is enough": Mutant(
        versions, "is_settled",
        "if mine != lowest:",
        "return True\n    if mine != lowest:",
    ),
    "a dead reducer's share is reduced by nobody": Mutant(
        agreement, "take_over",
        "for number in round_.order(owner)[1:]:",
        "for number in ():",
    ),
    "whoever is behind is not told": Mutant(
        RollBook, "_moved_on",
        "self._note(series, over)",
        "pass",
    ),
}  # fmt: skip
