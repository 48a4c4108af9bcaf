"""A newcomer takes over the run's state from several donors, of which some die while they give."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_process import HERE, PeerFailed, PeerProcess, Peers, ask_all, wait_until

pytestmark = pytest.mark.timeout(120)

PEER = HERE / "driven_peer.py"
LARGE = [2000, 2500, 2000]  # 10 004 500 parameters, 40 MB
EVERY = {"every_seconds": None, "every_steps": 5}
LARGE_BYTES = 4 * (2000 * 2500 + 2500 + 2500 * 2000 + 2000)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with Peers(tmp_path) as started:
        yield started


def donors_that_averaged(peers: Peers, count: int) -> tuple[list[PeerProcess], str]:
    """`count` peers with one model of 40 MB that have averaged, at rest; and the first one's address."""
    donors = [peers.start(PEER, name=f"donor{index}") for index in range(count)]
    address = donors[0].ask("join", **EVERY)["address"]
    donors[0].ask("attach", layers=LARGE, start=1.0)
    donors[0].ask("scatter", seed=1)
    for donor in donors[1:]:
        donor.ask("join", peers=[address], **EVERY)
        donor.ask("attach", layers=LARGE, start=2.0)
    ask_all(donors, "train", pause_seconds=0.1)
    for donor in donors:
        wait_until(lambda one=donor: count == 1 or one.ask("report")["averagings"] >= 1, 30, "the donors averaged")
    ask_all(donors, "rest")
    return donors, address


def test_a_newcomer_takes_a_donors_state_also_when_one_is_killed_in_mid_download(peers: Peers, tmp_path: Path) -> None:
    donors, address = donors_that_averaged(peers, 3)
    expected = {donor["digest"] for donor in ask_all(donors, "values")}
    undisturbed = peers.start(PEER, name="undisturbed")
    undisturbed.ask("join", peers=[address], **EVERY)
    assert undisturbed.ask("attach", layers=LARGE, start=3.0)["digest"] in expected
    assert LARGE_BYTES <= undisturbed.ask("report")["bytes_received"] <= 1.1 * LARGE_BYTES, "the state travels once"
    undisturbed.ask("leave")
    wait_until(lambda: len(donors[0].ask("peers")) == 2, 5, "only the three are left")

    newcomer = peers.start(PEER, name="newcomer")
    newcomer.ask("join", peers=[address], **EVERY)
    sent_before = [report["bytes_sent"] for report in ask_all(donors, "report")]
    ask_all(donors, "die_after_sending", n_bytes=LARGE_BYTES // 4, claim=str(tmp_path / "claim"))
    held = newcomer.ask("attach", 30, layers=LARGE, start=3.0)

    dead = [donor for donor in donors if donor.returncode is not None]
    assert [donor.returncode for donor in dead] == [-signal.SIGKILL], "one donor died while it gave"
    assert held["digest"] in expected
    living = [donor for donor in donors if donor not in dead]
    assert held["digest"] in {donor["digest"] for donor in ask_all(living, "values")}
    sent = [
        donor.ask("report")["bytes_sent"] - before
        for donor, before in zip(donors, sent_before, strict=True)
        if donor in living
    ]
    assert sum(sent) < 0.9 * LARGE_BYTES, "what the dead donor gave and was checked is not asked for again"
    assert newcomer.ask("report")["bytes_received"] < 1.25 * LARGE_BYTES
    (event,) = newcomer.ask("events", kind="downloaded")
    assert re.search(r"\bkept\b", event["reason"]), event
    assert re.search(r"\bdonors?\b", event["reason"]), event


def test_the_last_donor_killed_in_mid_download(peers: Peers, tmp_path: Path) -> None:
    """Nobody is left to finish from: a typed error, and the newcomer's model as it was."""
    (donor,), address = donors_that_averaged(peers, 1)
    newcomer = peers.start(PEER, name="newcomer")
    newcomer.ask("set_constant", module="shoal.protocols.taking_part", name="GIVE_UP_SECONDS", value=2.0)
    newcomer.ask("join", peers=[address], **EVERY)
    donor.ask("die_after_sending", n_bytes=LARGE_BYTES // 4, claim=str(tmp_path / "claim"))
    with pytest.raises(PeerFailed) as failed:
        newcomer.ask("attach", 40, layers=LARGE, start=3.0)
    assert donor.returncode == -signal.SIGKILL
    assert "ShoalError" in failed.value.reply["bases"], failed.value.reply
    assert failed.value.reply["error"] == "DownloadError", failed.value.reply
    values = newcomer.ask("values")
    assert values["low"] == values["high"] == 3.0


def test_a_state_is_of_one_moment_though_the_donors_train_on(peers: Peers) -> None:
    """Every step adds 1 to every parameter: a state mixed from two moments would hold two values."""
    donors = [peers.start(PEER, name=f"donor{index}") for index in range(2)]
    address = donors[0].ask("join")["address"]
    donors[0].ask("attach", layers=LARGE, start=0.0, lr=1.0)
    donors[1].ask("join", peers=[address])
    donors[1].ask("attach", layers=LARGE, start=0.0, lr=1.0)
    ask_all(donors, "train", pause_seconds=0.03)
    wait_until(lambda: donors[0].ask("report")["averagings"] >= 1, 20, "the donors averaged")
    for index in range(2):
        newcomer = peers.start(PEER, name=f"newcomer{index}")
        newcomer.ask("join", peers=[address])
        held = newcomer.ask("attach", layers=LARGE, start=-1000.0, lr=1.0)
        assert held["low"] == held["high"], held
        assert held["low"] > 0
        newcomer.close()
