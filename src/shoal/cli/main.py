"""The command line: `shoal run`, `shoal seed`, `shoal demo`, `shoal simulate`. Nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from shoal.core.errors import ShoalError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {importlib.metadata.version('shoal')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train one PyTorch model on many unequal, unreliable machines, with no coordinator.

    Examples:  shoal demo

               shoal run train.py --run birds
    """


Join = Annotated[list[str] | None, typer.Option("--join", metavar="ADDRESS", help="A peer that is already there.")]
Secret = Annotated[str | None, typer.Option(help="The run's secret; by default a random one in the address.")]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Where to listen; by default every interface, port from the run's name."),
]
Figures = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.")]


@app.command()
def run(
    script: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT", exists=True, dir_okay=False, help="A training script that calls shoal.join()."
        ),
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after --.")] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the address's, or the script's.")] = None,
    join: Join = None,
    secret: Secret = None,
    listen: Listen = None,
    peers: Annotated[int, typer.Option(min=1, max=64, help="How many local peers to start.")] = 1,
    json: Figures = None,
) -> None:
    """Run a training script as a peer of a swarm, or as several on this machine.

    Exit codes: 0 all scripts ended with 0; 1 a script failed; 2 bad usage; 130 after Ctrl-C; 143 after SIGTERM.

    Example:  shoal run train.py --run birds --peers 2 -- --epochs 3
    """
    from shoal.cli.launch import Launch

    launch = Launch(script, args or [], run, join or [], secret, listen, peers)
    raise typer.Exit(launch.run(json))


@app.command()
def seed(
    run: Annotated[str, typer.Option(metavar="NAME", help="The run's name.")] = "shoal",
    join: Join = None,
    secret: Secret = None,
    listen: Listen = None,
    json: Figures = None,
) -> None:
    """An entry peer that does not train: others join through it, and the first to attach a model founds the run.

    Ends with Ctrl-C or SIGTERM. Exit codes: 0 then; 1 when the run could not be joined; 2 bad usage.

    Example:  shoal seed --run birds --listen 0.0.0.0:4711
    """
    from shoal.cli.seed import serve_seed

    raise typer.Exit(serve_seed(run, join or [], secret, listen, json))


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=3, max=16, help="Peers at the start.")] = 4,
    seconds: Annotated[
        float, typer.Option(min=15, max=3600, help="How long the swarm trains (and the lone peer).")
    ] = 60,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes.")] = Path("demo-report"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights and of the data order.")] = 0,
    json: Figures = None,
) -> None:
    """Several peers of unequal speed train a small transformer; one is killed, one joins late; a report shows it.

    Exit codes: 0 done; 1 a peer failed that should not have; 130 after Ctrl-C.

    Example:  shoal demo --peers 4 --seconds 60 --out demo-report
    """
    from shoal.cli.demo.run import run_demo

    code = run_demo(peers, seconds, out, seed)
    if json is not None and (out / "summary.json").exists():
        json.write_bytes((out / "summary.json").read_bytes())
    raise typer.Exit(code)


@app.command()
def simulate(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE.toml", help="A scenario, or a file with [[scenario]] tables.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the scenario; wins over the file. Repeatable."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="How many seeds, from 0. Default: the file's, or 10.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the seeds.")] = 1,
    json: Figures = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", dir_okay=False, help="Draw the scenarios, one curve for each.")
    ] = None,
) -> None:
    """Simulate a scenario on this machine, once for each seed, and show the means. Equal seeds give equal figures.

    Scenarios: averaging.

    Exit codes: 0 done; 1 a simulation failed; 2 bad usage; 130 after Ctrl-C.

    Example:  shoal simulate averaging --set method=moshpit --set peers=1024 --set failure_rate=0.005 --seeds 100
    """
    from shoal.cli.simulate import simulate as simulate_scenarios

    raise typer.Exit(simulate_scenarios(what, settings or [], seeds, jobs, json, plot))


def main() -> None:
    """Entry point; an error that shoal raises on purpose is one readable message, not a traceback."""
    try:
        app()
    except ShoalError as error:
        typer.echo(f"shoal: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
