"""Starts commands the way a person does, reads what they print, and finds what they leave behind.

A `Command` runs in a session of its own: `interrupt_terminal()` is Ctrl-C in its terminal (SIGINT to the whole
foreground process group), `send(signal.SIGINT)` a signal to that one process. Every process it starts inherits a mark
in its environment, by which orphans are found however they were started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from swarm_process import HERE, ROOT

MARK = "SHOAL_TEST_MARK"
TRAINING_SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch
import shoal
from driven_peer import Descent

torch.set_num_threads(1)
options = dict(word.split("=", 1) for word in sys.argv[1:])
folder = Path(os.environ["TEST_FOLDER"])
mode = options.get("mode", "with")
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def say(**fields):
    print(json.dumps(fields), flush=True)


def claim(name):
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


say(joining=os.getpid())
swarm = shoal.join(strategy=shoal.AllReduce(every_seconds=0.3))
say(address=swarm.address, peer=swarm.peer_id)
while mode == "late" and not (folder / "attach").exists():
    time.sleep(0.02)
model = torch.nn.Linear(8, 1)
torch.nn.init.constant_(model.weight, float(options.get("start", 0)))
optimizer = Descent(model.parameters(), lr=float(options.get("lr", 0.01)))
say(attaching=True)
model, optimizer = swarm.attach(model, optimizer, batch_size=4)
say(attached=True, peer=swarm.peer_id, weight=model.weight[0, 0].item())


def train():
    end = time.monotonic() + 90
    step = 0
    while not (folder / options.get("stop", "stop")).exists() and time.monotonic() < end:
        inputs = torch.randn(4, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            report = swarm.report()
            say(step=step, peer=swarm.peer_id, averagings=report.averagings, peers=len(swarm.peers()),
                weight=model.weight[0, 0].item(),
                left=[event.peer_id for event in report.events if event.kind == "left"])
        if mode == "one fails" and (folder / "fail").exists() and claim("failed"):
            say(failing=swarm.peer_id)
            sys.exit(7)
        time.sleep(0.02)


if mode in ("with", "stubborn", "one fails", "late"):
    with swarm:
        train()
else:
    train()
    if mode == "raises":
        raise RuntimeError("planted")
say(done=True, peer=swarm.peer_id)
"""


class Command:
    """One command, its merged output as it comes, and every process that descends from it."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: dict[str, str]) -> None:
        self.argv = list(argv)
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            self.argv,
            cwd=cwd,
            env={**env, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        with self._changed:
            return "\n".join(self.lines)

    def said(self) -> list[dict[str, Any]]:
        """The JSON objects printed so far, whatever stands before them on their lines."""
        with self._changed:
            lines = list(self.lines)
        return [json.loads(found[0]) for found in (re.search(r"\{.*\}", line) for line in lines) if found]

    def wait_until(self, condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
        """The first true value of `condition`, looked at whenever a line comes; fails once the output has ended."""
        end = time.monotonic() + seconds
        while True:
            with self._changed:
                count, ended = len(self.lines), self._ended
            if value := condition():
                return value
            left = end - time.monotonic()
            if ended or left <= 0:
                why = "the command ended" if ended else f"{seconds} s passed"
                raise AssertionError(
                    f"{why} before {what or 'the condition held'}; {self.argv} printed:\n{self.output}"
                )
            with self._changed:
                self._changed.wait_for(lambda seen=count: len(self.lines) > seen or self._ended, min(left, 0.2))

    def wait_line(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        return self.wait_until(lambda: re.search(pattern, self.output), seconds, f"a line matched {pattern!r}")

    def wait_said(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 30.0) -> dict[str, Any]:
        """The first JSON object printed for which `condition` is true."""
        return self.wait_until(lambda: next((one for one in self.said() if condition(one)), None), seconds)

    def last_said(self, key: str) -> dict[str, Any]:
        return [one for one in self.said() if key in one][-1]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def interrupt_terminal(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def returncode_within(self, seconds: float) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.argv} still runs after {seconds} s; it printed:\n{self.output}") from None
        self._reader.join(2.0)
        return code

    def living(self) -> list[psutil.Process]:
        """Every process that descends from this command and still runs (a zombie does not)."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def close(self) -> None:
        for process in self.living():
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait(10)
        self._reader.join(2.0)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


class Bench:
    """A folder with a training script, a `shoal` command on the path and fresh state folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(TRAINING_SCRIPT)
        self.commands: list[Command] = []
        programs = folder / "bin"
        programs.mkdir()
        shim = programs / "shoal"
        shim.write_text(
            textwrap.dedent(f"""\
            #!{sys.executable}
            import sys
            from shoal.cli.main import main
            sys.argv[0] = "shoal"
            sys.exit(main())
            """)
        )
        shim.chmod(0o755)
        self.programs = programs

    def environment(self, machine: str, **extra: str) -> dict[str, str]:
        """The environment of one emulated machine: its own state folder, loopback only, one thread."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SHOAL_", "PYTEST_"))}
        env.pop("PYTHONUNBUFFERED", None)
        state = self.folder / f"state-{machine}"
        state.mkdir(exist_ok=True)
        env |= {
            "PATH": f"{self.programs}{os.pathsep}{env.get('PATH', '')}",
            "SHOAL_STATE": str(state),
            "SHOAL_LISTEN": "127.0.0.1:0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), str(HERE), env.get("PYTHONPATH")])),
            "TEST_FOLDER": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        return env | extra

    def start(self, *argv: str, machine: str = "a", **extra: str) -> Command:
        command = Command(argv, cwd=self.folder, env=self.environment(machine, **extra))
        self.commands.append(command)
        return command

    def shoal(self, *words: str, machine: str = "a", **extra: str) -> Command:
        return self.start(str(self.programs / "shoal"), *words, machine=machine, **extra)

    def plain(self, *words: str, machine: str = "a", **extra: str) -> Command:
        """The training script without `shoal run`: a plain Python script that finds its run in the environment."""
        return self.start(sys.executable, "train.py", *words, machine=machine, **{"SHOAL_RUN": "birds", **extra})

    def complete(self, *words: str, seconds: float = 30.0, **extra: str) -> tuple[int, str]:
        """Runs `shoal WORDS` to its end: exit code and output."""
        command = self.shoal(*words, **extra)
        code = command.returncode_within(seconds)
        return code, command.output

    def stop(self, name: str = "stop") -> None:
        (self.folder / name).touch()

    def close(self) -> None:
        for command in self.commands:
            command.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
