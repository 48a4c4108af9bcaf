"""Three peers behind lines of 1 Mbit/s, in network namespaces: a full link makes nobody dead or late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shaped import needs_namespaces, shaped_hosts

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(300),
    *needs_namespaces,
]

PEERS, SHAPE, FLOATS = 3, "rate 1mbit burst 16kb latency 300ms", 500_000

PEER = """
import os, sys, time, torch, shoal
from pathlib import Path
torch.set_num_threads(1)
number, peers, floats, address = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
until = time.monotonic() + 60
while number > 1 and not address.exists() and time.monotonic() < until:
    time.sleep(0.05)
named = [address.read_text()] if number > 1 else []
swarm = shoal.join("slow", secret="a-secret-of-three", listen=f"10.77.0.{number}:4000", peers=named)
if number == 1:
    address.with_suffix(".draft").write_text(swarm.address)
    address.with_suffix(".draft").rename(address)
while len(swarm.peers()) < peers - 1:
    assert time.monotonic() < until
    time.sleep(0.05)
for _ in range(2):
    result, report = swarm.average([torch.full((floats,), float(number))], timeout_seconds=120)
    assert report.exact, report
    assert result[0].eq((peers + 1) / 2).all()
    print(f"peer {number}: {report.seconds:.1f} s, {report.bytes_sent} bytes sent")
counts = swarm.report().event_counts
assert not counts.get("lost") and not counts.get("late"), swarm.report()
swarm.leave()
"""


def test_at_one_megabit_nobody_is_dead_or_late(tmp_path: Path) -> None:
    address = tmp_path / "address"
    with shaped_hosts(f"shoal{os.getpid()}", PEERS, SHAPE) as hosts:
        running = []
        for number, host in enumerate(hosts, start=1):
            environment = os.environ | {"SHOAL_STATE": str(tmp_path / host)}
            arguments = [sys.executable, "-c", PEER, str(number), str(PEERS), str(FLOATS), str(address)]
            inside = ["ip", "netns", "exec", host, *arguments]
            running.append(subprocess.Popen(inside, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [process.communicate(timeout=240)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    print("".join(outputs))
    assert [process.returncode for process in running] == [0] * PEERS
