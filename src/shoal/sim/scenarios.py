"""The scenarios that can be simulated, by name, and how one is built from settings that a person wrote.

A scenario is a frozen dataclass of options. It is imported when it is asked for: some need torch, others do not.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from shoal.core.errors import OptionError

SCENARIOS: dict[str, str] = {
    "averaging": "shoal.sim.averaging:Averaging",
    "chaos": "shoal.sim.chaos:Chaos",
    "churn": "shoal.sim.churn:Churn",
    "partition": "shoal.sim.partition:Partition",
    "stragglers": "shoal.sim.stragglers:Stragglers",
    "swarm": "shoal.sim.swarm:Swarm",
}
"""Name: "module:class"."""


class Scenario(Protocol):
    """What every scenario has. `run` depends on the options and the seed alone; its result can be pickled."""

    name: ClassVar[str]

    def run(self, seed: int) -> dict[str, Any]:
        """The figures of one seed."""
        ...

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One JSON object for the runs of all seeds, in order. Its plain values make a row of a table."""
        ...


@runtime_checkable
class Plots(Protocol):
    """What a scenario has beyond that, if it can be drawn."""

    @staticmethod
    def plot(summaries: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the summaries of several scenarios of this name into a PNG file."""
        ...


def scenario(name: str, settings: Mapping[str, object]) -> Scenario:
    """Build the scenario of that name. A setting is a value, or a text that its option's type says how to read.

    Lists are written with commas: "8,8,8". Raises OptionError, which lists what exists, for an unknown name or option.
    """
    if name not in SCENARIOS:
        raise OptionError("scenario", name, _one_of(name, SCENARIOS))
    module, _, kind = SCENARIOS[name].partition(":")
    scenario_class = getattr(importlib.import_module(module), kind)
    hints = typing.get_type_hints(scenario_class)
    options = [field.name for field in dataclasses.fields(scenario_class)]
    for option in settings:
        if option not in options:
            raise OptionError(f"option of {name}", option, _one_of(option, options))
    built: Scenario = scenario_class(**{option: _read(option, settings[option], hints[option]) for option in settings})
    return built


def _one_of(wanted: str, existing: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(wanted, list(existing), n=1)
    return f"one of {', '.join(existing)}" + (f" (did you mean {nearest[0]}?)" if nearest else "")


def _read(option: str, value: object, hint: Any) -> object:
    """The value as its option's type has it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and (value is None or value == "none"):
        return None
    (kind,) = [kind for kind in kinds if kind is not type(None)]
    if typing.get_origin(kind) is tuple:
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            items = [items]
        return tuple(_read(option, item, typing.get_args(kind)[0]) for item in items)
    read, words = READERS[kind]
    if isinstance(value, str):
        try:
            return read(value.strip())
        except (ValueError, KeyError):
            raise OptionError(option, value, words) from None
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise OptionError(option, value, words)
    return read(value) if kind is float else value


READERS: dict[type, tuple[Callable[[Any], object], str]] = {
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "a text"),
}
"""How a text becomes a value of that type, and what is said where it does not."""
