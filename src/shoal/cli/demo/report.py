"""The demo's report: `summary.json`, `loss.png` and `report.html`, the latter one file that needs nothing else."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from shoal.cli.demo.figures import History, mean_losses
from shoal.cli.demo.screen import megabytes, speed_name

matplotlib.use("Agg")
from matplotlib import pyplot

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#2f6fb3", "#c2410c", "#2a9d72", "#9b5fb8", "#d19a00", "#0e8fa6", "#b5487a", "#6b7f2a")


def write_report(summary: dict[str, Any], solo: History, histories: list[History], out: Path) -> None:
    """Write the three files into `out`."""
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draw_losses(summary, solo, histories, out / "loss.png")
    picture = base64.b64encode((out / "loss.png").read_bytes()).decode("ascii")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.jinja").render(
        summary=summary,
        picture=picture,
        rows=peer_rows(summary, histories),
        story=story(summary),
        cards=cards(summary),
        failures=summary["failed_rounds"],
    )
    (out / "report.html").write_text(page, encoding="utf-8")


def draw_losses(summary: dict[str, Any], solo: History, histories: list[History], path: Path) -> None:
    """Validation loss over time: every peer, their mean, the lone peer; marks for the kill and the join."""
    figure, axes = pyplot.subplots(figsize=(10, 5.2), dpi=140)
    axes.plot(*_columns(solo), color=INK, linewidth=1.8, linestyle=(0, (5, 2)), label="one peer alone, 1x", zorder=4)
    for place, history in enumerate(histories):
        label = f"{history.name}, {speed_name(history.speed)}"
        label += {summary["killed"]: ", killed", summary["joined"]: ", joined late"}.get(history.name, "")
        axes.plot(*_columns(history), color=COLOURS[place % len(COLOURS)], linewidth=1.4, label=label, zorder=3)

    seconds, solo_loss = summary["seconds"], summary["solo_validation_loss"]
    low = min(loss for history in [solo, *histories] for loss in history.losses.values())
    high = max(loss for at_seconds, loss in solo.losses.items() if at_seconds >= seconds / 12)
    axes.set_ylim(low - 0.06 * (high - low), high + 0.12 * (high - low))
    axes.set_xlim(0, seconds * 1.01)
    for at_seconds, text in (
        (summary["killed_at_seconds"], f"{summary['killed']} killed"),
        (summary["joined_at_seconds"], f"{summary['joined']} joins"),
    ):
        axes.axvline(at_seconds, color=FAINT, linewidth=1.0, linestyle=":", zorder=1)
        axes.annotate(
            text, (at_seconds, 1.0), xycoords=("data", "axes fraction"), xytext=(5, -14), textcoords="offset points",
            color=INK, fontsize=9,
        )  # fmt: skip
    axes.axhline(solo_loss, color=FAINT, linewidth=0.9, zorder=1)
    reached = summary["seconds_to_solo_loss"]
    if reached is not None:
        mean = dict(mean_losses(histories))[reached]
        axes.plot([reached], [mean], "o", color=INK, markersize=6, zorder=5)
        axes.annotate(
            f"the swarm is where the lone peer\nends after {seconds:.0f} s: {reached:.0f} s", (reached, mean),
            xytext=(-18, -44), textcoords="offset points", ha="right", color=INK, fontsize=9,
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.8},
        )  # fmt: skip
    axes.set_xlabel("seconds of training", color=INK)
    axes.set_ylabel("validation loss (nats per character)", color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _columns(history: History) -> tuple[list[float], list[float]]:
    return list(history.losses.keys()), list(history.losses.values())


def cards(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The figures one looks at first: value, name, explanation."""
    reached, seconds = summary["seconds_to_solo_loss"], summary["solo_seconds"]
    return [
        (
            "never" if reached is None else f"{reached:.0f} s",
            "to the lone peer's loss",
            f"one 1x peer alone ended at {summary['solo_validation_loss']:.3f} after {seconds:.0f} s",
        ),
        (
            f"{summary['mean_final_validation_loss']:.3f}",
            "final validation loss",
            f"mean of the live peers; alone {summary['solo_validation_loss']:.3f}",
        ),
        (str(summary["rounds"]), "averagings", f"{len(summary['failed_rounds'])} failed"),
        (
            f"{max(summary['longest_gap_seconds'].values()):.1f} s",
            "longest gap",
            "between two averagings of a live peer, from the kill on",
        ),
        (f"{100 * summary['disagreement']:.2f} %", "disagreement", "of the replicas, before the last averaging"),
    ]


def peer_rows(summary: dict[str, Any], histories: list[History]) -> list[dict[str, str]]:
    rows = []
    for history in histories:
        name, loss = history.name, summary["final_validation_loss"][history.name]
        if name == summary["killed"]:
            fate = f"killed at {summary['killed_at_seconds']:.1f} s"
        elif name == summary["joined"]:
            fate = f"joined at {summary['joined_at_seconds']:.1f} s"
        else:
            fate = "there from start to end"
        gap = summary["longest_gap_seconds"].get(name)
        rows.append(
            {
                "name": name,
                "speed": speed_name(history.speed),
                "fate": fate,
                "steps": str(summary["steps"][name]),
                "loss": "–" if loss is None else f"{loss:.3f}",
                "averagings": str(summary["averagings"][name]),
                "gap": "–" if gap is None else f"{gap:.1f} s",
                "sent": megabytes(summary["bytes_sent"][name]),
                "received": megabytes(summary["bytes_received"][name]),
            }
        )
    return rows


def failure_name(failure: dict[str, Any]) -> str:
    """Some fail before they have a number, for example because nobody else was there."""
    return f"averaging {failure['round']}" if failure["round"] else "an averaging"


def story(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What happened when."""
    killed, late = summary["killed"], summary["joined"]
    events = [
        (
            0.0,
            f"{summary['peers']} peers begin; all but the first take over the state of those who are there",
        ),
        (summary["killed_at_seconds"], f"{killed} is killed without a goodbye; the others go on"),
        (
            summary["joined_at_seconds"],
            f"{late} has joined: it took over parameters and optimizer state, and trains along",
        ),
        (summary["seconds"], "the peers leave, after one last averaging"),
    ]
    if summary["seconds_to_solo_loss"] is not None:
        reached = "the mean validation loss of the live peers is at the lone peer's final loss, or below"
        events.append((summary["seconds_to_solo_loss"], reached))
    events += [
        (
            failure["at_seconds"],
            f"{failure_name(failure)} fails at {', '.join(failure['failed_at'])}: {failure['reason']}",
        )
        for failure in summary["failed_rounds"]
    ]
    return [(f"{at_seconds:.1f} s", text) for at_seconds, text in sorted(events)]
