"""A run of two in which either peer dies and comes back empty, with its first command: the trained state survives."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_process import HERE, PeerProcess, Peers, wait_until

pytestmark = pytest.mark.timeout(170)

PEER = HERE / "driven_peer.py"
TRAINED = 7.0
UNTRAINED = 100.0
RESTARTS = 3


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with Peers(tmp_path) as started:
        yield started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pair:
    """Two peers, each with the command it is started with every time and the state it would start from by itself."""

    def __init__(self, peers: Peers, founder: dict[str, Any]) -> None:
        self.peers = peers
        self.starts = 0
        self.waiting: dict[str, PeerProcess] = {}
        self.commands = {"founder": founder}
        self.processes: dict[str, PeerProcess] = {}
        self.prepare("joiner")
        address = self.start("founder")["address"]
        self.founder_address = address
        given = {"secret": founder["secret"]} if "secret" in founder else {}
        self.commands["joiner"] = {"peers": [address], **given}
        self["founder"].ask("attach", start=TRAINED)
        self["founder"].ask("train")
        self.restart("joiner")

    def __getitem__(self, name: str) -> PeerProcess:
        return self.processes[name]

    def other(self, name: str) -> PeerProcess:
        return self["joiner" if name == "founder" else "founder"]

    def prepare(self, name: str) -> None:
        """Begin to start its next process, which waits for `start`."""
        self.waiting[name] = self.peers.start(PEER, name=name, folder=self.peers.folder / name)

    def start(self, name: str) -> dict[str, Any]:
        if name not in self.waiting:
            self.prepare(name)
        self.processes[name] = self.waiting.pop(name)
        return self[name].ask("join", **self.commands[name])

    def restart(self, name: str) -> dict[str, Any]:
        """Start it again: new process, untrained weights, the same command and folder; then it trains."""
        self.starts += 1
        joined = self.start(name)
        self[name].ask("attach", 30, start=UNTRAINED + self.starts)
        self[name].ask("train")
        return joined

    def end(self, name: str, politely: bool) -> None:
        process = self[name]
        if politely:
            process.ask("leave")
        process.kill(signal.SIGKILL)
        process.wait()
        wait_until(lambda: self.other(name).ask("peers") == [], 3, "the other one sees that it is alone")

    def assert_trained(self, name: str) -> None:
        values = self[name].ask("values")
        assert values["low"] == pytest.approx(TRAINED, abs=1e-4), values
        assert values["high"] == pytest.approx(TRAINED, abs=1e-4), values

    def assert_one_run(self) -> None:
        """Each lists the other, and they average together from here on."""
        for name in ("founder", "joiner"):
            wait_until(lambda one=name: len(self[one].ask("peers")) == 1, 15, f"{name} sees the other")
            before = self[name].ask("report")["averagings"]
            wait_until(
                lambda one=name, count=before: self[one].ask("report")["averagings"] > count, 15, f"{name} averages"
            )
            self.assert_trained(name)


def test_restarted_empty_with_its_state_folder(peers: Peers) -> None:
    pair = Pair(peers, {})
    for turn, name in enumerate(("founder", "founder", "joiner", "founder", "joiner", "joiner")):
        pair.prepare(name)
        pair.assert_one_run()
        pair.end(name, politely=turn in (1, 4))
        pair.assert_trained("joiner" if name == "founder" else "founder")
        pair.restart(name)
        pair.assert_trained(name)
    pair.assert_one_run()
    files = [path for path in peers.folder.glob("*/state/**/*") if path.is_file()]
    assert len(files) >= 2
    assert [path for path in files if path.stat().st_mode & 0o077] == [], "only its owner may read a secret"
    secrets = {pair[name].ask("address").rsplit("/", 1)[1] for name in ("founder", "joiner")}
    assert secrets == {pair.founder_address.rsplit("/", 1)[1]}, "the run keeps its secret"


def test_founder_killed_right_after_the_newcomers_first_averaging(peers: Peers) -> None:
    """The other peer is remembered from the moment it is there, not some time later."""
    for index in range(2):
        folder = peers.folder / f"run{index}"
        founder, again = (peers.start(PEER, name="founder", folder=folder) for _ in range(2))
        joiner = peers.start(PEER, name=f"joiner{index}")
        for process in (founder, again, joiner):
            process.ask("ping")
        address = founder.ask("join")["address"]
        founder.ask("attach", start=TRAINED)
        founder.ask("train")
        joiner.ask("join", peers=[address])
        joiner.ask("attach", start=UNTRAINED)
        joiner.ask("train")
        wait_until(lambda one=joiner: one.ask("report")["averagings"] >= 1, 15, "they averaged")
        founder.kill(signal.SIGKILL)
        founder.wait()
        again.ask("join")
        assert again.ask("attach", 30, start=UNTRAINED)["high"] == pytest.approx(TRAINED, abs=1e-4)


def test_founder_whose_state_folder_was_lost_yields_to_the_older_run(peers: Peers) -> None:
    """It knows nobody and founds a run; the older one finds it at the old port, and it takes over the trained state."""
    pair = Pair(peers, {"secret": "hunter2-hunter2", "listen": f"127.0.0.1:{free_port()}"})
    for _ in range(RESTARTS):
        pair.prepare("founder")
        pair.assert_one_run()
        pair.end("founder", politely=False)
        for path in sorted((peers.folder / "founder" / "state").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        pair.restart("founder")
        wait_until(lambda: took_over(pair), 15, "the empty founder holds the trained state")
        pair.assert_trained("joiner")
    pair.assert_one_run()


def took_over(pair: Pair) -> bool:
    pair.assert_trained("joiner")
    values = pair["founder"].ask("values")
    assert {values["low"], values["high"]} <= {values["low"]}, "a state is taken over whole"
    return abs(values["low"] - TRAINED) < 1e-4
