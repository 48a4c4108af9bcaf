"""Who is let in: the founder's state counts, and what does not belong to the run is refused at both ends, readably."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_process import HERE, LOOPBACK, PeerFailed, PeerProcess, Peers, PeerSilent, wait_until

import shoal

pytestmark = pytest.mark.timeout(90)

PEER = HERE / "driven_peer.py"
MODEL = [8, 4, 1]
REFUSED_WITHIN_SECONDS = 1.0
STRANGER = "a" * 32


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with Peers(tmp_path) as started:
        yield started


def started(peers: Peers, *names: str) -> list[PeerProcess]:
    """New peers whose imports are done (what follows is timed)."""
    processes = [peers.start(PEER, name=name) for name in names]
    for process in processes:
        process.send("ping")
    for process in processes:
        process.answer(60)
    return processes


class Run:
    """A founder that trains, of weights 1, and one process that comes anew in each test (replaced if it breaks)."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.founder, self._spare = started(peers, "founder", "newcomer")
        self.address = self.founder.ask("join")["address"]
        self.founder.ask("attach", start=1.0, layers=MODEL)
        self.founder.ask("train")

    def newcomer(self) -> PeerProcess:
        try:
            self._spare.ask("leave", 10)
            wait_until(lambda: self.founder.ask("peers") == [], 3, "the founder is alone")
        except AssertionError:
            self._spare.close()
            (self._spare,) = started(self.peers, f"newcomer{len(self.peers.processes)}")
        self.state = Path(self._spare.ask("forget"))
        return self._spare


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with Peers(tmp_path_factory.mktemp("run")) as started_peers:
        yield Run(started_peers)


def refusal(founder: PeerProcess, newcomer: PeerProcess, command: str, **options: Any) -> tuple[dict[str, Any], str]:
    """What the newcomer's command raised and the reason in the founder's `refused` event, both in time."""
    before = len(founder.ask("events", kind="refused"))
    with pytest.raises(PeerFailed) as failed:
        newcomer.ask(command, 20, **options)
    reply = failed.value.reply
    assert "ShoalError" in reply["bases"], reply["traceback"]
    assert reply["seconds"] <= REFUSED_WITHIN_SECONDS, reply
    events = wait_until(
        lambda: founder.ask("events", kind="refused")[before:], REFUSED_WITHIN_SECONDS, "the founder tells of a refusal"
    )
    assert events[-1]["reason"], events
    assert "Traceback" not in events[-1]["reason"]
    return reply, events[-1]["reason"]


def assert_all_is_well(founder: PeerProcess, newcomer: PeerProcess, address: str) -> None:
    """After a refusal the founder trains on unchanged, alone, and the same process joins with the right address."""
    assert founder.ask("peers") == []
    assert founder.ask("values")["low"] == founder.ask("values")["high"] == 1.0
    newcomer.ask("join", peers=[address])
    assert newcomer.ask("attach", start=2.0, layers=MODEL)["high"] == 1.0


def test_all_start_from_the_founders_weights(peers: Peers) -> None:
    founder, second, third = started(peers, "founder", "second", "third")
    address = founder.ask("join")["address"]
    for newcomer in (second, third):
        newcomer.ask("join", peers=[address])
    expected = founder.ask("attach", start=1.0)
    second.send("attach", start=2.0)
    third.send("attach", start=3.0)
    assert second.answer() == expected
    assert third.answer() == expected
    everyone = (founder, second, third)
    for peer in everyone:
        peer.ask("train")
    for peer in everyone:
        wait_until(lambda one=peer: one.ask("report")["averagings"] >= 2, 15, "two averagings")
        values = peer.ask("values")
        assert values["low"] == pytest.approx(1.0, abs=1e-5)
        assert values["high"] == pytest.approx(1.0, abs=1e-5)


def test_attach_waits_for_the_founders_state(peers: Peers) -> None:
    """The newcomer attaches first; it is still the founder's state that counts."""
    founder, newcomer = started(peers, "founder", "newcomer")
    address = founder.ask("join")["address"]
    newcomer.ask("join", peers=[address])
    newcomer.send("attach", start=2.0)
    with pytest.raises(PeerSilent):
        newcomer.receive(0.5)
    founder.ask("attach", start=1.0)
    assert newcomer.answer(15)["high"] == 1.0


def test_a_founder_before_its_first_step_gives_its_state(peers: Peers) -> None:
    """It has attached and loads its data for a while, say: no safe point comes, yet its state is known."""
    founder, newcomer = started(peers, "founder", "newcomer")
    address = founder.ask("join")["address"]
    founder.ask("attach", start=1.0, rests=False)
    newcomer.ask("join", peers=[address])
    assert newcomer.ask("attach", 10, start=2.0)["high"] == 1.0


def test_wrong_secret_and_wrong_run_are_one_error_that_names_both(run: Run) -> None:
    founder, newcomer, address = run.founder, run.newcomer(), run.address
    bare, secret = address.rsplit("/", 1)
    assert "@" not in secret, "the founder made a secret, so the address carries it"
    for options in (
        {"peers": [f"{bare}/{'b' * len(secret)}"]},
        {"peers": [bare], "secret": "not-the-secret"},
        {"peers": [address], "run": "fish"},
    ):
        reply, reason = refusal(founder, newcomer, "join", **options)
        assert reply["error"] in ("JoinError", "RefusedError"), reply
        for text in (reply["message"], reason):
            assert re.search(r"\bsecret\b", text), text
            assert re.search(r"\brun\b", text), text
        assert secret not in reply["message"], "a secret is not printed"
        assert secret not in reason
    assert_all_is_well(founder, newcomer, address)


def test_a_given_secret_is_no_part_of_the_address_and_opens_the_run(peers: Peers) -> None:
    founder, newcomer = started(peers, "founder", "newcomer")
    address = founder.ask("join", secret="hunter2-hunter2")["address"]
    founder.ask("attach", start=1.0)
    assert "hunter2" not in address
    assert address.count("/") == 2, "shoal://PEERID@HOST:PORT and nothing after it"
    with pytest.raises(PeerFailed) as failed:
        newcomer.ask("join", peers=[address])
    assert failed.value.reply["error"] in ("OptionError", "JoinError", "RefusedError"), failed.value.reply
    assert "secret" in failed.value.reply["message"]
    assert failed.value.reply["seconds"] <= REFUSED_WITHIN_SECONDS
    newcomer.ask("join", peers=[address], secret="hunter2-hunter2")
    assert newcomer.ask("attach", start=2.0)["high"] == 1.0


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"layers": [8, 4, 2]}, "1.weight"),
        ({"layers": [8, 4]}, "1.weight"),
        ({"layers": [8, 4, 1, 1]}, "2.weight"),
        ({"layers": [8, 4, 1], "bias": False}, "0.bias"),
    ],
    ids=["other shape", "a layer less", "a layer more", "no biases"],
)
def test_a_different_model_is_refused(run: Run, other: dict[str, Any], name: str) -> None:
    founder, newcomer, address = run.founder, run.newcomer(), run.address
    newcomer.ask("join", peers=[address])
    reply, reason = refusal(founder, newcomer, "attach", start=2.0, **other)
    assert reply["error"] == "ModelMismatch", reply
    assert re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", reply["message"]), reply["message"]
    assert name in reason
    newcomer.ask("leave")
    wait_until(lambda: founder.ask("peers") == [], 3, "the refused peer is gone")
    assert founder.ask("values")["low"] == founder.ask("values")["high"] == 1.0


def test_a_different_strategy_is_refused(run: Run) -> None:
    founder, newcomer, address = run.founder, run.newcomer(), run.address
    reply, reason = refusal(founder, newcomer, "join", peers=[address], every_seconds=5.0)
    assert reply["error"] == "CharterMismatch", reply
    assert "every_seconds" in reply["fields"]["field"], reply
    assert "every_seconds" in reply["message"]
    assert "every_seconds" in reason
    assert_all_is_well(founder, newcomer, address)


def test_a_newcomer_without_a_strategy_adopts_the_runs(run: Run) -> None:
    newcomer, address = run.newcomer(), run.address
    newcomer.ask("join", peers=[address], every_seconds=None)
    assert newcomer.ask("attach", start=2.0, layers=MODEL)["high"] == 1.0
    newcomer.ask("train")
    wait_until(lambda: newcomer.ask("report")["averagings"] >= 2, 10, "averaging every 0.3 s, as the founder does")


def test_another_protocol_version_is_refused(run: Run) -> None:
    founder, newcomer, address = run.founder, run.newcomer(), run.address
    reply, reason = refusal(founder, newcomer, "join", peers=[address], protocol_version=4711)
    assert reply["error"] in ("JoinError", "RefusedError"), reply
    for text in (reply["message"], reason):
        assert "version" in text, text
        assert "4711" in text, text


def test_another_peer_id_at_the_right_address_is_refused(run: Run) -> None:
    founder, newcomer, address = run.founder, run.newcomer(), run.address
    peer_id = re.match(r"shoal://([a-z2-7]{32})@", address)
    assert peer_id, address
    reply, reason = refusal(founder, newcomer, "join", peers=[address.replace(peer_id[1], STRANGER)])
    assert reply["error"] in ("JoinError", "RefusedError"), reply
    assert STRANGER[:8] in reply["message"], reply["message"]
    assert peer_id[1][:8] in reply["message"], "it says who answered"
    assert reason
    assert_all_is_well(founder, newcomer, address)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_join_error_has_one_reason_per_address_and_founds_nothing(run: Run) -> None:
    newcomer = run.newcomer()
    threads = newcomer.ask("threads")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addresses = [
            f"shoal://{STRANGER}@127.0.0.1:{closed_port()}/some-secret-0123",
            f"shoal://{STRANGER[:-1]}b@127.0.0.1:{closed_port()},127.0.0.1:{silent.getsockname()[1]}/some-secret-0123",
            f"shoal://{STRANGER[:-1]}c@127.0.0.1:{silent.getsockname()[1]}/some-secret-0123",
        ]
        with pytest.raises(PeerFailed) as failed:
            newcomer.ask("join", 20, run="nobody", peers=addresses, join_timeout_seconds=1)
    reply = failed.value.reply
    assert reply["error"] == "JoinError", reply
    assert reply["seconds"] < 2.5, "join_timeout_seconds=1, and a little for the end"
    without_secrets = {address.rsplit("/", 1)[0] for address in addresses}
    assert set(reply["fields"]["reasons"]) == without_secrets, "one reason for each; secrets are not shown"
    for address, reason in reply["fields"]["reasons"].items():
        assert reason.strip()
        assert address in reply["message"], reply["message"]
        assert reason in reply["message"]
    wait_until(lambda: newcomer.ask("threads") == threads, 2, "no thread of the failed join runs on")
    assert not any(path.is_file() and path.stat().st_size for path in run.state.rglob("*nobody*"))


def test_one_of_several_addresses_is_enough(run: Run) -> None:
    founder, newcomer, address = run.founder, run.newcomer(), run.address
    dead = f"shoal://{STRANGER}@127.0.0.1:{closed_port()}/{address.rsplit('/', 1)[1]}"
    newcomer.ask("join", peers=[dead, address])
    assert newcomer.ask("attach", start=2.0, layers=MODEL)["high"] == 1.0
    assert len(founder.ask("peers")) == 1


def test_one_identity_file_is_for_one_process(peers: Peers, tmp_path: Path) -> None:
    path = str(tmp_path / "identity.key")
    holder, second = started(peers, "holder", "second")
    peer_id = holder.ask("join", identity=path)["peer_id"]
    with pytest.raises(PeerFailed) as failed:
        second.ask("join", identity=path)
    assert failed.value.reply["error"] == "IdentityInUse"
    assert "ShoalError" in failed.value.reply["bases"]
    assert path in failed.value.reply["message"]
    assert failed.value.reply["seconds"] < 2
    holder.kill(signal.SIGKILL)
    holder.wait()
    assert second.ask("join", identity=path)["peer_id"] == peer_id


MALFORMED = [
    "",
    "birds",
    "http://127.0.0.1:80",
    "shoal://",
    "shoal:/" + STRANGER + "@127.0.0.1:4711",
    "SHOAL//" + STRANGER + "@127.0.0.1:4711",
    f"shoal://{STRANGER}",
    f"shoal://{STRANGER}@",
    "shoal://127.0.0.1:4711",
    "shoal://@127.0.0.1:4711",
    "shoal://short@127.0.0.1:4711",
    f"shoal://{STRANGER}a@127.0.0.1:4711",
    f"shoal://{STRANGER[:-1]}1@127.0.0.1:4711",
    f"shoal://{STRANGER[:-1]}A@127.0.0.1:4711",
    f"shoal://{STRANGER}@127.0.0.1",
    f"shoal://{STRANGER}@127.0.0.1:",
    f"shoal://{STRANGER}@:4711",
    f"shoal://{STRANGER}@127.0.0.1:port",
    f"shoal://{STRANGER}@127.0.0.1:0",
    f"shoal://{STRANGER}@127.0.0.1:65536",
    f"shoal://{STRANGER}@127.0.0.1:-1",
    f"shoal://{STRANGER}@127.0.0.1:4711,",
    f"shoal://{STRANGER}@,127.0.0.1:4711",
    f"shoal://{STRANGER}@127.0.0.1:4711,127.0.0.1",
    f"shoal://{STRANGER}@127.0.0.1:4711/",
    f"shoal://{STRANGER}@127.0.0.1:4711/se cret",
    f"shoal://{STRANGER}@127.0.0.1:4711/se&cret",
    f"shoal://{STRANGER}@127.0.0.1:4711/secret?run=birds",
    f"shoal://{STRANGER}@127.0.0.1:4711/secret/more",
]


@pytest.mark.parametrize("address", MALFORMED)
def test_malformed_addresses(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path))
    with pytest.raises(shoal.AddressError) as error:
        shoal.join("birds", peers=[address], listen=LOOPBACK, join_timeout_seconds=1)
    assert isinstance(error.value, shoal.ShoalError)
    message = str(error.value)
    assert "shoal://PEERID@HOST:PORT" in message, "it says what was expected"
    assert len(message) < 500


@pytest.mark.parametrize(
    "listen", ["4711", "127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:70000", "127.0.0.1:x"]
)
def test_malformed_listen(listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path))
    with pytest.raises((shoal.AddressError, shoal.OptionError), match="HOST:PORT"):
        shoal.join("birds", listen=listen)
