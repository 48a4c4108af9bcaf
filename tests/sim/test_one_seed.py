"""One seed is one history: in any process, whatever the order of its hashes, and with torch imported first or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from shoal.sim.scenarios import SCENARIOS, scenario

SMALL: dict[str, dict[str, object]] = {
    "averaging": {"peers": 100, "group_size": 10, "method": "moshpit_keys", "failure_rate": 0.01},
    "chaos": {},
    "churn": {"peers": 16, "group_size": 4, "failure_rate": 0.1, "averagings": 2},
    "partition": {"peers": 6, "group_size": 3, "parted_seconds": 10},
    "stragglers": {"peers": 3, "slow_peers": 1, "seconds": 8},
    "swarm": {"peers": 12, "group_size": 4, "averagings": 1},
}
"""Options with which each scenario takes a second."""
OF_THE_MACHINE = ("cpu_seconds", "events_per_second", "messages_per_second")
CODE = """
import json, sys
if sys.argv[1] == "torch first":
    import torch
from shoal.sim.scenarios import scenario
print(json.dumps([scenario(name, options).run(3) for name, options in json.loads(sys.argv[2]).items()]))
"""


def of_the_seed(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in run.items() if key not in OF_THE_MACHINE} for run in runs]


def in_a_process(hash_seed: str, order: str) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", CODE, order, json.dumps(SMALL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    return of_the_seed(json.loads(done.stdout))


@pytest.mark.timeout(300)
def test_one_seed_gives_equal_digests_and_figures_in_every_process() -> None:
    assert set(SMALL) == set(SCENARIOS), "a new scenario is to be tested too"
    first = in_a_process("1", "torch first")
    assert in_a_process("2", "torch later") == first
    here = [scenario(name, options).run(3) for name, options in SMALL.items()]
    assert json.loads(json.dumps(of_the_seed(here))) == first
    for (name, options), run in zip(SMALL.items(), first, strict=True):
        assert scenario(name, options).run(4)["trace_digest"] != run["trace_digest"], name
