"""What a process has beside its training thread: forked workers that outlive it, and the switch interval."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from swarm_process import LOOPBACK, Peers, wait_until

NOTICE_SECONDS = 1.0
DEFAULT_INTERVAL, SWARM_INTERVAL = 0.005, 0.0005

PEER = """
import os, signal, sys, time
import torch
from swarm_process import serve
import shoal

torch.set_num_threads(1)
swarms, seen = [], []


def interval():
    return sys.getswitchinterval()


def set_interval(seconds):
    sys.setswitchinterval(seconds)
    return interval()


def note(event):
    seen.append((time.monotonic(), event.kind, event.peer_id))


def join(run="workers", peers=(), listen="127.0.0.1:0"):
    swarms.append(shoal.join(run, peers=list(peers), listen=listen, join_timeout_seconds=5, on_event=note))
    return {"address": swarms[-1].address, "peer_id": swarms[-1].peer_id}


def attach():
    model = torch.nn.Linear(2, 1)
    swarms[-1].attach(model, torch.optim.SGD(model.parameters(), lr=0.0), batch_size=1)


def leave():
    swarms.pop().leave()
    return interval()


def fork(count):
    '''Workers as a DataLoader forks them: they inherit all that is open, and sleep until they are killed.'''
    workers = []
    for _ in range(count):
        worker = os.fork()
        if worker == 0:
            signal.pause()
            os._exit(0)
        workers.append(worker)
    return workers


def fork_that_uses_files(count):
    '''Children that open files of their own: none may get the number of a socket that is closed later.'''
    results = []
    for _ in range(count):
        reading, writing = os.pipe()
        if os.fork() == 0:
            files = [open(os.devnull) for _ in range(50)]
            import gc
            swarms.clear()
            gc.collect()
            works = all(os.fstat(file.fileno()) for file in files)
            os.write(writing, b"1" if works else b"0")
            os._exit(0)
        os.close(writing)
        results.append(os.read(reading, 1).decode())
        os.close(reading)
        os.wait()
    return results


def swarms_left():
    return len(swarms)


def peers():
    return [peer.peer_id for peer in swarms[-1].peers()]


def lost():
    return [moment for moment, kind, peer_id in seen if kind == "lost"]


serve(interval, set_interval, join, attach, leave, fork, fork_that_uses_files, swarms_left, peers, lost)
"""

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked on POSIX only")


def two_that_met(peers: Peers):
    first, second = peers.start(PEER), peers.start(PEER)
    address = first.ask("join")["address"]
    second.ask("join", peers=[address])
    for peer in (first, second):
        wait_until(lambda: peer.ask("peers"), 10, "the two meet")  # noqa: B023
    return first, second


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@forks
def test_a_death_is_noticed_within_a_second_though_forked_workers_live_on(tmp_path) -> None:
    with Peers(tmp_path) as peers:
        first, second = two_that_met(peers)
        workers = second.ask("fork", count=3)
        killed_at = second.kill(signal.SIGKILL)
        (moment,) = wait_until(lambda: first.ask("lost"), 10, "the death is noticed")
        assert all(alive(worker) for worker in workers), "the workers died first: this trial shows nothing"
        assert moment - killed_at <= NOTICE_SECONDS
        assert first.ask("peers") == []


@forks
def test_the_port_of_a_killed_peer_is_free_though_its_workers_live_on(tmp_path) -> None:
    """Workers that kept the listening socket would keep its port, and a restarted peer could not have it."""
    with Peers(tmp_path) as peers:
        first = peers.start(PEER)
        place = first.ask("join")["address"].partition("@")[2].partition("/")[0]
        workers = first.ask("fork", count=1)
        first.kill(signal.SIGKILL)
        first.wait()
        assert alive(workers[0])
        again = peers.start(PEER)
        assert place in again.ask("join", listen=place)["address"]


@forks
def test_forking_disturbs_neither_the_peer_nor_the_child(tmp_path) -> None:
    with Peers(tmp_path) as peers:
        first, second = two_that_met(peers)
        assert second.ask("fork_that_uses_files", count=3) == ["1", "1", "1"]
        first.ask("attach")
        assert len(first.ask("peers")) == len(second.ask("peers")) == 1
        assert first.ask("lost") == second.ask("lost") == []


# ---------------------------------------------------------------- the switch interval


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """One process for all of them: to start it takes longer than what it is asked."""
    with Peers(tmp_path_factory.mktemp("lone")) as peers:
        yield peers.start(PEER)


@pytest.fixture
def peer(lone):
    """It begins with Python's own interval, and must have no swarm left at the end."""
    assert lone.ask("set_interval", seconds=DEFAULT_INTERVAL) == about(DEFAULT_INTERVAL)
    yield lone
    assert lone.ask("swarms_left") == 0


def about(seconds: float):
    """Python keeps it in whole microseconds, rounded down."""
    return pytest.approx(seconds, abs=2e-6)


def test_the_switch_interval_is_short_while_a_swarm_lives(peer) -> None:
    peer.ask("join")
    assert peer.ask("interval") == about(SWARM_INTERVAL)
    assert peer.ask("leave") == about(DEFAULT_INTERVAL)


def test_it_is_restored_after_the_last_of_several_swarms_to_what_it_was(peer) -> None:
    assert peer.ask("set_interval", seconds=0.02) == about(0.02)
    peer.ask("join")
    peer.ask("join", run="another")
    assert peer.ask("leave") == about(SWARM_INTERVAL)
    assert peer.ask("leave") == about(0.02)
    peer.ask("join")
    assert peer.ask("leave") == about(0.02)


def test_a_shorter_one_of_the_users_own_stays(peer) -> None:
    peer.ask("set_interval", seconds=0.0001)
    peer.ask("join")
    assert peer.ask("interval") == about(0.0001)
    assert peer.ask("leave") == about(0.0001)


def test_it_is_restored_when_nobody_could_be_joined(peer) -> None:
    peer.send("join", run="nobody", peers=[f"shoal://{'a' * 32}@127.0.0.1:1/a-secret-of-nobody"], listen=LOOPBACK)
    assert peer.receive(20)["error"] == "JoinError"
    assert peer.ask("interval") == about(DEFAULT_INTERVAL)
