"""The helper itself: a peer answers, its errors come as data, and nothing is left behind."""

import os
import signal

import pytest
from swarm_process import PeerFailed, Peers, PeerSilent, wait_until

SCRIPT = """
import os, subprocess, sys
from swarm_process import serve

def state():
    return os.environ["SHOAL_STATE"]

def fail():
    error = ValueError("no such thing")
    error.index = 3
    raise error

def fork():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

print("not json")
serve(state, fail, fork)
"""


def test_commands_errors_and_end(tmp_path):
    with Peers(tmp_path) as peers:
        first, second = peers.start(SCRIPT), peers.start(SCRIPT)
        assert first.ask("state") != second.ask("state")
        with pytest.raises(PeerFailed) as failed:
            first.ask("fail")
        assert failed.value.reply["error"] == "ValueError"
        assert failed.value.reply["fields"]["index"] == 3
        assert first.lines == ["not json\n"]
        second.kill(signal.SIGKILL)
        assert second.wait() == -signal.SIGKILL
        with pytest.raises(PeerSilent):
            second.ask("state", 5)
        grandchild = first.ask("fork")
    assert first.returncode is not None
    wait_until(lambda: not _alive(grandchild), 5, "the grandchild ends with its peer")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
