"""Check 32 of the Moshpit reference: the same seed on the simulated network gives the same event log, byte for byte."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import torch

from shoal.sim import VirtualReplica, World
from shoal.strategies.moshpit import Moshpit


def event_log(seed: int) -> str:
    """Every event of every peer of a swarm in which one is paused, one dies and one joins."""

    async def scenario(world: World) -> None:
        def replica(number: int) -> VirtualReplica:
            drift, step_seconds = world.random.uniform(-0.01, 0.01), world.random.uniform(0.1, 0.4)
            return VirtualReplica(torch.full((60,), float(number)), drift=drift, step_seconds=step_seconds)

        peers = await world.swarm(8, Moshpit(group_size=3, every_seconds=1.5), replica)
        await asyncio.sleep(world.random.uniform(3, 5))
        peers[2].pause()
        await peers[3].crash()
        await asyncio.sleep(world.random.uniform(1, 4))
        peers[2].resume()
        await world.start("late", peers=[peers[1].address], replica=replica(9))
        await asyncio.sleep(8)

    world = World(seed=seed)
    world.run(scenario)
    return "\n".join(f"{name} {event}" for name, host in world.hosts for event in host.log.recent)


def test_check_32_one_seed_one_event_log() -> None:
    command = f"import sys; sys.path[:0] = {sys.path!r}; import {Path(__file__).stem} as t; print(t.event_log(1))"
    logs = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, check=True)
        logs.append(done.stdout.decode().removesuffix("\n"))
    assert logs[0] == logs[1] == event_log(1)
    assert len(logs[0].splitlines()) > 100
    assert "lost" in logs[0]
    assert event_log(2) != logs[0]
