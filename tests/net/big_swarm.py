"""Processes that average 10 million floats while one or two of them die or stop; what must hold for the others.

The survivors return in time, with a result, equal bit for bit, and each part of it is the weighted mean of the inputs
of its reported contributors. What a dead member reduced and had not sent was reduced by another.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from average_child import BIG, WEIGHTS
from moments import CALLED, CLOSING, COLLECTING, HANDED_OUT, PART_SENT
from swarm_process import PeerProcess, Peers, ask_all, wait_until

CHILD = Path(__file__).with_name("average_child.py")
RETURN_SECONDS, NOTICE_SECONDS = 5.0, 1.0
SKEW_SECONDS = 0.2


@dataclass
class Trial:
    """What became of the survivors of one averaging, and of the member that was resumed."""

    what: str
    returns: dict[int, float] = field(default_factory=dict)
    digest: str = ""
    parts: int = 0
    taken_over: int = 0
    contributors: list[int] = field(default_factory=list)
    exchanges: int = 0
    next_seconds: float = 0.0
    noticed: dict[int, float] = field(default_factory=dict)
    resumed: str = ""

    def __str__(self) -> str:
        returns = " ".join(f"{rank}:{took:.2f}" for rank, took in self.returns.items())
        text = (
            f"{self.what}: survivors returned after s [{returns}], all with one result of "
            f"{'/'.join(map(str, self.contributors))} contributors, {self.taken_over} of {self.parts} parts taken "
            f"over, {self.exchanges} exchanges; next averaging in {self.next_seconds:.2f} s"
        )
        if self.noticed:
            text += f"; death noticed after {max(self.noticed.values()):.3f} s"
        return text + (f"; the resumed: {self.resumed}" if self.resumed else "")


def pause_until(moment: float) -> None:
    """The moment itself is what a test chooses."""
    while time.monotonic() < moment:
        time.sleep(0.0005)


class BigSwarm:
    """`count` processes, one rank each, all inputs prepared."""

    def __init__(self, peers: Peers, run: str, count: int = 4, strategy: str = "AllReduce") -> None:
        self.peers, self.run, self.count = peers, run, count
        self.members: dict[int, PeerProcess] = {rank: peers.start(CHILD) for rank in range(count)}
        self.spares: list[PeerProcess] = []
        founder = self.members[0]
        own = founder.ask("join", 120, run=run, peers=[], found=True, strategy=strategy)
        founder.peer_id, founder.address = own["peer_id"], own["address"]
        self._let_in(range(1, count), founder.address)

    def _let_in(self, ranks: Iterable[int], address: str) -> None:
        for rank in ranks:
            own = self.members[rank].ask("join", 120, run=self.run, peers=[address])
            self.members[rank].peer_id, self.members[rank].address = own["peer_id"], own["address"]
            self.members[rank].ask("prepare_big", rank=rank)
        if 0 in self.members and self.members[0].address == address:
            self.members[0].ask("prepare_big", rank=0)
        self.meet()

    def meet(self) -> None:
        """Wait until each sees each other one."""
        ask_all(self.members.values(), "wait_peers", count=len(self.members) - 1)

    def start_spare(self) -> None:
        """Imports take seconds: begin early."""
        self.spares.append(self.peers.start(CHILD))

    def add(self, rank: int) -> None:
        """A new process in the place of one that died, or that never was, let in by a member."""
        if not self.spares:
            self.start_spare()
        inside = next(iter(self.members.values()))
        self.members[rank] = self.spares.pop(0)
        self._let_in([rank], inside.address)

    def ids(self) -> dict[str, int]:
        return {process.peer_id: rank for rank, process in self.members.items()}

    # -- one averaging

    def start_averaging(self, ranks: Iterable[int] | None = None) -> float:
        moment = time.monotonic()
        for rank in self.members if ranks is None else ranks:
            self.members[rank].send("average_big", weight=WEIGHTS[rank])
        return moment

    def check(self, ranks: list[int], ids: dict[str, int]) -> dict[str, Any]:
        """The survivors' results: no input was touched, all are equal, each part is what it is reported to be."""
        for rank in ranks:
            self.members[rank].send("check_big", ranks=ids, weights=WEIGHTS)
        facts = {rank: self.members[rank].answer(60) for rank in ranks}
        first = facts[ranks[0]]
        for rank, fact in facts.items():
            assert fact["untouched"], f"{rank}: its input was changed"
            assert not fact["wrong"], f"{rank}: parts that are no mean of their contributors: {fact['wrong']}"
            assert fact["parts"] == first["parts"], f"{ranks[0]} and {rank} report different parts"
            assert fact["digest"] == first["digest"], f"the results of {ranks[0]} and {rank} differ"
        spans = sorted((part[1], part[2]) for part in first["parts"])
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), BIG], "gaps or overlaps"
        return first

    def average(self, ranks: list[int] | None = None) -> float:
        """An undisturbed averaging of these: exact, checked. Returns its seconds."""
        ranks = sorted(self.members) if ranks is None else ranks
        started_at = self.start_averaging(ranks)
        results = [self.members[rank].answer(40) for rank in ranks]
        ids = sorted(self.members[rank].peer_id for rank in ranks)
        for result in results:
            assert result["exact"], result
            assert result["contributed"] == result["members"] == ids, result
        self.check(ranks, self.ids())
        return max(result["returned_at"] for result in results) - started_at

    def await_survivors(self, trial: Trial, ranks: list[int], since: float, ids: dict[str, int]) -> dict[str, Any]:
        """Each returns within 5 s, with a result; all results are right and equal. Returns what `check` found."""
        replies = {rank: self.members[rank].receive(max(1.0, since + 20 - time.monotonic())) for rank in ranks}
        errors = {rank: reply for rank, reply in replies.items() if "error" in reply}
        assert not errors, f"{trial.what}: errors of survivors: {errors}"
        trial.returns = {rank: reply["value"]["returned_at"] - since for rank, reply in replies.items()}
        trial.exchanges = max(count for reply in replies.values() for count in reply["value"]["exchanges"])
        fact = self.check(ranks, ids)
        trial.digest, trial.parts = fact["digest"], len(fact["parts"])
        trial.taken_over = sum(part[3] > 0 for part in fact["parts"])
        trial.contributors = sorted({len(part[5]) for part in fact["parts"]})
        assert max(trial.returns.values()) <= RETURN_SECONDS, f"{trial}"
        return fact

    def await_notice(self, trial: Trial, ranks: list[int], dead: PeerProcess, since: float) -> None:
        """Each survivor has an event that names the dead peer within a second, and `peers()` agrees."""
        for rank in ranks:
            self.members[rank].ask("wait_gone", 15, peer_id=dead.peer_id)
            noticed = self.members[rank].ask("wait_lost", 15, peer_id=dead.peer_id)
            trial.noticed[rank] = max(trial.noticed.get(rank, 0.0), noticed - since)
        assert max(trial.noticed.values()) <= NOTICE_SECONDS, f"{trial}"

    # -- a death or a stop from outside, at any moment

    def measure(self, times: int = 3) -> float:
        """Median seconds of an undisturbed averaging."""
        return statistics.median(self.average() for _ in range(times))

    def kill_at(self, deaths: dict[int, float], what: str) -> Trial:
        """Kill these ranks after so many seconds of an averaging; the whole trial but for new members."""
        trial, survivors = Trial(what), [rank for rank in self.members if rank not in deaths]
        started_at = self.start_averaging()
        killed_at = {}
        for rank, after_seconds in sorted(deaths.items(), key=lambda item: item[1]):
            pause_until(started_at + after_seconds)
            killed_at[rank] = self.members[rank].kill(signal.SIGKILL)
        self.await_survivors(trial, survivors, max(killed_at.values()), self.ids())
        self._after_a_death(trial, survivors, killed_at)
        return trial

    # -- a death or a stop from inside, at a named moment

    def collector(self) -> int:
        """The rank of who collects the next roll, once all agree on it."""
        found: list[Any] = []

        def agreed() -> bool:
            found[:] = ask_all(self.members.values(), "next_collector")
            return all(one == found[0] for one in found)

        wait_until(agreed, 20, f"all name one collector: {found}")
        return self.ids()[found[0][1]]

    def strike(
        self, moment: str, signal_number: int, rank: int, *, count: int | None = None,
        resume_seconds: float | None = None, late_caller: bool = False,
    ) -> Trial:  # fmt: skip
        """Kill or stop a member at a moment of an averaging.

        `resume_seconds`: SIGCONT so long after the stop, or, where it is None, after the survivors' next averaging.
        `rank` is not followed in the roll, where collectors are chosen; `late_caller`: the victim calls last.
        """
        if moment == CLOSING:  # a clean round has none: somebody else dies before
            self.add(max(self.members) + 1)
            disturber = self.members[max(self.members)]
            disturber.ask("strike", moment=PART_SENT, signal_number=signal.SIGKILL, count=6)
        if moment in (COLLECTING, CALLED, HANDED_OUT):
            collector = self.collector()
            rank = collector if moment in (COLLECTING, HANDED_OUT) else next(one for one in (1, 2) if one != collector)
        victim = self.members[rank]
        victim.ask("strike", moment=moment, signal_number=signal_number, count=count)
        trial = Trial(f"{signal.Signals(signal_number).name} of {rank} at: {moment}")
        ids = self.ids()
        others = [one for one in self.members if one != rank]
        self.start_averaging(others if late_caller else [rank])
        if moment == CALLED:
            pause_until(time.monotonic() + SKEW_SECONDS)
        self.start_averaging([rank] if late_caller else others)
        struck = victim.receive(20)
        assert struck.get("struck") == moment, struck
        if moment == CLOSING:
            assert disturber.receive(5)["struck"] == PART_SENT
            self.members.pop(max(self.members)).close()
        resumed_at = None
        if resume_seconds is not None:
            pause_until(struck["at"] + resume_seconds)
            resumed_at = victim.kill(signal.SIGCONT)
        survivors = [one for one in self.members if one != rank]
        fact = self.await_survivors(trial, survivors, struck["at"], ids)
        if resume_seconds is None:
            self._check_take_over(fact, struck, victim.peer_id)
        if signal_number == signal.SIGKILL:
            self._after_a_death(trial, survivors, {rank: struck["at"]})
            self.add(rank)
        else:
            self._after_a_stop(trial, survivors, rank, ids, resumed_at)
        return trial

    def _check_take_over(self, fact: dict[str, Any], struck: dict[str, Any], victim: str) -> None:
        """What it had not begun to send is another's; where it was struck in the roll nothing is of it."""
        for _, start, stop, attempt, reducer, contributors, _ in fact["parts"]:
            if [start, stop] in struck["out"]:
                continue
            assert reducer != victim, f"a mean of a member that never sent it: {start} to {stop}"
            assert attempt > 0 or [start, stop] not in struck["share"]
            assert victim not in contributors or struck["share"], "in no round, and its values are in one"

    def _after_a_death(self, trial: Trial, survivors: list[int], killed_at: dict[int, float]) -> None:
        for rank, moment in killed_at.items():
            dead = self.members.pop(rank)
            self.await_notice(trial, survivors, dead, moment)
            dead.close()
            self.start_spare()
        trial.next_seconds = self.average(survivors)

    def _after_a_stop(
        self, trial: Trial, survivors: list[int], rank: int, ids: dict[str, int], resumed_at: float | None
    ) -> None:
        """The stopped one changes nobody: it has a RoundError, or the same result. Then all average together."""
        victim = self.members[rank]
        last = trial.digest
        if resumed_at is None:
            for other in survivors:
                self.members[other].ask("wait_gone", 15, peer_id=victim.peer_id)
            trial.next_seconds = self.average(survivors)
            last = self.check(survivors, ids)["digest"]
            resumed_at = victim.kill(signal.SIGCONT)
        reply = victim.receive(40)
        trial.resumed = f"{reply.get('error', 'the same result')} {reply['received_at'] - resumed_at:.2f} s later"
        if "error" in reply:
            trial.resumed += f" ({reply['message']})"
            assert reply["error"] == "RoundError", reply
        else:
            assert self.check([rank], ids)["digest"] == trial.digest, f"{trial}: it has another result"
        victim.ask("spare")
        assert self.check(survivors, ids)["digest"] == last, f"{trial}: it changed a survivor"
        self.meet()
        trial.next_seconds = self.average()
