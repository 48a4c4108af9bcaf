"""The helper itself: output is seen as it comes, an orphan is found, nothing is left behind."""

import os
import signal
from pathlib import Path

import pytest
from command_process import Bench
from swarm_process import wait_until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups of POSIX")


def test_output_signals_and_orphans(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        command = bench.start(
            "bash", "-c", """setsid bash -c 'echo "[p0] {\\"a\\": 1}"; exec sleep 60' & sleep 60; true"""
        )
        assert command.wait_said(lambda one: "a" in one, 10) == {"a": 1}
        wait_until(lambda: len(command.living()) == 3, 5, "bash and its two children")
        command.interrupt_terminal()
        assert command.returncode_within(5) == -signal.SIGINT
        assert len(command.living()) == 1, "the one in another session is an orphan"
        with pytest.raises(AssertionError, match="the command ended"):
            quick = bench.start("true")
            quick.wait_line("never", 5)
    assert command.living() == []
