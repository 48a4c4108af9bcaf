"""Large-batch steps: the swarm gathers `target_batch` samples, however unequal its peers, and all step once, together.

    each peer, for ever:
        gradients of local batches               summed up; the model stays as it is
        when the swarm has the target:           or see planning/gathering.py for why else
            g, w <- my mean gradient, samples    the training thread waits from here on
            G <- weighted mean of g over a roll  of those who are at the same step, with the same state
            optimizer step with G                the same one everywhere
        every 100 steps:                         so that rounding on unlike machines never adds up
            everything <- its mean over the peers

It is synchronous: no gradient is stale. A peer that misses a step takes it later, with the same mean gradient, and what
it had gathered meanwhile is dropped; one whose state has parted from the others' downloads theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from shoal.core.errors import NobodyThere, OutOfStep, RemoteError, RoundError, TensorError
from shoal.overlay.member_record import CATCHING_UP, TRAINING
from shoal.planning.gathering import AHEAD, BEHIND, Gathered, level_of, proposed_batch, still_gather, why_stop
from shoal.protocols.averaging import AllReduce
from shoal.protocols.history import Given, GlobalStep
from shoal.protocols.outcome import Outcome
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Figures, GradientSum, Replica
from shoal.protocols.roll_record import DIVERGED, MAX_RANGES, STEP, TRAIN, Stand
from shoal.tensors.flat import Vectors

EVERYTHING_EVERY_STEPS = 100
TELL_SECONDS = 0.05
PAUSE_SECONDS, OVERDUE_WITHIN_SECONDS = 0.2, 1e-3
ADVISE_AFTER_STEPS, ADVISE_AGAIN = 5, 1.25
"""Measurements settle first. The same advice is not repeated until its figure has changed by this factor."""


async def begin_stepping(peer: Peer, replica: Replica, max_grad_norm: float | None) -> None:
    """With the run's state, before this peer trains. Raises AttachError, or OutOfStep where it needs a newer state."""
    peer.mean_gradients.forget()
    await replica.gather(max_grad_norm)
    await _catch_up(peer, replica)


async def step_together(
    peer: Peer, replica: Replica, all_reduce: AllReduce, target_batch: int, gather_timeout_seconds: float
) -> None:
    """Gather and step until this peer leaves. Raises OutOfStep where its state is not the others' any more."""
    steps = _Steps(peer, replica, all_reduce, target_batch, gather_timeout_seconds)
    telling = asyncio.create_task(steps.tell(), name=f"{peer.id[:6]} tell figures")
    try:
        while (gathered := await steps.gather()) is not None:
            await steps.take(gathered)
    finally:
        steps.close()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _catch_up(peer: Peer, replica: Replica) -> None:
    """Take the steps that the others have taken, with their mean gradients. Raises OutOfStep where those are gone.

    A newcomer on a slow line, for which there is more to take with each step, asks the others to wait.
    """
    before = replica.progress
    try:
        await _take_missed(peer, replica)
    finally:
        peer.members.update(behind_seconds=0.0)  # nobody waits while it downloads the state again
    if replica.progress > before:
        peer.log.add("repaired", f"from step {before} to {replica.progress}, with the others' mean gradients")


async def _take_missed(peer: Peer, replica: Replica) -> None:
    before, began_at = replica.progress, peer.clock.now()
    first_missing = None
    while (missing := _level(peer) - replica.progress) > 0:
        first_missing = first_missing or missing
        taken = replica.progress - before
        if taken and missing >= first_missing and peer.members.me.state == CATCHING_UP:
            seconds = missing * (peer.clock.now() - began_at) / taken
            peer.members.update(behind_seconds=seconds)
            peer.members.tell_figures()
        mean = await peer.mean_gradients.fetch(replica.progress + 1, replica.gradient_shapes)
        if mean is None:
            raise OutOfStep(f"at step {replica.progress}, {missing} behind: nobody keeps the gradients in between")
        await replica.step(mean, missed=True)


def _level(peer: Peer) -> int:
    return level_of(record.progress for record in peer.members.others(TRAINING).values())


class _Steps:
    """The state of one peer's stepping. `why_stop` alone is called in the training thread: it only reads."""

    def __init__(
        self, peer: Peer, replica: Replica, all_reduce: AllReduce, target_batch: int, gather_timeout_seconds: float
    ) -> None:
        self._peer, self._replica, self._all_reduce = peer, replica, all_reduce
        self._target_batch, self._longest_seconds = target_batch, gather_timeout_seconds
        self._others: tuple[Gathered, ...] = ()
        self._overdue = self._invited = self._unequal = False
        self._began_at = peer.clock.now()
        self._told: dict[str, tuple[tuple[int, float] | None, float]] = {}
        self._advised = 0
        self._notices = [peer.members.on_figures, peer.members.on_change]
        for notices in self._notices:
            notices.append(self._look)
        self._look()

    def close(self) -> None:
        """Hear of the others no more."""
        for notices in self._notices:
            notices.remove(self._look)

    # -- gathering

    def _look(self) -> None:
        others, now = [], self._peer.clock.now()
        for who, record in self._peer.register.everybody(TRAINING).items():
            if who != self._peer.id:
                told = record.progress, record.gathered
                if self._told.get(who, (None, 0.0))[0] != told:
                    self._told[who] = told, now
                others.append(Gathered(
                    who, record.progress, record.gathered, record.samples_per_second, record.step_seconds, record.waits,
                    self._told[who][1],
                ))  # fmt: skip
        self._others = tuple(others)
        self._peer.stir.set()

    def _mine(self, figures: Figures) -> Gathered:
        return Gathered(
            self._peer.id, figures["progress"], figures["gathered"], figures["samples_per_second"],
            figures["step_seconds"], figures["waits"],
        )  # fmt: skip

    def why_stop(self, figures: Figures, now: float) -> str:
        """The rule that the training thread asks after each batch."""
        return why_stop(
            self._mine(figures), self._others, self._target_batch, now, overdue=self._overdue, invited=self._invited
        )

    async def tell(self) -> None:
        """Tell the others after each batch what was gathered, at most 20 times a second."""
        batch = asyncio.Event()
        while True:
            batch.clear()
            if not self._replica.notify_at(self._replica.steps + 1, batch.set):
                await batch.wait()
            self._peer.members.tell_figures()
            await self._peer.clock.sleep(TELL_SECONDS)

    async def gather(self) -> GradientSum | None:
        """Let the training thread gather until there is enough. None when this peer leaves."""
        while (gathered := await self._sum()) is not None:
            self._peer.members.tell_figures()
            if gathered.why != AHEAD:
                return gathered
            if why := await self._others_have_it():
                return dataclasses.replace(gathered, why=why)
        return None

    async def _sum(self) -> GradientSum | None:
        self._see()
        asking = asyncio.create_task(self._replica.gradient_sum(self.why_stop), name=f"{self._peer.id[:6]} gather")
        try:
            while not (asking.done() or self._peer.leaving):
                await self._stirred(asking)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _others_have_it(self) -> str:
        """Wait for what the others still gather. Why that ends; empty where nobody gathers what is missing."""
        while not self._peer.leaving:
            figures, now = self._replica.figures(), self._peer.clock.now()
            why = self.why_stop(figures, now)
            if why not in ("", AHEAD):
                return why
            if not still_gather(self._mine(figures), self._others, now):
                return ""
            await self._stirred()
        return ""

    async def _stirred(self, *asking: asyncio.Task[GradientSum]) -> None:
        """Return when something happened, or the time for this step is over."""
        stirring = asyncio.create_task(self._peer.stir.wait())
        left = None if self._overdue else self._seconds_left()
        await asyncio.wait([*asking, stirring], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        stirring.cancel()
        self._peer.stir.clear()
        self._see()

    def _see(self) -> None:
        self._overdue = self._seconds_left() < OVERDUE_WITHIN_SECONDS
        self._invited = self._peer.rolls.invited_to(STEP)

    def _seconds_left(self) -> float:
        return self._began_at + self._longest_seconds - self._peer.clock.now()

    # -- stepping

    async def take(self, gathered: GradientSum) -> None:
        """One step with the others, or alone. What fails is recorded, changes nothing, and is tried again."""
        if gathered.why == BEHIND:
            return await _catch_up(self._peer, self._replica)
        stopped_at = self._peer.clock.now()
        try:
            mean, outcome = await self._average(gathered)
        except OutOfStep as error:
            if error.diverged:
                raise OutOfStep(_diverged(error.reason, gathered.rows), diverged=True) from None
            await self._hear_of_more_than(gathered.step)
            if (level := _level(self._peer)) < gathered.step - 1:  # as after a split: it would train apart until then
                raise OutOfStep(f"at step {gathered.step}, where most of the others are at {level}") from None
            return await _catch_up(self._peer, self._replica)
        except (RoundError, TensorError, RemoteError) as error:
            self._peer.history.failed(error)
            return await self._peer.clock.sleep(PAUSE_SECONDS)
        await self._replica.step(mean, missed=False)
        self._record(gathered, outcome, stopped_at)
        self._began_at = self._peer.clock.now()
        self._peer.mean_gradients.keep(gathered.step + 1, mean)
        self._peer.members.tell_figures()
        self._advise()
        if outcome is not None:
            self._unequal |= outcome.roll.disunited or (not outcome.exact and outcome.rounds_planned > 1)
        if self._unequal or self._peer.rolls.invited_to(TRAIN) or (gathered.step + 1) % EVERYTHING_EVERY_STEPS == 0:
            await self._equalize()
        return None

    async def _hear_of_more_than(self, step: int) -> None:
        """Until the news that most of the others took this step are here: they are on the way, like the refusal was."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_SECONDS):
                while _level(self._peer) <= step:
                    self._peer.stir.clear()
                    await self._peer.stir.wait()

    async def _average(self, gathered: GradientSum) -> tuple[Vectors, Outcome | None]:
        """The mean gradient of the swarm; of a peer that is alone, its own."""
        stand = Stand(gathered.step, gathered.sketch, gathered.batches[:MAX_RANGES])
        try:
            outcome = await self._all_reduce(STEP, gathered.vectors, gathered.samples, gathered.shapes, stand=stand)
        except NobodyThere:
            if gathered.samples == 0:
                raise RoundError("no batch of this peer had a finite gradient") from None
            return gathered.vectors, None
        if not all(part.weight > 0 for part in outcome.rounds[-1].parts):
            raise RoundError("nobody had samples for a part of it", outcome.roll.number, tuple(outcome.roll.members))
        return outcome.vectors, outcome

    async def _equalize(self) -> None:
        """Average everything, so that replicas are equal again bit for bit, or nearly (unlike last groups)."""
        everything = await self._replica.everything()
        stand = Stand(everything.step, everything.sketch, [])
        try:
            outcome = await self._all_reduce(TRAIN, everything.vectors, 1.0, everything.shapes, stand=stand)
        except NobodyThere:
            self._unequal = False
        except OutOfStep as error:
            if error.diverged:
                raise OutOfStep(_diverged(error.reason, everything.rows), diverged=True) from None
        except (RoundError, TensorError, RemoteError) as error:
            self._peer.history.failed(error)
        else:
            await self._replica.replace(outcome.vectors)
            self._peer.history.averaged(outcome, 0)
            self._unequal = False

    # -- telling

    def _record(self, gathered: GradientSum, outcome: Outcome | None, stopped_at: float) -> None:
        roll = outcome.roll if outcome else None
        given = {self._peer.id: Given(gathered.samples, tuple(gathered.batches))}
        if outcome is not None:
            members = zip(outcome.roll.members, outcome.roll.weights, outcome.roll.batches, strict=True)
            inside = outcome.roll.members if outcome.exact else outcome.contributed
            given = {
                who: Given(samples, tuple(batches))
                for who, samples, batches in members
                if samples > 0 and who in inside
            }
        for who, (code, reason) in (roll.turned_away if roll else {}).items():
            if code == DIVERGED:
                self._peer.log.add("diverged", _diverged(reason, gathered.rows), who)
        self._peer.history.stepped(
            GlobalStep(
                gathered.step + 1, self._peer.log.seconds(), given, gathered.why, outcome is None or outcome.exact,
                stopped_at - self._began_at, self._peer.clock.now() - stopped_at,
            )
        )  # fmt: skip

    def _advise(self) -> None:
        """Tell, once, what target this fleet could gather, where the given one does not suit it."""
        mine = self._mine(self._replica.figures())
        fleet = [mine, *(other for other in self._others if abs(other.step - mine.step) <= 1)]
        rate = sum(one.samples_per_second for one in fleet)
        slowest = max(one.batch_seconds for one in fleet)
        self._peer.history.samples_per_second = rate
        batch = proposed_batch(rate, slowest, self._target_batch, self._longest_seconds)
        too_much = batch is not None and batch < self._target_batch
        if batch is None or (len(self._peer.history.steps) < ADVISE_AFTER_STEPS and not too_much):
            return
        if self._advised / ADVISE_AGAIN < batch < self._advised * ADVISE_AGAIN:
            return
        self._advised = batch
        why = (
            f"that takes longer than gather_timeout_seconds={self._longest_seconds:g}"
            if too_much
            else f"the slowest peer needs {slowest:.2g} s for one batch, and the others wait for it in each step"
        )
        self._peer.log.add(
            "advice",
            f"the swarm gathers {rate:.1f} samples/s, and target_batch is {self._target_batch}: {why}. "
            f"A target_batch of {batch} would suit it",
        )


def _diverged(reason: str, rows: list[str]) -> str:
    """A collector's verdict, "row distance", in words."""
    row, _, distance = reason.partition(" ")
    number = int(row) if row.isascii() and row.isdigit() and len(row) < 10 else len(rows)
    name = rows[number] if number < len(rows) else "its state"
    return f"{name} differs from the others' by {distance[:10]} of its norm"
