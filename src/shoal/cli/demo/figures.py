"""From the peers' journals to `summary.json`: every figure of the report, computed from plain data."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class History:
    """What one peer wrote down. Times are seconds since training began."""

    name: str
    speed: float
    peer_id: str = ""
    ready: bool = False
    began_at_seconds: float | None = None
    ticks: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[str, Any] | None = None
    _read_bytes: int = 0

    @property
    def last(self) -> dict[str, Any]:
        return self.ticks[-1] if self.ticks else {}

    @property
    def losses(self) -> dict[float, float]:
        return {tick["at_seconds"]: tick["validation_loss"] for tick in self.ticks}

    @property
    def steps_per_second(self) -> float:
        """Over the last ten ticks."""
        recent = self.ticks[-10:]
        if len(recent) < 2:
            return 0.0
        steps: float = recent[-1]["step"] - recent[0]["step"]
        return steps / float(recent[-1]["at_seconds"] - recent[0]["at_seconds"])

    def update(self, out: Path) -> None:
        """Read what has been added to the journal since the last call."""
        path = out / f"{self.name}.jsonl"
        if not path.exists():
            return
        with path.open("rb") as journal:
            journal.seek(self._read_bytes)
            added = journal.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            kind = entry.pop("kind")
            if kind == "ready":
                self.ready = True
            elif kind == "training":
                self.began_at_seconds, self.peer_id = entry["at_seconds"], entry["peer_id"]
            elif kind == "measured":
                self.ticks.append(entry)
            elif kind == "finished":
                self.finished = entry


def mean_losses(live: list[History]) -> list[tuple[float, float]]:
    """The mean validation loss of the given peers at every tick at which one of them measured."""
    by_tick: dict[float, list[float]] = {}
    for history in live:
        for at_seconds, loss in history.losses.items():
            by_tick.setdefault(at_seconds, []).append(loss)
    return [(at_seconds, sum(losses) / len(losses)) for at_seconds, losses in sorted(by_tick.items())]


def first_time_at_or_below(curve: list[tuple[float, float]], loss: float) -> float | None:
    return next((at_seconds for at_seconds, value in curve if value <= loss), None)


def disagreement(rows: list[np.ndarray]) -> float:
    """How far the farthest replica is from the mean of all, relative to the length of the mean."""
    mean = np.mean(np.stack(rows).astype(np.float64), axis=0)
    return float(max(np.linalg.norm(row - mean) for row in rows) / np.linalg.norm(mean))


def longest_gap(applied_at_seconds: list[float], since_seconds: float, end_seconds: float) -> float:
    """The longest time between two averagings, among the gaps that were still open at `since_seconds` or began later.

    The end of training closes the last gap, so that a peer which never averaged again does not look well.
    """
    moments = [*sorted(moment for moment in applied_at_seconds if moment < end_seconds), end_seconds]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments) if later > since_seconds]
    return max(gaps, default=end_seconds - since_seconds)


def applied_by_two(ends: list[dict[str, Any]]) -> int:
    """How many averagings, told apart by number, at least two peers applied."""
    counts = Counter(number for end in ends for number in set(end["applied_numbers"]))
    return sum(count >= 2 for count in counts.values())


def merged_failures(histories: list[History]) -> list[dict[str, Any]]:
    """One entry for each averaging that failed at some peer, by number; reasons that differ are told apart."""
    names = {history.peer_id: history.name for history in histories if history.peer_id}
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for history in histories:
        for failure in (history.finished or {}).get("failures", []):
            # Number 0: it failed before it got a number, for example because nobody else was there.
            key = (failure["round"], "" if failure["round"] else f"{history.name} {failure['at_seconds']}")
            entry = merged.setdefault(
                key,
                {"round": failure["round"], "reason": "", "members": [], "failed_at": [], "at_seconds": math.inf},
            )
            reason = failure["reason"]
            for peer_id, name in names.items():
                reason = reason.replace(peer_id, name).replace(peer_id[:8], name)  # shoal writes ids short
            if reason not in entry["reason"]:
                entry["reason"] += ("; " if entry["reason"] else "") + reason
            known = [names.get(member, member) for member in failure["members"]]
            entry["members"] = sorted({*entry["members"], *known})
            entry["failed_at"].append(history.name)
            entry["at_seconds"] = min(entry["at_seconds"], round(failure["at_seconds"], 2))
    return sorted(merged.values(), key=lambda entry: float(entry["at_seconds"]))


def summarize(
    solo: History,
    histories: list[History],
    out: Path,
    *,
    seconds: float,
    seed: int,
    killed: str,
    killed_at_seconds: float,
    late: str,
) -> dict[str, Any]:
    """The content of `summary.json`."""
    live = [history for history in histories if history.name != killed]
    latecomer = next(history for history in histories if history.name == late)
    curve = mean_losses(histories)  # a killed peer has no ticks after its death, a late one none before its start
    solo_loss = solo.last["validation_loss"]
    final = {history.name: None if history.name == killed else history.last["validation_loss"] for history in histories}
    end = {history.name: history.finished or history.last for history in histories}
    applied = {history.name: (history.finished or {}).get("applied_at_seconds", []) for history in live}
    others = [loss for name, loss in final.items() if loss is not None and name != late]
    late_loss = latecomer.last["validation_loss"]
    return {
        "peers": len(histories) - 1,  # as asked for; the late one comes on top
        "seconds": seconds,
        "seed": seed,
        "speeds": {history.name: history.speed for history in histories},
        "rounds": applied_by_two(list(end.values())),
        "failed_rounds": merged_failures(histories),
        "killed": killed,
        "killed_at_seconds": killed_at_seconds,
        "joined": late,
        "joined_at_seconds": latecomer.began_at_seconds,
        "began_at_seconds": {history.name: history.began_at_seconds for history in histories},
        "final_validation_loss": final,
        "mean_final_validation_loss": curve[-1][1],
        "late_peer_loss_above_others": late_loss / (sum(others) / len(others)) - 1.0,
        "solo_validation_loss": solo_loss,
        "seconds_to_solo_loss": first_time_at_or_below(curve, solo_loss),
        "solo_seconds": seconds,
        "disagreement": disagreement([np.load(out / f"{history.name}.npy") for history in live]),
        "longest_gap_seconds": {
            name: longest_gap(moments, killed_at_seconds, seconds) for name, moments in applied.items()
        },
        "averagings": {name: values["averagings"] for name, values in end.items()},
        "bytes_sent": {name: values["bytes_sent"] for name, values in end.items()},
        "bytes_received": {name: values["bytes_received"] for name, values in end.items()},
        "steps": {history.name: history.last["step"] for history in histories},
        "solo_steps": solo.last["step"],
        "cpu_seconds": {history.name: history.last["cpu_seconds"] for history in histories},
        "mean_cores": sum(history.last["cpu_seconds"] for history in histories) / seconds,
    }
