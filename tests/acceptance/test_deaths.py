"""Deaths, and stops, in the averagings of real processes: four times at each phase, and two of five at once."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections import Counter

import pytest
from big_swarm import BigSwarm, Trial
from moments import CALLED, CLOSING, COLLECTING, HANDED_OUT, PART_SENT, RESULTS_HALF_SENT, SHARE_HALF_REDUCED
from swarm_process import Peers

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process"),
]

RESUME_SECONDS = 1.0
PHASES: dict[str, list[dict]] = {
    COLLECTING: [{"count": callers} for callers in (1, 2, 3, 4)],
    HANDED_OUT: [{"count": answered} for answered in (1, 2, 3, 1)],
    CALLED: [{"late_caller": False}, {"late_caller": False}, {"late_caller": True}, {"late_caller": True}],
    PART_SENT: [{"count": sent} for sent in (1, 15, 30, 50)],
    SHARE_HALF_REDUCED: [{}] * 4,
    RESULTS_HALF_SENT: [{}] * 4,
    CLOSING: [{}, {"count": 1}, {"count": 2}, {"count": 3}],
}


def figures(trials: list[Trial]) -> str:
    returns = [took for trial in trials for took in trial.returns.values()]
    resumed = Counter(trial.resumed.split(" later")[0].rsplit(" ", 2)[0] for trial in trials if trial.resumed)
    return (
        f"{len(trials)} trials, {len(returns)} survivors: all with a result, after median "
        f"{statistics.median(returns):.2f} s, longest {max(returns):.2f} s; parts taken over "
        f"{[trial.taken_over for trial in trials]}; exchanges {[trial.exchanges for trial in trials]}"
        + (f"; the resumed got {dict(resumed)}" if resumed else "")
    )


@pytest.mark.parametrize("moment", PHASES)
@pytest.mark.parametrize(("kind", "strategy"), [("SIGKILL", "AllReduce"), ("SIGSTOP", "Moshpit")])
def test_four_times_at_each_phase(tmp_path, kind, strategy, moment):
    """Of the stopped, every other one is resumed before it is given up."""
    with Peers(tmp_path) as peers:
        swarm = BigSwarm(peers, "phases", strategy=strategy)
        trials = []
        for number, options in enumerate(PHASES[moment]):
            resume = {"resume_seconds": RESUME_SECONDS} if kind == "SIGSTOP" and number % 2 else {}
            trials.append(swarm.strike(moment, signal.Signals[kind], number, **options, **resume))
            print(f"\n{trials[-1]}", end="", flush=True)
        print(f"\n{kind} at: {moment}: {figures(trials)}")


def test_two_of_five_killed_at_random_moments(tmp_path):
    seed = int(os.environ.get("SHOAL_TEST_SEED", random.randrange(1 << 30)))
    choose = random.Random(seed)
    with Peers(tmp_path) as peers:
        swarm = BigSwarm(peers, "two", count=5)
        print(f"\nSHOAL_TEST_SEED={seed}")
        trials = []
        for _ in range(10):
            duration = swarm.average()
            deaths = {rank: choose.uniform(0, duration) for rank in choose.sample(range(5), 2)}
            when = " and ".join(f"{rank} at {after:.2f}" for rank, after in deaths.items())
            trials.append(swarm.kill_at(deaths, f"SIGKILL of {when} of {duration:.2f} s"))
            print(trials[-1], flush=True)
            for rank in deaths:
                swarm.add(rank)
        print(f"two of five: {figures(trials)}")
