"""What one member reduces in one round: its own share, and the parts that it takes over from a dead member."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.core.errors import ProtocolError
from shoal.core.gauges import SHORTEST_PATIENCE_SECONDS
from shoal.planning.lateness import predicted_stragglers
from shoal.protocols.round_state import FAILED, Held, Round, held_as
from shoal.tensors.mixing import PartMean

WATCH_SECONDS, STALL_SECONDS = 0.1, 0.5
BEGIN_SECONDS = 6.0
"""A member may begin a later round this much after us, or as much as the earlier ones took here: its groups may be
slower. One that has begun may be quiet for so long while it gives signs of life: its uplink is full, and others are
served first."""
LIVELY_SECONDS = 1.0
FETCH_SECONDS = 10.0
"""How long a member may take for one part's mean before nobody waits for it: 0.5 MB at 0.4 Mbit/s."""


@dataclass
class Reduction:
    """One part on its way: who still has to deliver it, who stands for which source, and the mean so far."""

    attempt: int
    waiting: dict[str, None]
    mean: PartMean
    sources: dict[str, None] = field(default_factory=dict)
    contributors: list[int] = field(default_factory=list)


class Reducer:
    """Collects contributions and holds each part's mean in its round as soon as nobody is waited for."""

    def __init__(self, round_: Round) -> None:
        self._round, self._host, group = round_, round_.host, round_.group
        self._numbers = {who: number for number, who in enumerate(group.members)}
        self._expected = [who for who, mass in zip(group.members, group.masses, strict=True) if mass > 0]
        self._slowness = {who: 1 / rate for who, rate in zip(group.members, group.bandwidths, strict=True) if rate}
        self._reductions: dict[int, Reduction] = {}
        self._claims: dict[str, tuple[str, float]] = {}
        self._began_at: dict[str, float] = {}
        self.share = round_.owned_by(round_.me)
        self._share_set = frozenset(self.share)
        self.delivered = dict.fromkeys(self._expected, 0)
        self.left_out: dict[str, str] = {}
        self.begun: dict[str, None] = {}
        self.unserved = {who: math.inf for who in group.members if who != self._host.peer_id and self.share}
        round_.on_lost.append(self.leave_out)
        self.claim(self._host.peer_id, round_.source, round_.mass)
        self.reduce(self.share, 0)

    def reduce(self, indices: list[int], attempt: int) -> None:
        """Collect these parts from now on."""
        for index in indices:
            waiting = dict.fromkeys(who for who in self._expected if who not in self._round.lost)
            self._reductions[index] = Reduction(attempt, waiting, PartMean())
        for who, (_, mass) in self._claims.items():
            if mass == 0:
                self._stop_waiting(who, indices)
        self._finish(indices)

    def reducing(self, index: int) -> bool:
        """Whether this part is being reduced here."""
        return index in self._reductions

    def drop(self, index: int) -> None:
        """A lower version of this part was found: it needs no new one."""
        self._reductions.pop(index, None)

    # -- contributions

    def claim(self, sender: str, source: str, mass: float) -> None:
        """What this sender's values stand for. Nobody waits for values without mass, nor twice for one source."""
        if not 0 <= mass <= self._round.group.most_mass:
            raise ProtocolError(f"a mass of {mass}")
        self._claims[sender] = source, mass
        self._began_at.setdefault(sender, self._host.clock.now())
        self._stop_waiting(sender, [
            index for index, reduction in self._reductions.items() if mass == 0 or source in reduction.sources
        ])  # fmt: skip

    def contribute(self, sender: str, index: int, values: Tensor) -> None:
        """Add a sender's values of one part. What came too late, twice, or was not asked for changes nothing."""
        reduction = self._reductions.get(index)
        if reduction is None or sender not in reduction.waiting or sender not in self._claims:
            twice = reduction is not None and self._numbers[sender] in reduction.contributors
            self._round.dropped["a duplicate part" if twice else "a part that nobody waits for"] += 1
            return
        source, mass = self._claims[sender]
        if source in reduction.sources:  # it claims another source than it began with
            self._stop_waiting(sender, [index])
            return
        if not reduction.mean.add(values, mass):
            self.leave_out(sender, "its values are not finite")
            return
        reduction.sources[source] = None
        reduction.contributors.append(self._numbers[sender])
        for who in [who for who in reduction.waiting if self._claims.get(who, ("", 0.0))[0] == source]:
            self._stop_waiting(who, [index])
        self._finish([index])

    def leave_out(self, sender: str, reason: str, indices: Iterable[int] | None = None) -> None:
        """Go on without what this sender has not delivered: of these parts, or of all that are reduced here."""
        waiting = [
            index
            for index in (list(self._reductions) if indices is None else indices)
            if index in self._reductions and sender in self._reductions[index].waiting
        ]
        if not waiting:
            return
        if sender not in self.left_out:
            self.left_out[sender] = reason
            kind = "late" if reason.startswith("late") else "warning"
            self._host.log.add(kind, f"left out: {reason}", sender)
        self._stop_waiting(sender, waiting)

    def _stop_waiting(self, sender: str, indices: list[int]) -> None:
        for index in indices:
            was_waited_for = index in self._reductions and self._reductions[index].waiting.pop(sender, 0) is None
            if was_waited_for and index in self._share_set and sender not in self.left_out:
                self.delivered[sender] += 1
        self._finish(indices)

    def _finish(self, indices: list[int]) -> None:
        """Hold the mean of each of these parts that nobody is waited for any more."""
        if self._round.state == FAILED:
            return  # no values are kept here any more; who still sends is told so
        for index in indices:
            reduction = self._reductions.get(index)
            if reduction is not None and not reduction.waiting:
                del self._reductions[index]
                self._round.hold(index, self._mean(index, reduction))

    def _mean(self, index: int, reduction: Reduction) -> Held:
        place = self._round.place(index)
        values = place if reduction.attempt == 0 else torch.empty_like(place)
        reduction.mean.write(values)
        return held_as(reduction.attempt, reduction.mean.weight, tuple(sorted(reduction.contributors)), values)

    # -- lateness

    async def watch(self) -> None:
        """Leave out whoever is silent too long, or far slower than the others; return when the share is served.

        Our own stall is no silence of theirs."""
        started_at = looked_at = self._host.clock.now()
        while self._unfinished():
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._round.until(lambda: not self._unfinished())
            except TimeoutError:
                now = self._host.clock.now()
                if now - looked_at > WATCH_SECONDS + STALL_SECONDS:
                    started_at = now
                else:
                    self._leave_out_late(now, started_at)
            looked_at = self._host.clock.now()

    def _unfinished(self) -> bool:
        """Whether a part is being reduced here, or a member that keeps up may still fetch means of this share."""
        return bool(self._reductions) or any(self._keeps_up(who) for who in self.unserved)

    def _keeps_up(self, who: str) -> bool:
        return who not in self._round.lost and who not in self.left_out

    @property
    def clean(self) -> bool:
        """Every part is its owner's own, nobody was lost, and those who keep up have fetched this share.

        Then nobody holds a lower version of anything, and whoever fetched has not gone on without this peer. Who said
        goodbye does not count: it may have all it wanted, and have ended before its receipt came.
        """
        round_ = self._round
        others = len(round_.group.members) - 1
        return (
            all(attempt == 0 for attempt, _ in round_.versions())
            and not ((round_.lost.keys() | round_.broke_off.keys()) - round_.left.keys() or round_.cut_off)
            and not any(self._keeps_up(who) for who in self.unserved)
            and (others == 0 or not self.share or bool(round_.left) or len(self.unserved) < others)
        )

    def serving(self, who: str) -> None:
        """This member has just taken another mean."""
        if who in self.unserved:
            self.unserved[who] = self._host.clock.now()

    def served(self, who: str, *, wholly: bool) -> None:
        """This member has fetched all of the share, or broke off."""
        self.unserved.pop(who, None)
        if not wholly:
            self._round.broke_off[who] = None
        self._round.change()

    def _leave_out_late(self, now: float, started_at: float) -> None:
        if not self._reductions:
            for who, taken_at in list(self.unserved.items()):
                self.unserved[who] = min(taken_at, now)
                if now - taken_at > FETCH_SECONDS:
                    self.served(who, wholly=False)
        for sender in self._expected:
            if not any(sender in reduction.waiting for reduction in self._reductions.values()):
                continue
            remote = self._host.remotes.get(sender)
            silent_seconds = now - max(started_at, remote.bulk.last_heard if remote else started_at)
            if silent_seconds <= SHORTEST_PATIENCE_SECONDS:
                continue
            patience = remote.bulk.patience_seconds() if remote else BEGIN_SECONDS
            is_lively = remote is not None and now - remote.life.last_heard < LIVELY_SECONDS
            if sender not in self._claims and self._round.group.round_index > 0:
                patience = max(BEGIN_SECONDS, self._round.before_seconds)
            elif is_lively and sender in self._claims:
                patience = BEGIN_SECONDS
            if silent_seconds > patience:
                self.leave_out(sender, f"late: silent for {silent_seconds:.1f} s")
        parts = len(self.share)  # the one that is under way counts: nobody knows how much of it has come
        fractions = {who: min(1.0, (count + 1) / parts) for who, count in self.delivered.items() if count}
        elapsed = {who: now - max(started_at, self._began_at.get(who, now)) for who in fractions}
        for sender in predicted_stragglers(fractions, elapsed, self._slowness):
            pace = f"{fractions[sender]:.0%} in {elapsed[sender]:.1f} s"
            self.leave_out(sender, f"late: {pace}, it would take more than 3 x the group's median")
