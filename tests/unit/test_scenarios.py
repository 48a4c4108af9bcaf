"""The registry of scenarios: settings become options by their type, and what does not exist is refused with a hint."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from shoal.core.errors import OptionError
from shoal.sim import scenarios
from shoal.sim.averaging import Averaging
from shoal.sim.scenarios import Plots, scenario


@dataclass(frozen=True, kw_only=True)
class Everything:
    """A scenario with an option of every type."""

    name: ClassVar[str] = "everything"

    count: int = 1
    rate: float = 0.5
    loud: bool = False
    word: str = ""
    sides: tuple[int, ...] = ()
    rates: tuple[float, ...] | None = None
    limit: int | None = None

    def run(self, seed: int) -> dict[str, int]:
        return {"seed": seed}

    def summary(self, runs: list[dict[str, int]]) -> dict[str, int]:
        return {"seeds": len(runs)}


@pytest.fixture
def everything(monkeypatch) -> None:
    module = type(sys)("everything_scenario")
    module.Everything = Everything
    monkeypatch.setitem(sys.modules, "everything_scenario", module)
    monkeypatch.setitem(scenarios.SCENARIOS, "everything", "everything_scenario:Everything")


def test_texts_are_read_by_the_options_type(everything) -> None:
    texts = {
        "count": "7",
        "rate": "1e-3",
        "loud": "True",
        "word": "a b",
        "sides": "8, 8,8",
        "rates": "1,.5",
        "limit": "3",
    }
    assert scenario("everything", texts) == Everything(
        count=7, rate=0.001, loud=True, word="a b", sides=(8, 8, 8), rates=(1.0, 0.5), limit=3
    )
    assert scenario("everything", {"rates": "none", "limit": "none"}) == Everything()


def test_values_of_the_right_type_are_taken_as_they_are(everything) -> None:
    values = {"count": 7, "rate": 1, "loud": True, "word": "a", "sides": [8, 8], "rates": (1, 0.5), "limit": None}
    built = scenario("everything", values)
    assert built == Everything(count=7, rate=1.0, loud=True, word="a", sides=(8, 8), rates=(1.0, 0.5))
    assert isinstance(built.rate, float)
    assert scenario("everything", {"sides": 8}) == Everything(sides=(8,))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("count", "1.5", "a whole number"),
        ("count", "", "a whole number"),
        ("count", 1.5, "a whole number"),
        ("count", True, "a whole number"),
        ("rate", "fast", "a number"),
        ("rate", True, "a number"),
        ("rate", [1], "a number"),
        ("loud", "yes", "true or false"),
        ("loud", 1, "true or false"),
        ("word", 3, "a text"),
        ("sides", "8,x", "a whole number"),
        ("sides", [8, 0.5], "a whole number"),
        ("limit", "many", "a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_option(everything, option, value, words) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        scenario("everything", {option: value})
    assert caught.value.field == option


def test_an_unknown_scenario_is_refused_with_those_that_exist() -> None:
    with pytest.raises(OptionError, match=r"scenario = 'avraging' .* one of averaging.*did you mean averaging\?"):
        scenario("avraging", {})
    with pytest.raises(OptionError) as caught:
        scenario("xyz", {})
    assert "did you mean" not in str(caught.value)


def test_an_unknown_option_is_refused_with_those_that_exist() -> None:
    with pytest.raises(OptionError, match=r"option of averaging = 'failure_rat' .*method, peers.*mean failure_rate\?"):
        scenario("averaging", {"failure_rat": 0.1})


def test_every_scenario_of_the_registry_is_there_under_its_name() -> None:
    for name in scenarios.SCENARIOS:
        assert scenario(name, {}).name == name
    assert isinstance(scenario("averaging", {}), Plots)
    assert not isinstance(Everything(), Plots)


# ---------------------------------------------------------------- the options of `averaging`


@pytest.mark.parametrize(
    "options",
    [
        {"method": "moshpitt"},
        {"peers": 1},
        {"peers": 10**7},
        {"group_size": 1},
        {"group_size": 2, "method": "moshpit_weighted"},
        {"failure_rate": 1.1},
        {"failure_rate": float("nan")},
        {"weights": "random"},
        {"weights": "heavy", "method": "moshpit_weighted"},
        {"dims": (31, 32)},
        {"dims": (10**4, 10**4)},
        {"dims": (1, 1024)},
        {"dims": ()},
        {"dims": (32, 16), "method": "moshpit_keys"},
        {"dims": (32,), "method": "moshpit_keys"},
        {"dims": (31, 32), "method": "moshpit_weighted"},
        {"dims": (2, 1025), "method": "moshpit_conserved"},
        {"dims": (32, 32), "method": "gossip"},
    ],
)
def test_a_bad_option_is_refused_by_name(options) -> None:
    with pytest.raises(OptionError) as caught:
        Averaging(**options)
    assert caught.value.field == next(iter(options))


def test_the_grid_is_square_planned_or_absent() -> None:
    assert Averaging().dims == (32, 32)
    assert Averaging(method="moshpit_keys", group_size=8).dims == (8, 8)
    assert Averaging(method="moshpit_weighted", peers=1000).dims == (10, 10, 10)
    assert Averaging(method="moshpit_conserved", peers=1000, dims=(32, 32)).dims == (32, 32)
    assert Averaging(method="push_sum").dims is None
    with pytest.raises(OptionError, match="dims = "):
        Averaging(peers=1025)


def test_peers_that_are_all_absent_keep_their_values() -> None:
    for method in ("allreduce", "gossip", "sgp", "push_sum", "random_groups", "moshpit_keys", "moshpit_conserved"):
        figures = Averaging(method=method, peers=40, group_size=8, failure_rate=1).run(1)
        assert figures["iterations_1e4"] == figures["iterations_1e9"] == 50
        assert len(set(figures["error_by_iteration"])) == 1


def test_few_peers_are_averaged_by_every_method_that_is_exact() -> None:
    for method in ("allreduce", "random_groups", "moshpit_weighted", "moshpit_conserved"):
        for peers in range(2, 9):
            assert Averaging(method=method, peers=peers, group_size=8).run(0)["iterations_1e9"] == 1


DIGESTS = """
import sys
if sys.argv[1] == "torch":
    import torch
from shoal.sim.averaging import Averaging
from shoal.sim.averaging_methods import METHODS
runs = [Averaging(method=method, peers=200, group_size=16, failure_rate=0.02).run(5) for method in METHODS]
print(*(run["trace_digest"] for run in runs), "torch" in sys.modules)
"""


def test_a_seed_gives_one_trace_whatever_the_hash_seed_and_with_torch_or_without(monkeypatch) -> None:
    told = []
    for hash_seed, first in (("1", "alone"), ("2", "torch")):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS, first], capture_output=True, text=True, check=True, timeout=60
        )
        told.append(done.stdout.split())
    assert told[0][-1] == "False", "a scenario that needs no torch does not import it"
    assert told[1][-1] == "True"
    assert told[0][:-1] == told[1][:-1]
    assert len(set(told[0])) == len(told[0])
