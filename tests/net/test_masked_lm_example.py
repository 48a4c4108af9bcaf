"""examples/masked_lm.py starts, trains and ends; that its loss is right, the acceptance test shows."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from swarm_process import LOOPBACK, ROOT, Peers


def test_two_steps_alone(tmp_path: Path) -> None:
    with Peers(tmp_path) as peers:
        command = [sys.executable, str(ROOT / "examples" / "masked_lm.py"), "--steps", "2"]
        process = peers.command(command, environment={"SHOAL_LISTEN": LOOPBACK})
        assert process.wait(60) == 0, process.stderr
    said = "".join(process.lines)
    (told,) = re.findall(r"^step 2: (\S+) nats", said, re.MULTILINE)
    assert 0 < float(told) < 2 * math.log(129), said
    assert "trained for 2 in all" in said
