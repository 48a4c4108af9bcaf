"""What must hold in every world, whatever fails in it: checked over all group rounds of all peers, when a world ends.

agreement     members of a group that could reach each other, and succeeded, hold the same result, bit for bit
counted once  the values of each part are the weighted mean of its contributors' own, each source once
one plan      the groups of a round are disjoint, or the same, at all members of a roll
conserved     a result that claims the whole weight of its roll is the weighted mean of what all its members brought
forward       a peer's rolls have rising numbers
in time       no group round lasts longer than it may
on the line   no peer sends more bytes than its line carries
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shoal.planning.versions import Versions
from shoal.protocols.round_record import Group
from shoal.protocols.round_state import SETTLED, Round

if TYPE_CHECKING:
    from shoal.sim.world import SimPeer

Values = tuple[NDArray[np.float32], NDArray[np.float64]]
ROUNDING = 1e-5
"""Of the largest value: one rounding to float32 in each of a few rounds."""
LATE_SECONDS = 2.0
LINE_BYTES = 1
"""Rounding."""


@dataclass(frozen=True)
class PartSeen:
    """One part of a result: its bounds, and who is in it with which total weight."""

    vector: int
    start: int
    stop: int
    contributors: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class RoundSeen:
    """One group round, as one peer lived it. `versions` and `after` are None where it failed, or has not ended."""

    peer: str
    group: Group
    source: str
    mass: float
    before: Values
    began_at: float
    ended_at: float | None
    versions: Versions | None
    parts: tuple[PartSeen, ...]
    after: Values | None

    @property
    def round_name(self) -> str:
        return f"{self.group.roll.series} {self.group.roll.number}, round {self.group.round_index + 1}"


@dataclass(frozen=True)
class Disturbance:
    """From `start` to `end` these peers could not be relied on: paused or dead; with `cut`, they could not be reached
    from outside, but from each other."""

    start: float
    end: float
    peers: frozenset[str]
    cut: bool = False


@dataclass
class Checkers:
    """`longest_round_seconds`: what the strategy's timeout allows one group round, where that is to be checked."""

    disturbances: list[Disturbance] = field(default_factory=list)
    longest_round_seconds: float | None = None
    seen: list[RoundSeen] = field(default_factory=list)
    _open: dict[str, list[tuple[Round, Values]]] = field(default_factory=dict)
    _peers: list[SimPeer] = field(default_factory=list)
    _groups: dict[tuple[str, int, tuple[int, ...]], Group] = field(default_factory=dict)

    def watch(self, peer: SimPeer) -> None:
        """Follow this peer's group rounds from now on."""
        self._peers.append(peer)
        peer.peer.rounds.on_open.append(lambda round_: self._begin(peer.id, round_))

    def _begin(self, peer_id: str, round_: Round) -> None:
        self._harvest(peer_id)
        self._open.setdefault(peer_id, []).append((round_, _copied(round_)))

    def _harvest(self, peer_id: str) -> None:
        """Copy what has ended: the peer uses its memory again."""
        still: list[tuple[Round, Values]] = []
        for round_, before in self._open.get(peer_id, ()):
            if round_.ended_at is None:
                still.append((round_, before))
            else:
                self.seen.append(self._seen(peer_id, round_, before))
        self._open[peer_id] = still

    def _seen(self, peer_id: str, round_: Round, before: Values) -> RoundSeen:
        """Members of a group have equal rolls: one copy is kept."""
        group = round_.group
        first = self._groups.setdefault((group.roll.roll_id, group.round_index, group.numbers), group)
        return _seen(peer_id, round_, first if first == group else group, before)

    def story(self, peer: SimPeer, number: int) -> str:
        """What a peer lived through in one averaging: its group rounds, and its events from the first to the last."""
        self._harvest(peer.id)
        rounds = [one for one in self.seen if one.peer == peer.id and one.group.roll.number == number]
        if not rounds:
            return f"{peer.name} was in no group round of number {number}"
        lines = [(one.began_at, f"{one.round_name} begins with {', '.join(one.group.members)}") for one in rounds]
        for one in rounds:
            if one.ended_at is not None:
                how = "fails" if one.versions is None else f"succeeds, attempts {[a for a, _ in one.versions]}"
                lines.append((one.ended_at, f"{one.round_name} {how}"))
        start, end = min(lines)[0], max(lines)[0]
        events = [(peer.born_at + event.at_seconds, str(event)) for event in peer.peer.log.recent]
        lines += [(at, text) for at, text in events if start <= at <= end]
        return "\n".join(f"{at:10.3f} s  {text}" for at, text in sorted(lines))

    def check(self, now: float) -> None:
        """Raises AssertionError with everything that does not hold."""
        for peer_id in self._open:
            self._harvest(peer_id)
            self.seen += [self._seen(peer_id, round_, before) for round_, before in self._open[peer_id]]
            self._open[peer_id] = []
        complaints = [*self._about_groups(), *self._about_peers(now)]
        if complaints:
            more = [f"and {len(complaints) - 20} more"] if len(complaints) > 20 else []
            raise AssertionError("\n".join(["what must always hold does not:", *complaints[:20], *more]))

    # -- the rounds of a roll

    def _about_groups(self) -> Iterator[str]:
        rolls: dict[str, list[RoundSeen]] = {}
        for one in self.seen:
            rolls.setdefault(one.group.roll.roll_id, []).append(one)
        for rounds in rolls.values():
            by_group: dict[tuple[int, tuple[int, ...]], list[RoundSeen]] = {}
            for one in rounds:
                by_group.setdefault((one.group.round_index, one.group.numbers), []).append(one)
            yield from _one_plan(by_group)
            for group in by_group.values():
                yield from self._agreement(group)
                for one in {one.versions: one for one in group}.values():  # who holds the same needs no second look
                    yield from _counted_once(one, group)
            yield from _conserved(rounds)

    def _agreement(self, group: list[RoundSeen]) -> Iterator[str]:
        done = [one for one in group if one.versions is not None]
        began_at = min(one.began_at for one in group)
        for one, other in combinations(done, 2):
            ended_at = max(one.ended_at or 0.0, other.ended_at or 0.0)
            if one.versions != other.versions and not self._were_apart(one.peer, other.peer, began_at, ended_at):
                yield f"{one.round_name}: {one.peer[:6]} and {other.peer[:6]} ended with different versions"

    def _were_apart(self, one: str, other: str, start: float, end: float) -> bool:
        """Whether in this time one of the two was not itself, or they could not reach each other."""
        for fault in self.disturbances:
            if fault.start <= end and start <= fault.end:
                inside = (one in fault.peers) + (other in fault.peers)
                if inside == 1 or (inside == 2 and not fault.cut):
                    return True
        return False

    # -- one peer's life

    def _about_peers(self, now: float) -> Iterator[str]:
        for peer in self._peers:
            mine = [one for one in self.seen if one.peer == peer.id]
            for series in dict.fromkeys(one.group.roll.series for one in mine):
                rolls = [one.group.roll for one in mine if one.group.roll.series == series]
                for before, after in pairwise(dict.fromkeys((roll.number, roll.roll_id) for roll in rolls)):
                    if after[0] <= before[0]:
                        yield f"{peer.name}: roll {series} {after[0]} came after roll {before[0]}"
            for one in mine:
                lasted = (now if one.ended_at is None else one.ended_at) - one.began_at
                limit = self.longest_round_seconds
                if limit is not None and lasted > limit + LATE_SECONDS + self._stood_still(peer.id, one.began_at):
                    yield f"{peer.name}: {one.round_name} lasted {lasted:.1f} s, {limit:.1f} s are allowed"
            yield from _on_the_line(peer)

    def _stood_still(self, peer_id: str, since: float) -> float:
        return sum(
            fault.end - fault.start
            for fault in self.disturbances
            if peer_id in fault.peers and not fault.cut and fault.end >= since
        )


def _copied(round_: Round) -> Values:
    return round_.vectors[0].numpy().copy(), round_.vectors[1].numpy().copy()


def _seen(peer_id: str, round_: Round, group: Group, before: Values) -> RoundSeen:
    done = round_.state == SETTLED
    parts = tuple(
        PartSeen(part.vector, part.start, part.stop, held.contributors, held.weight)
        for part, held in zip(round_.parts, round_.held, strict=True)
        if held is not None
    )
    return RoundSeen(
        peer_id, group, round_.source, round_.mass, before, round_.started_at, round_.ended_at,
        round_.versions() if done else None, parts if done else (), _copied(round_) if done else None,
    )  # fmt: skip


def _one_plan(by_group: dict[tuple[int, tuple[int, ...]], list[RoundSeen]]) -> Iterator[str]:
    for (index, one), (other_index, other) in combinations(by_group, 2):
        if index == other_index and set(one) & set(other):
            name = next(iter(by_group.values()))[0].round_name
            yield f"{name}: two members plan different groups, {one} and {other}"


def _counted_once(one: RoundSeen, group: list[RoundSeen]) -> Iterator[str]:
    """The result of one member, part by part, from what its contributors had."""
    if one.after is None:
        return
    had = {other.peer: other for other in group}
    members = one.group.members
    for part in one.parts:
        inside = [had[members[number]] for number in part.contributors if members[number] in had]
        result = one.after[part.vector][part.start : part.stop]
        if len(inside) < len(part.contributors):
            yield f"{one.round_name}: values of a member that was not in it are in the result"
        elif len({other.source for other in inside}) < len(inside):
            yield f"{one.round_name}: one source counts twice at {one.peer[:6]}"
        elif abs(sum(other.mass for other in inside) - part.weight) > 1e-9 * max(part.weight, 1.0):
            yield f"{one.round_name}: a part weighs {part.weight}, its contributors bring something else"
        elif part.weight > 0:
            brought = [(other.mass, other.before[part.vector][part.start : part.stop]) for other in inside]
            if not _is_near(result, _mean(brought)):
                yield f"{one.round_name}: a part at {one.peer[:6]} is not the mean of its contributors"
        elif not np.array_equal(result, one.before[part.vector][part.start : part.stop]):
            yield f"{one.round_name}: a part without weight has changed at {one.peer[:6]}"


def _conserved(rounds: list[RoundSeen]) -> Iterator[str]:
    """A result of the roll's whole weight, against what all its members had at the beginning."""
    roll = rounds[0].group.roll
    first = {one.peer: one for one in rounds if one.group.round_index == 0}
    if set(first) != set(roll.members):
        return
    total = sum(roll.weights)
    weighted = list(zip(roll.members, roll.weights, strict=True))
    means = [_mean([(weight, first[who].before[vector]) for who, weight in weighted]) for vector in (0, 1)]
    for one in rounds:
        if one.after is None or not one.parts or total == 0:
            continue
        if any(abs(part.weight - total) > 1e-9 * total for part in one.parts):
            continue
        if not (_is_near(one.after[0], means[0]) and _is_near(one.after[1], means[1])):
            yield f"{one.round_name}: {one.peer[:6]} has the whole weight of the roll, and not its mean"


@dataclass(frozen=True)
class Mean:
    """A weighted mean in float64, and the largest value in it, by which rounding is judged."""

    values: NDArray[np.float64]
    scale: float


def _mean(brought: Iterable[tuple[float, NDArray[np.floating]]]) -> Mean:
    weighing = [(weight, values) for weight, values in brought if weight > 0]
    total = sum(weight for weight, _ in weighing)
    mean = sum((weight / total * values.astype(np.float64) for weight, values in weighing), np.zeros(()))
    return Mean(mean, max((float(np.abs(values).max(initial=0.0)) for _, values in weighing), default=0.0))


def _is_near(result: NDArray[np.floating], mean: Mean) -> bool:
    return bool(np.abs(result - mean.values).max(initial=0.0) <= ROUNDING * mean.scale)


def _on_the_line(peer: SimPeer) -> Iterator[str]:
    for line, name in ((peer.transport.uplink, "uplink"), (peer.transport.downlink, "downlink")):
        possible = line.possible_bytes + line.waiting_bytes + LINE_BYTES
        if line.carried_bytes > possible:
            yield f"{peer.name}: its {name} carried {line.carried_bytes} bytes, {possible:.0f} were possible"
