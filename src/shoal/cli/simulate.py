"""`shoal simulate`: scenarios of the simulated world, over many seeds and processes."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shoal.core.errors import OptionError, ShoalError
from shoal.core.options import check_number
from shoal.sim.scenarios import Plots, Scenario, scenario

SEEDS = 10
"""Where neither the command nor the file says how many."""
MAX_SEEDS = 100_000
LONGEST_CELL = 24
"""Longer texts and lists are left to the JSON file."""

Runs = list[list[dict[str, Any]]]


def simulate(
    what: str, settings: list[str], seeds: int | None, jobs: int, figures: Path | None, plot: Path | None
) -> int:
    """Run every scenario with seeds 0 to `seeds` - 1; returns the exit code. Raises OptionError for bad input."""
    scenarios, seeds_of_file = _read_scenarios(what, _read_settings(settings))
    if plot is not None:
        _check_plot(scenarios)
    for option, path in (("--json", figures), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise OptionError(option, str(path), "a file in a folder that exists")
    try:
        runs = _run_all(scenarios, seeds or seeds_of_file or SEEDS, jobs)
    except BrokenProcessPool:
        print("shoal: a simulating process was killed, perhaps for want of memory: try fewer --jobs", file=sys.stderr)
        return 1
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    summaries = [one.summary(of_seeds) for one, of_seeds in zip(scenarios, runs, strict=True)]
    _print_tables(scenarios, summaries)
    if figures is not None:
        figures.write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    if plot is not None and isinstance(scenarios[0], Plots):
        scenarios[0].plot(summaries, plot)
    return 0


def _read_settings(settings: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key or not equals:
            raise OptionError("--set", setting, "of the form key=value")
        found[key.strip()] = value
    return found


def _read_scenarios(what: str, settings: dict[str, object]) -> tuple[list[Scenario], int | None]:
    """The scenarios, and the number of seeds that the file gives. `settings` win over those of the file."""
    if not what.endswith(".toml"):
        return [scenario(what, settings)], None
    try:
        content = tomllib.loads(Path(what).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError("FILE", what, f"a file that can be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError("FILE", what, f"a TOML file ({error})") from None
    tables, seeds = content.pop("scenario", []), content.pop("seeds", None)
    form = "[[scenario]] tables with a name and options, and seeds at the top"
    is_form = isinstance(tables, list) and tables and all(isinstance(one, dict) and "name" in one for one in tables)
    if content or not is_form:
        raise OptionError("FILE", what, form + (f"; it has {', '.join(content)}" if content else ""))
    check_number("seeds", seeds, 1, MAX_SEEDS, whole=True, optional=True)
    return [scenario(str(one.pop("name")), {**one, **settings}) for one in tables], seeds


def _check_plot(scenarios: Sequence[Scenario]) -> None:
    names = sorted({one.name for one in scenarios})
    if len(names) > 1:
        raise OptionError("--plot", ", ".join(names), "used with scenarios of one name")
    if not isinstance(scenarios[0], Plots):
        raise OptionError("--plot", names[0], "used with a scenario that can be drawn")


def _run_all(scenarios: Sequence[Scenario], seeds: int, jobs: int) -> Runs:
    """The figures of every scenario by seed; the same whatever `jobs` is."""
    runs: Runs = [[{} for _ in range(seeds)] for _ in scenarios]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=len(scenarios) * seeds)
        for place, seed, figures in _each(scenarios, seeds, jobs):
            runs[place][seed] = figures
            progress.advance(bar)
    return runs


def _each(scenarios: Sequence[Scenario], seeds: int, jobs: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Place of the scenario, seed, figures. After an error, or Ctrl-C, no process is left."""
    tasks = [(place, seed) for place in range(len(scenarios)) for seed in range(seeds)]
    if jobs == 1:
        for place, seed in tasks:
            try:
                yield place, seed, scenarios[place].run(seed)
            except Exception:
                _say_which(scenarios[place], seed)
                raise
        return
    processes = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), processes, signal.signal, (signal.SIGINT, signal.SIG_DFL))
    try:
        futures = [pool.submit(scenarios[place].run, seed) for place, seed in tasks]
        for (place, seed), future in zip(tasks, futures, strict=True):
            if future.exception() is not None and not isinstance(future.exception(), BrokenProcessPool):
                _say_which(scenarios[place], seed)
            yield place, seed, future.result()
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _say_which(failed: Scenario, seed: int) -> None:
    kind = type(failed)
    code = f"from {kind.__module__} import {kind.__name__}; {failed!r}.run({seed})"
    print(f'shoal: seed {seed} of {failed.name} failed; again with:  python -c "{code}"', file=sys.stderr)


def _print_tables(scenarios: Sequence[Scenario], summaries: list[dict[str, Any]]) -> None:
    """One table for each name of a scenario, a row for each summary."""
    console = Console()
    for name in dict.fromkeys(one.name for one in scenarios):
        rows = [
            {key: text for key, value in summary.items() if (text := _cell(value)) is not None}
            for one, summary in zip(scenarios, summaries, strict=True)
            if one.name == name
        ]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = Table(title=name, box=SIMPLE)
        for column in columns:
            table.add_column(column.replace("_", " "), overflow="fold")
        for row in rows:
            table.add_row(*(row.get(column, "") for column in columns))
        console.print(table)


def _cell(value: object) -> str | None:
    """What is short enough for a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " x ".join(map(str, value)) if isinstance(value, list) else str(value)
    return None if isinstance(value, dict) or len(text) > LONGEST_CELL else text
