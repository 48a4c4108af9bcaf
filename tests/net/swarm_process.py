"""Real peer processes that a test drives through JSON lines, and kills.

In the test:

    with Peers(tmp_path) as peers:
        first = peers.start(SCRIPT)                 # text of a script, or the path of one
        first.send("join", run="birds")
        address = first.receive(30)["value"]        # or: first.ask("join", run="birds")
        first.kill(signal.SIGKILL)

In the script of the peer (`swarm_process` is importable there; it imports nothing but the standard library):

    from swarm_process import serve
    def join(run, peers=()): ...
    serve(join)

Each peer has its own SHOAL_STATE and its own session, so that `close` also ends what a peer forked. Every wait has a
deadline: `receive` raises `PeerSilent`, with the end of the peer's stderr, when it passes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOOPBACK = "127.0.0.1:0"


class PeerSilent(AssertionError):
    """A peer did not answer in time, or ended before it answered."""


class PeerFailed(AssertionError):
    """A command raised in the peer. `reply` holds `error` (type's name), `message`, `fields` and `traceback`."""

    def __init__(self, name: str, reply: Mapping[str, Any]) -> None:
        super().__init__(f"{name}: {reply.get('error')}: {reply.get('message')}\n{reply.get('traceback', '')}")
        self.reply = dict(reply)


# ---------------------------------------------------------------------------------------------------- the test's side


class PeerProcess:
    """One process. `lines` are its stdout lines that were no JSON object, `stderr` all it wrote there."""

    def __init__(self, command: list[str], *, name: str, folder: Path, environment: Mapping[str, str] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.folder = folder
        self.lines: list[str] = []
        self._stderr: list[str] = []
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=peer_environment(folder) | dict(environment or {}),
            start_new_session=True,
            text=True,
            errors="replace",
            bufsize=1,
        )
        self.pid = self._process.pid
        self._readers = [
            threading.Thread(target=self._read_stdout, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send(self, command: str, **args: Any) -> None:
        """Hand the peer a command; does not wait."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, "args": args}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise PeerSilent(self._story(f"is gone, cannot take {command!r}")) from error

    def receive(self, timeout_seconds: float = 60.0) -> dict[str, Any]:
        """The next JSON object of the peer: {"reply": command, "value": ...} or {"reply": command, "error": ...}.

        `received_at` is the time.monotonic() of its arrival.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return self._replies.get(timeout=0.05)
            except queue.Empty:
                ended = self.returncode is not None and not self._readers[0].is_alive()
                if ended and self._replies.empty():
                    raise PeerSilent(self._story(f"ended with {self.returncode} before it answered")) from None
                if time.monotonic() > deadline:
                    raise PeerSilent(self._story(f"did not answer within {timeout_seconds} s")) from None

    def ask(self, command: str, timeout_seconds: float = 60.0, **args: Any) -> Any:
        """Send, wait, and return the value; `PeerFailed` when the command raised."""
        self.send(command, **args)
        return self.answer(timeout_seconds)

    def answer(self, timeout_seconds: float = 60.0) -> Any:
        """The value of the next reply; `PeerFailed` when that command raised."""
        reply = self.receive(timeout_seconds)
        if "error" in reply:
            raise PeerFailed(self.name, reply)
        return reply.get("value")

    def kill(self, sig: int = signal.SIGKILL) -> float:
        """Signal this process alone (not what it forked); returns time.monotonic() of the moment."""
        moment = time.monotonic()
        if self._process.poll() is None:
            os.kill(self.pid, sig)
        return moment

    def wait(self, timeout_seconds: float = 10.0) -> int:
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise PeerSilent(self._story(f"did not end within {timeout_seconds} s")) from None

    def close(self) -> None:
        """End the process and all it forked (they share its session); idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)
        streams = [self._process.stdin]
        for reader, stream in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(2)
            if not reader.is_alive():  # somebody else holds the pipe: closing under the reader would wait for it
                streams.append(stream)
        for stream in streams:
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()

    def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                if isinstance(message, dict):
                    self._replies.put(message | {"received_at": time.monotonic()})
                else:
                    self.lines.append(line)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stderr:
                self._stderr.append(line)

    def _story(self, what: str) -> str:
        return f"peer {self.name} (pid {self.pid}) {what}; its stderr ends:\n{self.stderr[-3000:]}"


class Peers:
    """Starts peers in fresh folders under `folder`; as a context manager it leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[PeerProcess] = []

    def start(
        self,
        script: str | Path,
        *args: str,
        name: str | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> PeerProcess:
        """Run a script (its text, or its path) in a new process. `folder`: that of an earlier peer, to restart it."""
        name = name or f"peer{len(self.processes)}"
        folder = folder or self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(script, str):
            path = folder / "script.py"
            path.write_text(script)
        else:
            path = script
        return self.command([sys.executable, "-u", str(path), *args], name=name, folder=folder, environment=environment)

    def command(
        self,
        command: list[str],
        *,
        name: str | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> PeerProcess:
        """Run any command as a peer."""
        name = name or f"peer{len(self.processes)}"
        process = PeerProcess(command, name=name, folder=folder or self.folder / name, environment=environment)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def peer_environment(folder: Path) -> dict[str, str]:
    """The environment of a peer: own state folder, one thread, this checkout's source, none of the caller's SHOAL_*."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    paths = [str(ROOT / "src"), str(HERE), kept.get("PYTHONPATH", "")]
    return kept | {
        "SHOAL_STATE": str(folder / "state"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def wait_until(condition: Callable[[], Any], timeout_seconds: float, what: str, every_seconds: float = 0.01) -> Any:
    """Poll until `condition()` is true and return its value; an AssertionError that says `what` at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what}")
        time.sleep(every_seconds)


def ask_all(processes: Iterable[PeerProcess], command: str, timeout_seconds: float = 60.0, **args: Any) -> list[Any]:
    """The same command to all at once; their values in order."""
    processes = list(processes)
    for process in processes:
        process.send(command, **args)
    return answers(processes, timeout_seconds)


def answers(processes: Iterable[PeerProcess], timeout_seconds: float = 60.0) -> list[Any]:
    """The value of the next reply of each; all are read before the first `PeerFailed` is raised."""
    replies = [(process, process.receive(timeout_seconds)) for process in processes]
    for process, reply in replies:
        if "error" in reply:
            raise PeerFailed(process.name, reply)
    return [reply.get("value") for _, reply in replies]


# ---------------------------------------------------------------------------------------------------- the peer's side

_unread = b""


def reply(**message: Any) -> None:
    """Write one JSON object to the test, in one piece."""
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


def next_command(timeout_seconds: float | None = None) -> dict[str, Any] | None:
    """The next command, None when none came in time; SystemExit when the test is gone. No thread, safe to fork."""
    global _unread
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while b"\n" not in _unread:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], left)[0]:
            return None
        data = os.read(0, 1 << 16)
        if not data:
            raise SystemExit(0)
        _unread += data
    line, _unread = _unread.split(b"\n", 1)
    return json.loads(line)


def command_waiting() -> bool:
    """Whether the test has sent something (or is gone): a training loop of a peer ends then."""
    return b"\n" in _unread or bool(select.select([0], [], [], 0)[0])


def error_fields(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: type's name, those of its bases, message and its plain attributes."""
    plain = (str, int, float, bool, type(None), list, tuple, dict)
    names = set(vars(error)) | {"index", "field", "reason", "reasons"}
    fields = {name: getattr(error, name) for name in names if isinstance(getattr(error, name, ...), plain)}
    return {
        "error": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "message": str(error),
        "fields": json.loads(json.dumps(fields, default=repr)),
    }


def serve(*functions: Callable[..., Any], idle: Callable[[], None] | None = None) -> None:
    """Answer commands with these functions, by name, until the test closes the pipe or sends "quit".

    While no command waits `idle` is called again and again: a peer that trains in the meantime passes its step there.
    """
    by_name = {function.__name__: function for function in functions}
    while True:
        while idle is not None and not command_waiting():
            idle()
        command = next_command()
        assert command is not None
        name = command["command"]
        if name == "quit":
            reply(reply=name, value=None)
            return
        try:
            value = by_name[name](**command["args"])
        except Exception as error:
            reply(reply=name, **error_fields(error), traceback=traceback.format_exc())
        else:
            reply(reply=name, value=value)
