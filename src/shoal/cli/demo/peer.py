"""The training script of one peer: an ordinary loop, plus the few lines that make it part of a swarm.

    python -m shoal.cli.demo.peer --name p0 --speed 1.0 --seconds 60 --seed 0 --out DIR --meeting FILE

`--solo` is the same loop without shoal. Nothing here knows about the other peers: the founder writes its address and
the moment it began into the file `--meeting`, the others read it. All times are seconds since that moment, so all
peers measure their validation loss on the same ticks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

import shoal
from shoal.cli.demo.model import CONTEXT, CharacterModel, loss_of
from shoal.cli.demo.text import batches, draw, read_text

# Chosen so that the noise of a batch of four, not the time to run downhill, limits the loss: then more machines help.
# Measured in one process over 60 emulated seconds, seeds 0 to 4, averaging every 2 s, the same death and late start:
#
#   learning rate                                       2e-3          3e-3          5e-3
#   loss of one peer alone, mean                        2.443         2.472         2.545
#   share of its time the swarm needs to get there      .72 to .78    .53 to .72    .25 to .50
#   disagreement just before an averaging               .007          .010          .015
#
# A peer alone is best near 2e-3, by .03. At 3e-3 the swarm reaches that loss, too, in .62 to .75 of the time.
# With real processes at 3e-3, seeds 0 to 4, on a busy machine: .62, .83, .62, .53, .65 (at .83 the hold-ups
# cost the 1x peers 8 % of their steps and there was no catching up yet); disagreement .008 to .012; the late peer's
# loss 0.2 to 1.2 % above the others'; 0.21 to 0.25 cores for the whole swarm.
BATCH_SIZE = 4
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.99)
STEP_SECONDS = 0.25  # one step of a machine of speed 1
CATCH_UP_SECONDS = 2.0  # after a hold-up, this much is made up for by steps without a pause
TICK_SECONDS = 1.0  # validation loss is measured this often
VALIDATION_WINDOWS = 256
MEETING_TIMEOUT_SECONDS = 180.0  # several processes import torch, perhaps on a busy machine


@dataclass
class Progress:
    """What the loop has done so far."""

    step: int = 0
    training_loss: float = float("nan")


class Journal:
    """JSON lines in `DIR/NAME.jsonl`, each written whole and at once: a killed peer leaves no half of a line."""

    def __init__(self, out: Path, name: str) -> None:
        self._file: TextIO = (out / f"{name}.jsonl").open("w", buffering=1, encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.cli.demo.peer", description="one peer of the demo")
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--speed", type=float, default=1.0, help="1 is the fastest machine, 0.25 takes four times as long"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="the common end, counted from the founder's start")
    parser.add_argument("--join-at-seconds", type=float, default=0.0, help="be ready, then join only at this moment")
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters")
    parser.add_argument("--out", type=Path, required=True, help="where the journal and the final parameters go")
    parser.add_argument("--meeting", type=Path, required=True, help="file by which the founder's address is passed on")
    parser.add_argument("--founder", action="store_true")
    parser.add_argument("--solo", action="store_true", help="train without shoal")
    return parser.parse_args(arguments)


def go_signal(meeting: Path) -> Path:
    """The file that tells the founder that all processes are ready, so that slow imports cost no training time."""
    return meeting.with_suffix(".go")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + MEETING_TIMEOUT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} was not there within {MEETING_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.02)


def write_meeting(path: Path, address: str) -> float:
    """Tell the others where the swarm is and when it began; returns that moment."""
    began = time.time()
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"address": address, "began": began}), encoding="utf-8")
    partial.replace(path)
    return began


def read_meeting(path: Path) -> tuple[str, float]:
    """Wait for the founder's address and the moment it began."""
    wait_for(path)
    meeting = json.loads(path.read_text(encoding="utf-8"))
    return meeting["address"], meeting["began"]


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


@dataclass
class Pace:
    """Emulates a machine of a given speed: a step is due every `step_seconds`, and the rest of it is slept.

    The validation loss is measured in the time that is slept anyway, so it costs no training.
    """

    began: float
    step_seconds: float
    end_seconds: float
    measure: Callable[[float], None]

    def __post_init__(self) -> None:
        elapsed_seconds = time.time() - self.began
        self._next_tick = (elapsed_seconds // TICK_SECONDS + 1) * TICK_SECONDS
        self._next_step = elapsed_seconds + self.step_seconds

    def wait(self) -> bool:
        """Sleep the rest of the step, measuring at every tick; False once the common end has come."""
        due = min(self._next_step, self.end_seconds)
        while self._next_tick <= due and self._next_tick < self.end_seconds:
            sleep_until(self.began + self._next_tick)
            self.measure(self._next_tick)
            self._next_tick += TICK_SECONDS
        sleep_until(self.began + due)
        elapsed_seconds = time.time() - self.began
        # The emulated machine has no part in short hold-ups of this one, so its steps catch up; longer ones are lost.
        self._next_step = max(self._next_step + self.step_seconds, elapsed_seconds - CATCH_UP_SECONDS)
        return elapsed_seconds < self.end_seconds


def parameter_row(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def status(swarm: shoal.Swarm | None) -> dict[str, Any]:
    """What the table on the screen shows of a peer."""
    if swarm is None:
        return {"state": "training", "averagings": 0, "group": 1, "bytes_sent": 0, "bytes_received": 0}
    report = swarm.report()
    return {
        "state": report.state,
        "averagings": report.averagings,
        "applied_numbers": [averaging.number for averaging in report.applied],
        "group": len(report.applied[-1].members) if report.applied else 1,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
    }


def closing(swarm: shoal.Swarm | None, joined_at_seconds: float) -> dict[str, Any]:
    """What only the end of a run can tell; shoal counts seconds from `join`, the demo from the founder's start."""
    if swarm is None:
        return {}
    report = swarm.report()
    failures = [
        {
            "round": failure.number,
            "reason": failure.reason,
            "members": list(failure.members),
            "at_seconds": joined_at_seconds + failure.at_seconds,
        }
        for failure in report.failures
    ]
    return {
        "averagings": report.averagings,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "applied_numbers": [averaging.number for averaging in report.applied],
        "applied_at_seconds": [joined_at_seconds + at_seconds for at_seconds in report.applied_at_seconds],
        "failures": failures,
        "report": str(report),
    }


def train(options: argparse.Namespace, journal: Journal) -> None:
    torch.set_num_threads(1)
    text = read_text()
    validation_inputs, validation_targets = draw(
        text.validation, VALIDATION_WINDOWS, CONTEXT, torch.Generator().manual_seed(0)
    )
    torch.manual_seed(options.seed)
    model: torch.nn.Module = CharacterModel()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)

    swarm: shoal.Swarm | None = None
    address, began = "", time.time()
    journal.write("ready")
    if options.solo or options.founder:
        wait_for(go_signal(options.meeting))
    else:
        address, began = read_meeting(options.meeting)
        sleep_until(began + options.join_at_seconds)
    joined = began
    if not options.solo:
        swarm = shoal.join("demo", peers=[address] if address else [], listen="127.0.0.1:0")
        joined = time.time() - swarm.report().seconds
        model, optimizer = swarm.attach(model, optimizer, batch_size=BATCH_SIZE)
    if options.founder or options.solo:
        began = write_meeting(options.meeting, swarm.address if swarm else "")

    progress = Progress()
    cpu_seconds_before = time.process_time()

    def measure(at_seconds: float) -> None:
        with torch.no_grad():
            validation_loss = float(loss_of(model, validation_inputs, validation_targets))
        journal.write(
            "measured",
            at_seconds=at_seconds,
            step=progress.step,
            training_loss=progress.training_loss,
            validation_loss=validation_loss,
            cpu_seconds=time.process_time() - cpu_seconds_before,
            **status(swarm),
        )

    journal.write("training", at_seconds=time.time() - began, peer_id=swarm.peer_id if swarm else "")
    loader = batches(text.training, BATCH_SIZE, CONTEXT, seed=swarm.data_seed if swarm else options.seed)
    pace = Pace(began, STEP_SECONDS / options.speed, options.seconds, measure)
    with swarm or contextlib.nullcontext():
        run_loop(model, optimizer, loader, pace, progress)
        measure(options.seconds)  # before the last averaging, which leaving the `with` block makes
        np.save(options.out / f"{options.name}.npy", parameter_row(model))
    journal.write("finished", at_seconds=time.time() - began, **closing(swarm, joined - began))


def run_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    pace: Pace,
    progress: Progress,
) -> None:
    """The loop itself is the one a person would write without shoal."""
    for inputs, targets in loader:
        loss: Tensor = loss_of(model, inputs, targets)
        loss.backward()
        if not pace.wait():
            return
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.training_loss = float(loss.detach())


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        train(options, Journal(options.out, options.name))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
