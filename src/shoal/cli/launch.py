"""`shoal run`: starts local peers as processes, shows their output, and ends them together on Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from shoal.core.address import check_run, check_secret, parse_address, parse_endpoint
from shoal.core.errors import IdentityInUse
from shoal.net.identity import identity_file
from shoal.training.announce import say
from shoal.training.settings import run_in_addresses
from shoal.training.state_folder import RunFolder

GRACE_SECONDS = 2.5
"""Between the interrupt and the kill."""
FIRST_PEER_SECONDS = 30.0
"""After which it is said that the other local peers wait for the first one's address."""
JOIN_SECONDS = 60.0
SHARED_CORES = "OMP_NUM_THREADS"
INTERRUPT = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
NEW_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)


class Launch:
    """One call of `shoal run`. Raises OptionError or AddressError for what can't be run."""

    def __init__(
        self,
        script: Path,
        args: list[str],
        run: str | None,
        join: list[str],
        secret: str | None,
        listen: str | None,
        peers: int,
    ) -> None:
        run = check_run(run or run_in_addresses([parse_address(address) for address in join]) or script.stem)
        if secret is not None:
            check_secret(secret)
        if listen is not None:
            parse_endpoint(listen, lowest_port=0)
        self._script, self._args, self._peers = script, args, peers
        self._folder = RunFolder(run)
        self._settings = {
            "SHOAL_RUN": run, "SHOAL_JOIN": " ".join(join), "SHOAL_SECRET": secret or "", "SHOAL_LISTEN": listen or "",
        }  # fmt: skip
        self._children: list[subprocess.Popen[bytes]] = []
        self._identities: list[Path] = []
        self._readers: list[threading.Thread] = []
        self._happened: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._stopped_by: int | None = None

    def run(self, figures: Path | None) -> int:
        """Start the peers, wait for all, return the exit code of `shoal run`."""
        started_at = time.monotonic()
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
                self._start_all(Path(folder) / "address")
                codes = self._wait_all()
        finally:
            self._kill_rest()
            for number, handler in before.items():
                signal.signal(number, handler)
        if figures is not None:
            seconds = time.monotonic() - started_at
            figures.write_text(json.dumps({"exit_codes": codes, "seconds": seconds}, indent=2) + "\n")
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        return 1 if any(codes) else 0

    def _on_signal(self, number: int, frame: object) -> None:
        self._happened.put(("signal", number))

    # -- starting

    def _start_all(self, address_file: Path) -> None:
        """The first peer founds or joins; the others join through it."""
        command = f"shoal run {shlex.quote(str(self._script))}"
        first = {"SHOAL_ANNOUNCE": command, "SHOAL_ADDRESS_FILE": str(address_file)}
        self._start(0, self._settings | first)
        if self._peers == 1:
            return
        say_at = time.monotonic() + FIRST_PEER_SECONDS
        while not address_file.exists():
            if self._children[0].poll() is not None or not self._happened.empty():
                return  # it ended, or we are asked to stop: nobody to join
            if time.monotonic() > say_at:
                say("peer 0 has not called shoal.join yet; the others wait for its address")
                say_at = math.inf
            time.sleep(0.05)
        address = address_file.read_text()
        for slot in range(1, self._peers):
            joined = f"{self._settings['SHOAL_JOIN']} {address}".strip()
            listen = self._settings["SHOAL_LISTEN"].rpartition(":")[0]
            there = {"SHOAL_JOIN": joined, "SHOAL_LISTEN": f"{listen}:0" if listen else ""}
            self._start(slot, self._settings | there)

    def _start(self, slot: int, settings: dict[str, str]) -> None:
        environment = os.environ | settings
        environment["SHOAL_IDENTITY"] = str(self._free_identity(slot))
        environment.setdefault("SHOAL_JOIN_TIMEOUT_SECONDS", f"{JOIN_SECONDS:g}" if slot else "10")
        if self._peers > 1:
            environment.setdefault(SHARED_CORES, str(max(1, (os.cpu_count() or 1) // self._peers)))
            environment["PYTHONUNBUFFERED"] = "1"
        pipe = subprocess.PIPE if self._peers > 1 else None
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.script", str(self._script), *self._args],
            env=environment, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL if self._peers > 1 else None,
            start_new_session=os.name == "posix", creationflags=NEW_GROUP,  # Ctrl-C comes to us, who pass it on
        )  # fmt: skip
        self._children.append(child)
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            if source is not None:
                reader = threading.Thread(target=_prefixed, args=(slot, source, target), daemon=True)
                reader.start()
                self._readers.append(reader)
        threading.Thread(target=lambda: self._tell_end(slot, child.wait()), daemon=True).start()

    def _tell_end(self, slot: int, code: int) -> None:
        if code and self._stopped_by is None:
            say(f"peer {slot} " + (f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"))
        self._happened.put(("ended", code))

    def _free_identity(self, slot: int) -> Path:
        """The identity this machine keeps for its first, second, ... local peer; those in use are passed over."""
        number = slot
        while True:
            path = self._folder.path / f"identity-{number}"
            try:
                with identity_file(path):
                    pass
            except IdentityInUse:
                number += 1
                continue
            if path not in self._identities:
                self._identities.append(path)
                return path
            number += 1

    # -- ending

    def _wait_all(self) -> list[int]:
        kill_at: float | None = None
        while any(child.poll() is None for child in self._children):
            try:
                what, number = self._happened.get(
                    timeout=None if kill_at is None else max(0, kill_at - time.monotonic())
                )
            except queue.Empty:
                self._kill_rest()
                continue
            if what == "signal" and self._stopped_by is None:
                self._stopped_by = number
                kill_at = time.monotonic() + GRACE_SECONDS
                for child in self._children:
                    if child.poll() is None:
                        child.send_signal(INTERRUPT)
        for reader in self._readers:
            reader.join(1.0)
        return [child.returncode for child in self._children]

    def _kill_rest(self) -> None:
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL) if os.name == "posix" else child.kill()
                child.wait()


def _prefixed(slot: int, source: IO[bytes], target: IO[str]) -> None:
    """Copy a child's lines, each with its peer's number in front."""
    for line in source:
        target.write(f"[{slot}] {line.decode(errors='replace')}")
        target.flush()
