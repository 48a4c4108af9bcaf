"""A SIGKILL in the middle of an averaging: nobody hangs, nothing is half-written, the rest average on.

The moments are spread at random over the measured duration of an averaging. SHOAL_TEST_SEED repeats a choice.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest
from average_child import BIG, WEIGHTS
from swarm_process import PeerProcess, Peers, answers, ask_all, wait_until

CHILD = Path(__file__).with_name("average_child.py")
WHOLE_CHILD = Path(__file__).with_name("whole_child.py")
RETURN_SECONDS = 5.0
NOTICE_SECONDS = 1.0


class Swarm:
    """Four processes, one rank each, all inputs prepared."""

    def __init__(self, peers: Peers, run: str) -> None:
        self.peers = peers
        self.run = run
        self.members: dict[int, PeerProcess] = {rank: peers.start(CHILD) for rank in range(4)}
        first = self.members[0].ask("join", 120, run=run, peers=[], found=True)
        self.members[0].peer_id, self.members[0].address = first["peer_id"], first["address"]
        for rank in range(1, 4):
            self._join(rank, first["address"])
        self._settle()

    def _join(self, rank: int, address: str) -> None:
        own = self.members[rank].ask("join", 120, run=self.run, peers=[address])
        self.members[rank].peer_id, self.members[rank].address = own["peer_id"], own["address"]

    def _settle(self) -> None:
        for rank, process in self.members.items():
            process.send("prepare_big", rank=rank)
        for process in self.members.values():
            process.answer(60)
        ask_all(self.members.values(), "wait_peers", count=3)

    def replace(self, rank: int) -> None:
        """A new process in the place of a dead one, let in by a survivor."""
        dead = self.members[rank]
        dead.close()
        survivor = next(process for other, process in self.members.items() if other != rank)
        self.members[rank] = self.peers.start(CHILD)
        self._join(rank, survivor.address)
        self._settle()

    def start_averaging(self) -> float:
        moment = time.monotonic()
        for rank, process in self.members.items():
            process.send("average_big", weight=WEIGHTS[rank])
        return moment

    def weights(self) -> dict[str, float]:
        return {str(rank): WEIGHTS[rank] for rank in self.members}

    def check(self, ranks: list[int], sets: list[list[int]]) -> dict[int, dict]:
        for rank in ranks:
            self.members[rank].send("check_big", sets=sets, weights=self.weights())
        return {rank: self.members[rank].answer(60) for rank in ranks}

    def measure(self, times: int = 3) -> float:
        """Median seconds from the call until all have their result; each result is checked."""
        durations = []
        for _ in range(times):
            started_at = self.start_averaging()
            results = {rank: process.answer(60) for rank, process in self.members.items()}
            durations.append(max(result["returned_at"] for result in results.values()) - started_at)
            assert all(result["exact"] for result in results.values())
        facts = self.check([0, 1, 2, 3], [[0, 1, 2, 3]])
        assert len({fact["digest"] for fact in facts.values()}) == 1
        assert all(fact["elements"] == [BIG] and fact["untouched"] for fact in facts.values()), facts
        return statistics.median(durations)

    def kill_during_averaging(self, rank: int, after_seconds: float) -> dict:
        """The whole trial of one kill; returns its figures."""
        survivors = [other for other in self.members if other != rank]
        victim = self.members[rank]
        started_at = self.start_averaging()
        while time.monotonic() < started_at + after_seconds:
            time.sleep(0.0005)
        killed_at = victim.kill(signal.SIGKILL)
        figures: dict = {"killed_rank": rank, "after": after_seconds, "returns": {}, "outcomes": {}}
        for other in survivors:
            reply = self.members[other].receive(killed_at + 20 - time.monotonic())
            figures["outcomes"][other] = reply.get("error", "result")
            if "error" in reply:
                assert "ShoalError" in reply["bases"], reply
                figures["returns"][other] = reply["received_at"] - killed_at
            else:
                assert reply["value"]["seconds"] < 30
                figures["returns"][other] = reply["value"]["returned_at"] - killed_at
                figures.setdefault("out", {})[other] = reply["value"]["out"]
        late = {other: took for other, took in figures["returns"].items() if took > RETURN_SECONDS}
        assert not late, f"returned too late: {figures}"

        # Each part is the mean over those who delivered it: all four, or the three that live. Nothing in between.
        facts = self.check(survivors, [[0, 1, 2, 3], survivors])
        assert all(fact["untouched"] for fact in facts.values()), figures
        strange = {other: fact["strange"] for other, fact in facts.items() if fact.get("strange")}
        assert not strange, f"elements that are no mean of a right set: {strange}, {figures}"
        assert len({fact["digest"] for fact in facts.values() if "digest" in fact}) <= 1, f"results differ: {figures}"

        figures["noticed"] = self.noticed_after(survivors, victim, killed_at)
        self.average_of_the_rest(survivors, figures)
        return figures

    def noticed_after(self, survivors: list[int], victim: PeerProcess, killed_at: float) -> dict[int, float]:
        """Seconds from the kill to each survivor's event that names the dead peer; `peers()` must agree."""
        noticed = {}
        for rank in survivors:
            process = self.members[rank]
            process.ask("wait_gone", 15, peer_id=victim.peer_id)
            noticed[rank] = process.ask("wait_lost", 15, peer_id=victim.peer_id) - killed_at
        assert max(noticed.values()) <= NOTICE_SECONDS, f"seconds until the death was noticed: {noticed}"
        return noticed

    def average_of_the_rest(self, survivors: list[int], figures: dict) -> None:
        started_at = time.monotonic()
        for rank in survivors:
            self.members[rank].send("average_big", weight=WEIGHTS[rank])
        results = {rank: self.members[rank].answer(40) for rank in survivors}
        figures["next"] = max(result["returned_at"] for result in results.values()) - started_at
        ids = sorted(self.members[rank].peer_id for rank in survivors)
        for result in results.values():
            assert result["exact"], result
            assert result["contributed"] == ids, result
        facts = self.check(survivors, [survivors])
        assert all(fact["elements"] == [BIG] and fact["untouched"] for fact in facts.values()), facts
        assert len({fact["digest"] for fact in facts.values()}) == 1, facts


def kill_at_random_moments(folder: Path, count: int) -> list[dict]:
    """`count` trials in one run; the founder dies in the first. Prints a line for each."""
    seed = int(os.environ.get("SHOAL_TEST_SEED", random.randrange(1 << 30)))
    choose = random.Random(seed)
    trials = []
    with Peers(folder) as peers:
        swarm = Swarm(peers, "kill")
        duration = swarm.measure()
        print(f"\nSHOAL_TEST_SEED={seed}; an averaging of {BIG} floats takes {duration:.2f} s (median of 3)")
        # One moment in each of `count` equal slices of the duration, in random order: spread, and random.
        fractions = [(slot + choose.random()) / count for slot in range(count)]
        choose.shuffle(fractions)
        for trial, fraction in enumerate(fractions):
            if trial:  # the machine is not equally busy all the time
                duration = swarm.measure(times=1)
            rank = 0 if trial == 0 else choose.randrange(4)
            print(
                f"kill {trial}: peer {rank}{' (founder)' if trial == 0 else ''} at {fraction:.2f} of {duration:.2f} s",
                end="; ",
            )
            figures = swarm.kill_during_averaging(rank, fraction * duration)
            returns = " ".join(f"{other}:{took:.2f}" for other, took in figures["returns"].items())
            outcomes = " ".join(f"{other}:{outcome}" for other, outcome in figures["outcomes"].items())
            print(
                f"survivors returned after s [{returns}] with [{outcomes}], noticed after "
                f"{max(figures['noticed'].values()):.3f} s, next averaging of three in {figures['next']:.2f} s",
                flush=True,
            )
            trials.append(figures)
            if trial + 1 < count:
                swarm.replace(rank)
    return trials


@pytest.mark.timeout(240)
def test_killed_at_5_random_moments(tmp_path):
    assert len(kill_at_random_moments(tmp_path, 5)) == 5


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_killed_at_20_random_moments(tmp_path):
    trials = kill_at_random_moments(tmp_path, 20)
    returns = [took for trial in trials for took in trial["returns"].values()]
    outcomes = [outcome for trial in trials for outcome in trial["outcomes"].values()]
    noticed = [took for trial in trials for took in trial["noticed"].values()]
    kinds = {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}
    print(
        f"{len(trials)} kills, {len(returns)} survivors: returned after median {statistics.median(returns):.2f} s, "
        f"longest {max(returns):.2f} s; outcomes {kinds}; death noticed after median "
        f"{statistics.median(noticed):.3f} s, longest {max(noticed):.3f} s"
    )


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process")
def test_stopped_in_mid_averaging(tmp_path):
    """As a machine that falls asleep: its connections stay open, and nothing comes."""
    with Peers(tmp_path) as peers:
        swarm = Swarm(peers, "stop")
        duration = swarm.measure()
        started_at = swarm.start_averaging()
        while time.monotonic() < started_at + duration / 3:
            time.sleep(0.0005)
        stopped_at = swarm.members[3].kill(signal.SIGSTOP)
        replies = {rank: swarm.members[rank].receive(40) for rank in range(3)}
        took = {rank: reply["received_at"] - stopped_at for rank, reply in replies.items()}
        print(f"survivors returned after {took}")
        assert max(took.values()) <= RETURN_SECONDS, replies
        facts = swarm.check([0, 1, 2], [[0, 1, 2, 3], [0, 1, 2]])
        assert all(fact["untouched"] and not fact.get("strange") for fact in facts.values()), facts


@pytest.mark.skipif(not hasattr(os, "fork"), reason="DataLoader workers fork on POSIX only")
def test_killed_while_its_dataloader_workers_live(tmp_path):
    """Forked workers hold copies of the sockets; unless they close them the death would be hidden until they end."""
    with Peers(tmp_path) as peers:
        swarm = Swarm(peers, "kill-workers")
        duration = swarm.measure(times=2)
        victim = swarm.members[2]
        workers = victim.ask("hold_workers")
        figures = swarm.kill_during_averaging(2, 0.5 * duration)
        print(f"\nwith DataLoader workers: {figures}; workers {workers}")


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
            for process, reply in zip([*early, late], replies, strict=True):
                if "error" in reply:
                    assert "ShoalError" in reply["bases"], reply
                else:
                    ranks = [
                        r for r, peer in enumerate([*early, late]) if peer.peer_id in reply["value"]["contributed"]
                    ]
                    assert reply["value"]["values"] == pytest.approx([sum(ranks) / len(ranks)])
                    assert process.peer_id in reply["value"]["contributed"]
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
