"""What the demo shows while it runs: a live table, or a plain line per peer every ten seconds without a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from shoal.cli.demo.figures import History

PLAIN_EVERY_SECONDS = 10.0
COLUMNS = ("peer", "speed", "steps/s", "loss", "averagings", "group", "sent", "state")


def megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


def speed_name(speed: float) -> str:
    return "1x" if speed == 1.0 else f"1/{round(1 / speed)}x"


def row(history: History, state: str) -> tuple[str, ...]:
    """The cells of one peer, in the order of `COLUMNS`; `state` overrides what the peer last said of itself."""
    last = history.last
    if not last:
        return history.name, speed_name(history.speed), "", "", "", "", "", state or "starting"
    return (
        history.name,
        speed_name(history.speed),
        f"{history.steps_per_second:.1f}",
        f"{last['validation_loss']:.3f}",
        str(last["averagings"]),
        str(last["group"]),
        megabytes(last["bytes_sent"]),
        state or last["state"],
    )


class Screen:
    """Shows the peers; `say` prints a line that stays."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._next_plain_seconds = 0.0
        self._title = ""

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def show(self, title: str, at_seconds: float, seconds: float, rows: list[tuple[str, ...]]) -> None:
        """Refresh the table, or print plain lines if ten seconds have passed."""
        at_seconds = min(at_seconds, seconds)
        if title != self._title:
            self._title, self._next_plain_seconds = title, PLAIN_EVERY_SECONDS
        if self._live:
            table = Table(title=f"{title}: {at_seconds:.0f} of {seconds:.0f} s", title_justify="left")
            for column in COLUMNS:
                table.add_column(column, justify="left" if column in {"peer", "state"} else "right")
            for cells in rows:
                table.add_row(*cells)
            self._live.update(table, refresh=True)
        elif at_seconds >= self._next_plain_seconds:
            self._next_plain_seconds = (at_seconds // PLAIN_EVERY_SECONDS + 1) * PLAIN_EVERY_SECONDS
            for cells in rows:
                named = [f"{column} {cell}" for column, cell in zip(COLUMNS, cells, strict=True) if cell]
                self.say(f"{title} {at_seconds:4.0f} s  " + "  ".join(named))
