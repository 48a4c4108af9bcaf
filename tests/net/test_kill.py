"""A SIGKILL in the middle of an averaging: nobody hangs, nothing is half-written, the rest average on.

The moments are spread at random over the measured duration of an averaging; `test_death_phases` chooses them. What must
hold is in `big_swarm`. SHOAL_TEST_SEED repeats a choice.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest
from average_child import BIG
from big_swarm import CHILD, NOTICE_SECONDS, RETURN_SECONDS, BigSwarm, Trial
from swarm_process import PeerProcess, Peers, answers, ask_all, wait_until

WHOLE_CHILD = Path(__file__).with_name("whole_child.py")


def kill_at_random_moments(folder: Path, count: int) -> list[Trial]:
    """`count` trials in one run; the founder dies in the first."""
    seed = int(os.environ.get("SHOAL_TEST_SEED", random.randrange(1 << 30)))
    choose = random.Random(seed)
    trials = []
    with Peers(folder) as peers:
        swarm = BigSwarm(peers, "kill")
        print(f"\nSHOAL_TEST_SEED={seed}; {BIG} floats")
        # One moment in each of `count` equal slices of the duration, in random order: spread, and random.
        fractions = [(slot + choose.random()) / count for slot in range(count)]
        choose.shuffle(fractions)
        for number, fraction in enumerate(fractions):
            duration = swarm.average()  # the machine is not equally busy all the time
            rank = 0 if number == 0 else choose.randrange(4)
            who = f"{rank} (founder)" if number == 0 else rank
            what = f"kill of {who} at {fraction:.2f} of {duration:.2f} s"
            trials.append(swarm.kill_at({rank: fraction * duration}, what))
            print(trials[-1], flush=True)
            if number + 1 < count:
                swarm.add(rank)
    return trials


def test_killed_at_2_random_moments(tmp_path):
    assert len(kill_at_random_moments(tmp_path, 2)) == 2


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_killed_at_20_random_moments(tmp_path):
    trials = kill_at_random_moments(tmp_path, 20)
    returns = [took for trial in trials for took in trial.returns.values()]
    noticed = [took for trial in trials for took in trial.noticed.values()]
    median, longest = f"median {statistics.median(returns):.2f} s", f"longest {max(returns):.2f} s"
    print(f"{len(trials)} kills, {len(returns)} survivors, all with a result: after {median}, {longest}")
    median, longest = f"median {statistics.median(noticed):.3f} s", f"longest {max(noticed):.3f} s"
    print(f"{sum(trial.taken_over for trial in trials)} parts taken over; death noticed after {median}, {longest}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="DataLoader workers fork on POSIX only")
def test_killed_while_its_dataloader_workers_live(tmp_path):
    """Forked workers hold copies of the sockets; unless they close them the death would be hidden until they end."""
    with Peers(tmp_path) as peers:
        swarm = BigSwarm(peers, "kill-workers")
        duration = swarm.average()
        workers = swarm.members[2].ask("hold_workers")
        print(f"\nwith DataLoader workers {workers}: {swarm.kill_at({2: 0.5 * duration}, 'kill of 2')}")


def test_killed_before_all_have_called(tmp_path):
    """Some wait in the roll already when one dies; the last calls a moment later, when it has noticed. Six deaths."""
    with Peers(tmp_path) as peers:
        processes = [peers.start(CHILD) for _ in range(8)]
        first = processes[0].ask("join", 120, run="skewed", peers=[], found=True)
        joined = [first, *ask_all(processes[1:], "join", 120, run="skewed", peers=[first["address"]])]
        for process, own in zip(processes, joined, strict=True):
            process.peer_id = own["peer_id"]
        ask_all(processes, "wait_peers", count=7)
        call = {"shapes": [[1000]], "dtypes": ["float32"], "timeout_seconds": 30.0}
        living = list(processes)
        while len(living) > 2:
            victim, *early, late = living
            for rank, process in enumerate(early):
                process.send("average_shaped", value=float(rank), **call)
            moment = time.monotonic() + 0.1
            while time.monotonic() < moment:
                time.sleep(0.001)
            killed_at = victim.kill(signal.SIGKILL)
            late.ask("wait_gone", 10, peer_id=victim.peer_id)
            late.send("average_shaped", value=float(len(early)), **call)
            living.remove(victim)
            replies = [process.receive(30) for process in [*early, late]]
            took = [reply["received_at"] - killed_at for reply in replies]
            outcomes = [reply.get("error", "result") for reply in replies]
            print(f"\n{len(living)} survive: returned after s {[round(one, 2) for one in took]} with {outcomes}")
            assert max(took) <= RETURN_SECONDS, (took, outcomes)
            assert set(outcomes) == {"result"}, replies
            for process, reply in zip(living, replies, strict=True):
                contributed = reply["value"]["contributed"]
                ranks = [rank for rank, peer in enumerate(living) if peer.peer_id in contributed]
                assert process.peer_id in contributed
                assert len(ranks) == len(contributed)
                assert reply["value"]["values"] == pytest.approx([sum(ranks) / len(ranks)])
            for process in living:
                process.ask("wait_gone", 10, peer_id=victim.peer_id)
            for rank, process in enumerate(living):
                process.send("average_shaped", value=float(rank), **call)
            for value in answers(living, 10):
                assert value["values"] == pytest.approx([(len(living) - 1) / 2])


@pytest.mark.timeout(120)
def test_killed_while_all_train_no_parameter_is_half_written(tmp_path):
    """Two of four trainers die, the founder first, at moments of the permanent averaging; the others go on."""
    with Peers(tmp_path) as peers:
        trainers = [peers.start(WHOLE_CHILD) for _ in range(4)]
        first = trainers[0].ask("attach", 60, run="whole", peers=[], own=1.0)
        ids = [first["peer_id"]]
        for rank in range(1, 4):
            own = trainers[rank].ask("attach", 60, run="whole", peers=[first["address"]], own=1.0 + rank)
            ids.append(own["peer_id"])
        seed = int(os.environ.get("SHOAL_TEST_SEED", random.randrange(1 << 30)))
        print(f"\nSHOAL_TEST_SEED={seed}")
        choose = random.Random(seed)
        for victim, survivors in ((0, [1, 2, 3]), (2, [1, 3])):
            began = time.monotonic()
            wait_until(lambda: averaged(trainers, [*survivors, victim], began), 30, "all average", 0.1)  # noqa: B023
            moment = time.monotonic() + choose.random()
            while time.monotonic() < moment:
                time.sleep(0.001)
            killed_at = trainers[victim].kill(signal.SIGKILL)
            # An averaging that the death spoils may take the 5 s of a survivor; then they average again.
            wait_until(lambda: averaged(trainers, survivors, killed_at), 10, "the survivors average on", 0.05)  # noqa: B023
            for rank in survivors:
                facts = trainers[rank].ask("facts")
                assert facts["half"] == [], "some elements of a parameter were averaged and others not"
                assert facts["finite"]
                assert ids[victim] not in facts["others"]
                gap = min(moment for moment in facts["applied"] if moment > killed_at) - killed_at
                print(
                    f"\nkilled {victim}: peer {rank} next applied an averaging after {gap:.2f} s; {facts['failures']}"
                )


def averaged(trainers: list[PeerProcess], ranks: list[int], since: float) -> bool:
    """Whether each has applied two averagings since then."""
    return all(len(trainers[rank].ask("facts", since=since)["applied"]) >= 2 for rank in ranks)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at the workers in /proc")
def test_an_idle_peer_that_dies_is_noticed_within_a_second_though_its_workers_live(tmp_path):
    with Peers(tmp_path) as peers:
        processes = [peers.start(CHILD) for _ in range(3)]
        first = processes[0].ask("join", 120, run="notice", peers=[], found=True)
        ids = [first["peer_id"]]
        ids += [
            process.ask("join", 120, run="notice", peers=[first["address"]])["peer_id"] for process in processes[1:]
        ]
        ask_all(processes, "wait_peers", count=2)
        workers = processes[2].ask("hold_workers")
        for process in processes[:2]:
            process.send("wait_gone", peer_id=ids[2])
        killed_at = processes[2].kill(signal.SIGKILL)
        moments = [process.answer(20) for process in processes[:2]]
        alive = [worker for worker in workers if Path(f"/proc/{worker}/stat").exists()]
        assert max(moments) - killed_at <= NOTICE_SECONDS, f"{[moment - killed_at for moment in moments]} s"
        assert alive, "the workers ended before the death was noticed: this trial shows nothing"

        # The founder too, with one peer left: nobody is there any more.
        processes[1].send("wait_gone", peer_id=ids[0])
        killed_at = processes[0].kill(signal.SIGKILL)
        assert processes[1].answer(20) - killed_at <= NOTICE_SECONDS
        assert processes[1].ask("wait_peers", count=0) == []
