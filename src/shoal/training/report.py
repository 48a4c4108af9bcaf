"""What `swarm.report()` tells."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.events import Event
from shoal.protocols.butterfly import RoundReport
from shoal.protocols.history import Averaging, AveragingFailure, GlobalStep


@dataclass(frozen=True)
class Report:
    """One peer's view of the run so far; `str(report)` is for people.

    Seconds count from this peer's join. `staleness_steps` is the mean number of local steps between an averaging's
    snapshot and its application. `bandwidth_bytes_per_second` is measured, None before enough was transferred.
    `dropped` counts messages that did not belong to a round and changed nothing, by what was wrong with them.

    Of `peers_now`, the live ones, `participating` have the run's state and train; who of them `contributed` to the last
    averaging is told by `applied` or `global_steps`. In gradient mode `global_steps` holds the newest 1,000 steps of
    the swarm, `samples_per_second` is the pace of all peers together, `batches_left_out` had no finite gradient, and
    `samples_dropped` were gathered for a step that the others took without this peer.
    """

    run: str
    peer_id: str
    state: str
    seconds: float
    steps: int
    progress: int
    averagings: int
    applied: tuple[Averaging, ...]
    global_steps: tuple[GlobalStep, ...]
    failures: tuple[AveragingFailure, ...]
    peers_met: tuple[str, ...]
    peers_now: tuple[str, ...]
    participating: tuple[str, ...]
    bytes_sent: int
    bytes_received: int
    bandwidth_bytes_per_second: float | None
    staleness_steps: float
    samples_per_second: float
    batches_left_out: int
    samples_dropped: float
    events: tuple[Event, ...]
    event_counts: dict[str, int]
    dropped: dict[str, int]

    @property
    def applied_at_seconds(self) -> list[float]:
        """When each averaging was applied."""
        return [averaging.at_seconds for averaging in self.applied]

    def __str__(self) -> str:
        rate = self.bandwidth_bytes_per_second
        lines = [
            f"run {self.run}, peer {self.peer_id[:8]}: {self.state}, {self.seconds:.1f} s after it joined",
            f"  steps        {self.steps} taken here, on a state that was trained for {self.progress} in all",
            f"  averagings   {self.averagings} applied, {len(self.failures)} failed, "
            f"{self.staleness_steps:.1f} local steps stale on average",
            f"  peers        {self._peers()}, {len(self.peers_met)} met",
            f"  traffic      {_size(self.bytes_sent)} sent, {_size(self.bytes_received)} received"
            + (f", {_size(rate)}/s when busy" if rate else ""),
        ]
        if self.global_steps:
            lines.insert(3, f"  gathering    {self._gathering()}")
        lines += [f"  dropped      {what}, {count} times" for what, count in self.dropped.items()]
        lines += [f"  failed       number {f.number} at {f.at_seconds:.1f} s: {f.reason}" for f in self.failures[-5:]]
        lines += [f"  {event}" for event in self.events if event.kind not in ("averaged", "failed")][-12:]
        return "\n".join(lines)

    def _peers(self) -> str:
        """Who is there, who takes part, and who was in the last averaging: three different things."""
        text = f"{len(self.peers_now)} others alive, {len(self.participating)} of them take part"
        last = (
            self.global_steps[-1].given if self.global_steps else self.applied[-1].contributed if self.applied else ()
        )
        return text + (f", {len(set(last) - {self.peer_id})} gave to the last averaging" if last else "")

    def _gathering(self) -> str:
        last = self.global_steps[-1]
        text = f"{last.samples:g} samples in step {last.step}, {self.samples_per_second:.1f} samples/s by all peers"
        if self.batches_left_out:
            text += f", {self.batches_left_out} batches without a finite gradient left out here"
        return text + (f", {self.samples_dropped:g} samples came too late" if self.samples_dropped else "")


def _size(count_bytes: float) -> str:
    return f"{count_bytes / 1e6:.1f} MB" if count_bytes >= 1e6 else f"{count_bytes / 1e3:.1f} kB"


@dataclass(frozen=True)
class PeerInfo:
    """Another live peer, by its own word."""

    peer_id: str
    role: str
    state: str
    steps: int
    step_seconds: float
    averagings: int
    bandwidth_bytes_per_second: float | None
    endpoints: tuple[str, ...]


@dataclass(frozen=True)
class AveragingReport:
    """One call of `swarm.average`: who was in it, and what it cost.

    `members`: peer ids of all who took part; `contributed`: those whose values went whole into the groups that this
    peer was in. `exact`: the result is the weighted mean over all members, nobody is missing anywhere. `rounds` tells
    of each group round that succeeded here: who was left out or lost and why, bytes, seconds, and for each part who
    reduced it and whose values are in it. `failures` gives the reason for each round that did not.
    """

    number: int
    members: tuple[str, ...]
    contributed: tuple[str, ...]
    weight_total: float
    exact: bool
    rounds: tuple[RoundReport, ...]
    failures: tuple[str, ...]
    bytes_sent: int
    bytes_received: int
    seconds: float

    @property
    def rounds_done(self) -> int:
        """How many group rounds succeeded here."""
        return len(self.rounds)
