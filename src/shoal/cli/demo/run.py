"""`shoal demo`: one peer alone; then a swarm of unequal peers, one killed, one joining late; then a report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.cli.demo.figures import History, summarize
from shoal.cli.demo.peer import STEP_SECONDS, go_signal
from shoal.cli.demo.report import write_report
from shoal.cli.demo.screen import Screen, row

FIRST_SPEEDS = (1.0, 1.0)  # then alternately a half and a quarter
SLOW_SPEEDS = (0.5, 0.25)
POLL_SECONDS = 0.25
START_TIMEOUT_SECONDS = 120.0  # importing torch in several processes on a busy machine
END_TIMEOUT_SECONDS = 30.0  # the last averaging takes at most 10 s
STDERR_TAIL_LINES = 20
KILLED, SOLO = "p1", "solo"


class DemoFailed(Exception):
    """Something happened that is not part of the demo."""


@dataclass
class Child:
    """One peer's process, what it wrote down so far, and where its stderr goes."""

    history: History
    process: subprocess.Popen[bytes]
    stderr: Path
    killed: bool = False

    def state(self) -> str:
        """What the orchestrator knows better than the peer; empty: ask the peer."""
        if self.killed:
            return "killed"
        if self.history.finished:
            return "left"
        return "" if self.history.ticks else ("ready" if self.history.ready else "starting")

    def check(self, scratch: Path) -> None:
        """Raises DemoFailed when this peer has ended without having finished."""
        code = self.process.poll()
        if code is None or self.killed:
            return
        self.history.update(scratch)
        if code == 0 and self.history.finished:
            return
        lines = self.stderr.read_text(encoding="utf-8", errors="replace").splitlines()[-STDERR_TAIL_LINES:]
        tail = "\n  ".join(lines) or "(nothing)"
        raise DemoFailed(f"{self.history.name} ended with exit code {code}; the end of its stderr:\n  {tail}")


@dataclass
class Stage:
    """Runs a set of peers over one stretch of time: the solo run, then the swarm."""

    title: str
    seconds: float
    seed: int
    scratch: Path  # the address, which holds the run's secret, and each peer's remembered state: deleted in the end
    screen: Screen
    children: list[Child] = field(default_factory=list)
    began: float | None = None

    @property
    def meeting(self) -> Path:
        return self.scratch / f"{self.title}.json"

    def start(self, name: str, speed: float, *flags: str) -> Child:
        command = [sys.executable, "-m", "shoal.cli.demo.peer", "--name", name, "--speed", str(speed), *flags]
        command += ["--seconds", str(self.seconds), "--seed", str(self.seed)]
        command += ["--out", str(self.scratch), "--meeting", str(self.meeting)]
        state = self.scratch / f"state-{name}"
        state.mkdir()
        environment = {**os.environ, "SHOAL_STATE": str(state), "OMP_NUM_THREADS": "1"}
        stderr = self.scratch / f"{name}.stderr"
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
        child = Child(History(name, speed), process, stderr)
        self.children.append(child)
        return child

    def elapsed_seconds(self) -> float:
        """Since training began; 0 before."""
        if self.began is None and self.meeting.exists():
            self.began = json.loads(self.meeting.read_text(encoding="utf-8"))["began"]
        return 0.0 if self.began is None else time.time() - self.began

    def poll(self) -> float:
        """Read the journals, refresh the screen, look for failures; returns the time."""
        time.sleep(POLL_SECONDS)
        elapsed_seconds = self.elapsed_seconds()
        for child in self.children:
            child.history.update(self.scratch)
        rows = [row(child.history, child.state()) for child in self.children]
        self.screen.show(self.title, elapsed_seconds, self.seconds, rows)
        for child in self.children:
            child.check(self.scratch)
        return elapsed_seconds

    def begin(self) -> None:
        """Give the signal to begin when all processes are ready; return when the founder trains."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while self.began is None:
            if all(child.history.ready for child in self.children):
                go_signal(self.meeting).touch()
            if time.monotonic() > deadline:
                raise DemoFailed(f"no peer began to train within {START_TIMEOUT_SECONDS:.0f} s")
            self.poll()

    def finish(self) -> None:
        """Wait until all peers have left."""
        while any(child.process.poll() is None for child in self.children):
            if self.poll() > self.seconds + END_TIMEOUT_SECONDS:
                slow = [child.history.name for child in self.children if child.process.poll() is None]
                raise DemoFailed(f"{', '.join(slow)} did not end within {END_TIMEOUT_SECONDS:.0f} s of the end")
        self.poll()

    def end_children(self) -> None:
        """Leave no process behind."""
        running = [child.process for child in self.children if child.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + 2.0
        for process in running:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def speeds(peers: int) -> list[float]:
    """1, 1, 1/2, 1/4, 1/2, 1/4, ..."""
    slow = [SLOW_SPEEDS[place % 2] for place in range(peers)]
    return [*FIRST_SPEEDS, *slow][:peers]


def run_alone(stage: Stage) -> History:
    """One machine of speed 1, no swarm: what the swarm is compared with."""
    stage.screen.say(f"First one peer of speed 1x alone for {stage.seconds:.0f} s: what the swarm is compared with.")
    child = stage.start(SOLO, 1.0, "--solo")
    stage.begin()
    stage.finish()
    stage.screen.say(
        f"Alone, the validation loss after {stage.seconds:.0f} s is {child.history.last['validation_loss']:.3f}."
    )
    return child.history


def run_swarm(stage: Stage, peers: int) -> tuple[list[History], float]:
    """The swarm, with a death at a third of the time and a newcomer at half; returns when the death was, too."""
    say, late = stage.screen.say, f"p{peers}"
    kill_at_seconds, join_at_seconds = stage.seconds / 3, stage.seconds / 2
    say(f"Now {peers} peers for {stage.seconds:.0f} s; {KILLED} will be killed, {late} will join late.")
    for place, speed in enumerate(speeds(peers)):
        stage.start(f"p{place}", speed, *(["--founder"] if place == 0 else []))
    newcomer = stage.start(late, 1.0, "--join-at-seconds", str(join_at_seconds)).history
    stage.begin()

    victim = stage.children[1]
    while stage.poll() < kill_at_seconds:
        pass
    victim.killed = True
    victim.process.kill()
    killed_at_seconds = round(stage.elapsed_seconds(), 2)
    say(f"{killed_at_seconds:.1f} s: {KILLED} was killed (no goodbye, in the middle of whatever it was doing)")
    while newcomer.began_at_seconds is None and stage.poll() < stage.seconds:
        pass
    if newcomer.began_at_seconds is None:
        raise DemoFailed(f"{late} did not get to train before the end")
    say(f"{newcomer.began_at_seconds:.1f} s: {late} has joined, took over the run's state and trains along")
    stage.finish()
    return [child.history for child in stage.children], killed_at_seconds


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """So that the children of a terminated demo are ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_demo(peers: int, seconds: float, out: Path, seed: int) -> int:
    """Run the demo and write the report into `out`; returns the exit code: 0, 1 after a failure, 130 after Ctrl-C."""
    if peers < 2 or seconds < 6:
        print("the demo needs at least 2 peers and 6 seconds", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    screen = Screen()
    screen.say(
        f"shoal demo: peers of speed 1x, 1x, 1/2x, 1/4x ... train one small language model.\n"
        f"Unequal machines are emulated: "
        f"a step takes a fixed {STEP_SECONDS} s at 1x, {2 * STEP_SECONDS} s at 1/2x and {4 * STEP_SECONDS} s at 1/4x; "
        f"everything else is real."
    )
    with (
        tempfile.TemporaryDirectory(prefix="shoal-demo-", ignore_cleanup_errors=True) as folder,
        sigterm_as_interrupt(),
    ):
        alone = Stage("alone", seconds, seed, Path(folder), screen)
        swarm = Stage("swarm", seconds, seed, Path(folder), screen)
        try:
            with screen:
                solo = run_alone(alone)
                histories, killed_at_seconds = run_swarm(swarm, peers)
            summary = summarize(
                solo,
                histories,
                Path(folder),
                seconds=seconds,
                seed=seed,
                killed=KILLED,
                killed_at_seconds=killed_at_seconds,
                late=f"p{peers}",
            )
            for journal in Path(folder).glob("*.jsonl"):
                shutil.copy(journal, out)
        except KeyboardInterrupt:
            screen.say("interrupted; all peers are ended")
            return 130
        except DemoFailed as failure:
            screen.say(f"the demo failed: {failure}")
            return 1
        finally:
            alone.end_children()
            swarm.end_children()
    write_report(summary, solo, histories, out)
    for line in verdict(summary):
        screen.say(line)
    screen.say(f"Report: {out / 'report.html'}")
    return 0


def verdict(summary: dict[str, Any]) -> list[str]:
    """The result in a few lines."""
    reached, seconds = summary["seconds_to_solo_loss"], summary["solo_seconds"]
    first = (
        f"The swarm reached the lone peer's final loss in {reached:.0f} s instead of {seconds:.0f} s."
        if reached is not None
        else f"The swarm did not reach the lone peer's final loss within {seconds:.0f} s."
    )
    return [
        first,
        f"Final validation loss: swarm {summary['mean_final_validation_loss']:.3f}, "
        f"alone {summary['solo_validation_loss']:.3f}; the replicas differ by {100 * summary['disagreement']:.2f} %.",
    ]
