"""`shoal simulate`: figures, files of scenarios, processes, pictures, and what bad input is told."""

from __future__ import annotations

import json
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from shoal.cli import simulate as command
from shoal.cli.main import main
from shoal.core.errors import NobodyThere
from shoal.sim.averaging import Averaging

KEYS = [
    "method", "peers", "group_size", "dims", "failure_rate", "seeds",
    "iterations_1e9", "iterations_1e4", "error_by_iteration", "trace_digest",
]  # fmt: skip
SMALL = ("averaging", "--set", "peers=64", "--set", "group_size=8", "--set", "failure_rate=0.02")
FILE = """
seeds = 4

[[scenario]]
name = "averaging"
peers = 64
group_size = 4
dims = [4, 4, 4]

[[scenario]]
name = "averaging"
method = "push_sum"
peers = 64
failure_rate = 0.01
"""


def shoal(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shoal", "simulate", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_moshpit_on_a_full_grid_is_exact_after_two_iterations(monkeypatch, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    settings = ["method=moshpit", "peers=1024", "group_size=32", "failure_rate=0"]
    given = [word for setting in settings for word in ("--set", setting)]
    assert shoal(monkeypatch, "averaging", *given, "--seeds", "10", "--json", str(out)) == 0
    (figures,) = json.loads(out.read_text())
    assert list(figures) == KEYS
    assert figures["iterations_1e9"] == figures["iterations_1e4"] == 2.0
    assert [figures["seeds"], figures["dims"]] == [10, [32, 32]]
    assert len(figures["error_by_iteration"]) == 50
    assert figures["error_by_iteration"][1] == pytest.approx(2.2e-16)
    assert "moshpit" in capsys.readouterr().out


def test_the_figures_are_the_same_whatever_the_number_of_jobs(monkeypatch, tmp_path: Path) -> None:
    for jobs in ("1", "3"):
        out = str(tmp_path / f"{jobs}.json")
        assert shoal(monkeypatch, *SMALL, "--seeds", "7", "--jobs", jobs, "--json", out) == 0
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "3.json").read_bytes()
    one = Averaging(peers=64, group_size=8, failure_rate=0.02)
    assert json.loads((tmp_path / "1.json").read_text()) == [one.summary([one.run(seed) for seed in range(7)])]


def test_a_file_has_several_scenarios_and_the_command_wins_over_it(monkeypatch, tmp_path: Path) -> None:
    file, out, picture = tmp_path / "two.toml", tmp_path / "out.json", tmp_path / "out.png"
    file.write_text(FILE)
    assert shoal(monkeypatch, str(file), "--json", str(out), "--plot", str(picture)) == 0
    first, second = json.loads(out.read_text())
    assert [first["method"], first["dims"], first["seeds"]] == ["moshpit", [4, 4, 4], 4]
    assert [second["method"], second["dims"], second["failure_rate"]] == ["push_sum", None, 0.01]
    assert first["iterations_1e9"] == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert shoal(monkeypatch, str(file), "--set", "failure_rate=0.2", "--seeds", "2", "--json", str(out)) == 0
    assert [(one["failure_rate"], one["seeds"]) for one in json.loads(out.read_text())] == [(0.2, 2), (0.2, 2)]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["averaging", "--set", "method=moshpti"], "method = 'moshpti' is not allowed: it must be one of allreduce"),
        (["averagin"], "did you mean averaging?"),
        (["averaging", "--set", "peer=3"], "did you mean peers?"),
        (["averaging", "--set", "peers=many"], "peers = 'many' is not allowed: it must be a whole number"),
        (["averaging", "--set", "peers"], "of the form key=value"),
        (["averaging", "--set", "=3"], "of the form key=value"),
        (["missing.toml"], "a file that can be read"),
        (["averaging", "--json", "no/such/folder/x.json"], "--json = "),
        (["averaging", "--plot", "no/such/folder/x.png"], "--plot = "),
    ],
)
def test_bad_input_ends_with_2_and_one_line(monkeypatch, capsys, args, told) -> None:
    assert shoal(monkeypatch, *args) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shoal: ")
    assert said.err.count("\n") == 1
    assert told in said.err


@pytest.mark.parametrize(
    "text",
    [
        "", "seeds = 3", "not toml", "seeds = 3\nscenario = 4", "[[scenario]]\npeers = 64",
        "[scenario]\nname = 'averaging'",
        "seeds = 0\n[[scenario]]\nname = 'averaging'", "speed = 3\n[[scenario]]\nname = 'averaging'",
        "[[scenario]]\nname = 'averaging'\npeers = 'x'", "[[scenario]]\nname = 'averaging'\npears = 3",
    ],
)  # fmt: skip
def test_a_bad_file_ends_with_2_and_one_line(monkeypatch, tmp_path: Path, capsys, text) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert shoal(monkeypatch, str(file)) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal: ")
    assert said.count("\n") == 1


def test_seeds_and_jobs_below_one_end_with_2(monkeypatch) -> None:
    assert shoal(monkeypatch, "averaging", "--seeds", "0") == 2
    assert shoal(monkeypatch, "averaging", "--jobs", "0") == 2


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [(NobodyThere("nobody was there"), 1, "nobody was there"), (KeyboardInterrupt(), 130, "")],
)
def test_a_run_that_fails_names_its_seed_and_how_to_see_it_again(monkeypatch, capsys, raised, code, told) -> None:
    def fail(self: Averaging, seed: int) -> dict[str, object]:
        if seed == 2:
            raise raised
        return run(self, seed)

    run = Averaging.run
    monkeypatch.setattr(Averaging, "run", fail)
    assert shoal(monkeypatch, *SMALL, "--seeds", "4") == code
    said = capsys.readouterr().err
    assert told in said
    assert ("seed 2 of averaging failed" in said) == (code == 1)
    if code == 1:
        again = said.partition('python -c "')[2].partition('"')[0]
        monkeypatch.setattr(Averaging, "run", lambda self, seed: seen.append((self, seed)))
        seen: list[tuple[Averaging, int]] = []
        exec(again)
        assert seen == [(Averaging(peers=64, group_size=8, failure_rate=0.02), 2)]


def test_a_process_that_was_killed_ends_with_1(monkeypatch, capsys) -> None:
    def killed(*args: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(command, "_run_all", killed)
    assert shoal(monkeypatch, *SMALL) == 1
    assert "try fewer --jobs" in capsys.readouterr().err


def test_help_shows_exit_codes_and_an_example(monkeypatch, capsys) -> None:
    assert shoal(monkeypatch, "--help") == 0
    told = capsys.readouterr().out
    assert "Exit codes: 0 done; 1 a simulation failed; 2 bad usage; 130 after Ctrl-C." in told
    assert "Example:  shoal simulate averaging --set" in told
