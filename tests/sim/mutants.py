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
from shoal.sim.chaos import Chaos
from shoal.strategies import moshpit
from shoal.strategies.moshpit import Moshpit
from shoal.tensors.mixing import PartMean


@dataclass(frozen=True)
class Mutant:
    """In function `name` of `owner` (a module or a class), `text` becomes `instead`.

    Chaos with `seed` is known to find it, and says `found_by`. Where a change of the protocol made its seeds other
    histories, `python tests/sim/mutants.py` names new ones.
    """

    owner: Any
    name: str
    text: str
    instead: str
    seed: int
    found_by: str

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


UNEQUAL, APART = "ended with different versions", "the swarm is not one"
ONE_SOURCE, NO_MEAN = "one source counts twice", "is not the mean of its contributors"

MUTANTS = {
    "a source counts twice": Mutant(
        Reducer, "contribute",
        "reduction.sources[source] = None",
        "reduction.sources[sender] = None",
        1, ONE_SOURCE,
    ),
    "a member meets its first group again": Mutant(
        moshpit, "group_in_round",
        "grid_groups(len(roll.members), dims, round_index)",
        "grid_groups(len(roll.members), dims, 0)",
        4, APART,
    ),
    "a take-over passes for the owner's own": Mutant(
        agreement, "reduce_anew",
        "reducer.reduce(indices, round_.order(owner).index(round_.me))",
        "reducer.reduce(indices, 0)",
        5, UNEQUAL,
    ),
    "the mass of a group is forgotten": Mutant(
        Moshpit, "all_reduce",
        "vectors, mass = last.vectors, last.mass",
        "vectors = last.vectors",
        4, APART,
    ),
    "an old roll is taken for the new one": Mutant(
        RollBook, "_held",
        "roll if roll and roll.number == number else None",
        "roll",
        0, APART,
    ),
    "a number is used again": Mutant(
        RollBook, "_next",
        "1 + max(",
        "max(1, ",
        0, APART,
    ),
    "nobody closes": Mutant(
        agreement, "close",
        "if reducer.clean:",
        "if True:",
        5, UNEQUAL,
    ),
    "weights do not count": Mutant(
        PartMean, "add",
        "if weight > 0:",
        "if (weight := 1.0) > 0:",
        0, APART,
    ),
    "a mean is sent before all have delivered": Mutant(
        Reducer, "_finish",
        "not reduction.waiting:",
        "len(reduction.waiting) < 2:",
        0, APART,
    ),
    "a version goes back": Mutant(
        versions, "lowest_versions",
        "tuple(min(versions)",
        "tuple(max(versions)",
        5, UNEQUAL,
    ),
    "a contribution is not what was sent": Mutant(
        Reducer, "contribute",
        "reduction.mean.add(values, mass)",
        "reduction.mean.add(values + 1e-3, mass)",
        0, NO_MEAN,
    ),
    "a member is left out without a reason": Mutant(
        Reducer, "claim",
        "mass == 0 or source in reduction.sources",
        "mass == 0 or len(reduction.sources) == 2",
        0, APART,
    ),
}  # fmt: skip


def first_seed(mutant: Mutant, seeds: int) -> tuple[int, str] | None:
    """The first of so many seeds whose chaos finds it, and what it says."""
    with mutant.planted():
        for seed in range(seeds):
            try:
                Chaos().run(seed)
            except AssertionError as error:
                return seed, str(error)
    return None


if __name__ == "__main__":
    for title, one in MUTANTS.items():
        print(title, first_seed(one, 200), flush=True)
