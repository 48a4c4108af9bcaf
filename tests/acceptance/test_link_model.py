"""The simulated links against real ones: one averaging of 40 MB among 4 peers, each behind a line of 100 Mbit/s."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from shaped import needs_namespaces, shaped_hosts
from shoal.sim import VirtualReplica, World
from shoal.strategies.moshpit import Moshpit

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300), *needs_namespaces]

PEERS, FLOATS, AVERAGINGS = 4, 10_000_000, 3
PAYLOAD_BYTES, PACKET_BYTES = 1448, 1514
"""Of a full packet: what TCP carries, and what `tbf` counts, with the headers of TCP and its options, IP, Ethernet.

A simulated line's rate is that of what its connections carry."""
BYTES_PER_SECOND, LATENCY_SECONDS = 12.5e6 * PAYLOAD_BYTES / PACKET_BYTES, 0.0002
SHAPE = "rate 100mbit burst 256kb latency 100ms"
MOST_DIFFERENCE = 0.15

PEER = """
import sys, time, torch, shoal
from pathlib import Path
torch.set_num_threads(1)
number, peers, floats, times, address = *map(int, sys.argv[1:5]), Path(sys.argv[5])
until = time.monotonic() + 60
while number > 1 and not address.exists() and time.monotonic() < until:
    time.sleep(0.05)
named = [address.read_text()] if number > 1 else []
swarm = shoal.join("lines", secret="a-secret-of-four", listen=f"10.77.0.{number}:4000", peers=named)
if number == 1:
    address.with_suffix(".draft").write_text(swarm.address)
    address.with_suffix(".draft").rename(address)
while len(swarm.peers()) < peers - 1:
    assert time.monotonic() < until
    time.sleep(0.05)
values = [torch.full((floats,), float(number))]
for _ in range(times):
    _, report = swarm.average(values, timeout_seconds=120)
    assert report.exact, report
    (round_,) = report.rounds
    print(round_.obtaining_seconds + round_.closing_seconds, flush=True)
swarm.leave()
"""


def real_seconds(folder: Path) -> list[float]:
    """Of each round, at each peer."""
    with shaped_hosts(f"lines{os.getpid()}", PEERS, SHAPE) as hosts:
        running = []
        for number, host in enumerate(hosts, start=1):
            environment = os.environ | {"SHOAL_STATE": str(folder / host)}
            figures = map(str, (number, PEERS, FLOATS, AVERAGINGS))
            command = [sys.executable, "-c", PEER, *figures, str(folder / "address")]
            inside = ["ip", "netns", "exec", host, *command]
            running.append(subprocess.Popen(inside, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [process.communicate(timeout=240)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    assert [process.returncode for process in running] == [0] * PEERS
    return [float(line) for output in outputs for line in output.split()]


def simulated_seconds() -> list[float]:
    async def scenario(world: World) -> None:
        def replica(number: int) -> VirtualReplica:
            return VirtualReplica(torch.full((FLOATS,), float(number)), drift=0.0, step_seconds=0.1)

        peers = await world.swarm(PEERS, Moshpit(every_seconds=30.0), replica)
        await asyncio.sleep(30.0 * (AVERAGINGS + 1))
        assert min(len(peer.peer.history.applied) for peer in peers) >= AVERAGINGS

    world = World(seed=1, latency_seconds=LATENCY_SECONDS, bytes_per_second=BYTES_PER_SECOND)
    world.run(scenario)
    whole = [one for one in world.checkers.seen if len(one.group.members) == PEERS and one.ended_at is not None]
    return [(one.ended_at or 0.0) - one.began_at for one in whole]


def test_the_simulated_links_agree_with_shaped_ones(tmp_path: Path) -> None:
    real, simulated = real_seconds(tmp_path), simulated_seconds()
    print(
        f"{FLOATS * 4 / 1e6:g} MB among {PEERS} peers at 100 Mbit/s: a round takes {median(real):.2f} s on shaped "
        f"lines (from {min(real):.2f} to {max(real):.2f}), {median(simulated):.2f} s simulated "
        f"(from {min(simulated):.2f} to {max(simulated):.2f})"
    )
    assert len(real) == PEERS * AVERAGINGS
    assert abs(median(simulated) / median(real) - 1) < MOST_DIFFERENCE
