"""`shoal simulate` with several processes: Ctrl-C ends them all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to one process on Windows")
def test_ctrl_c_ends_every_process_at_once() -> None:
    command = [sys.executable, "-m", "shoal.cli.main", "simulate", "averaging", "--set", "method=moshpit_keys"]
    running = subprocess.Popen([*command, "--seeds", "5000", "--jobs", "2"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    workers: list[psutil.Process] = []
    while time.monotonic() < deadline and sum(one.cpu_times().user > 0.5 for one in workers) < 2:
        workers = psutil.Process(running.pid).children(recursive=True)
        time.sleep(0.05)
    assert len(workers) >= 2
    began_at = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=20)
    assert running.returncode == 130
    assert time.monotonic() - began_at < 3
    assert "Traceback" not in said
    assert not psutil.wait_procs(workers, timeout=3)[1]
