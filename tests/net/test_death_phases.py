"""One of four processes that average 10 million floats is killed, or stopped and resumed, at each phase of it."""

from __future__ import annotations

import signal

import pytest
from big_swarm import BigSwarm
from moments import CALLED, CLOSING, COLLECTING, PART_SENT, RESULTS_HALF_SENT, SHARE_HALF_REDUCED
from swarm_process import Peers

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process"),
]


@pytest.mark.timeout(300)
def test_killed_at_each_phase(tmp_path):
    with Peers(tmp_path) as peers:
        swarm = BigSwarm(peers, "phases", strategy="Moshpit")
        for rank, (moment, options) in enumerate(
            [
                (COLLECTING, {}),
                (CALLED, {"late_caller": True}),
                (PART_SENT, {"count": 20}),
                (SHARE_HALF_REDUCED, {}),
                (RESULTS_HALF_SENT, {}),
                (CLOSING, {"count": 1}),
            ]
        ):
            print(f"\n{swarm.strike(moment, signal.SIGKILL, rank % 4, **options)}", end="")


@pytest.mark.timeout(300)
def test_stopped_and_resumed_at_each_phase(tmp_path):
    """Half of them are resumed before they are given up; then they may take part after all."""
    with Peers(tmp_path) as peers:
        swarm = BigSwarm(peers, "stops")
        for rank, (moment, options) in enumerate(
            [
                (COLLECTING, {"resume_seconds": 1.0}),
                (CALLED, {}),
                (PART_SENT, {"count": 20, "resume_seconds": 1.0}),
                (SHARE_HALF_REDUCED, {}),
                (RESULTS_HALF_SENT, {}),
                (CLOSING, {"resume_seconds": 1.0}),
            ]
        ):
            print(f"\n{swarm.strike(moment, signal.SIGSTOP, rank % 4, **options)}", end="")
