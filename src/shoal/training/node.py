"""A peer on this machine: the network thread, and what lives on it from join to leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shoal.core.compute import ThreadCompute
from shoal.core.errors import LeftError
from shoal.core.events import Event
from shoal.overlay.charter import Options
from shoal.overlay.member_record import JOINED, TRAINER, TRAINING
from shoal.protocols.peer import Peer
from shoal.training.network_thread import NetworkThread
from shoal.training.presence import Presence
from shoal.training.report import Report
from shoal.training.settings import Settings
from shoal.training.thread_replica import ThreadReplica

Result = TypeVar("Result")
LEAVE_SECONDS = 2.5
LAST_ROLL_SECONDS, QUIET_SECONDS = 3.0, 0.1


class Node:
    """Starts the network thread and enters the run; returns from its constructor when that is done, or raises."""

    peer: Peer

    def __init__(self, settings: Settings, strategy: Options | None, on_event: Callable[[Event], None] | None) -> None:
        self.settings = settings
        self._replica: ThreadReplica | None = None
        self._entered: Future[None] = Future()
        self._joined_at = time.monotonic()
        self.presence = Presence(settings, TRAINER, strategy, on_event)
        self._thread = NetworkThread(self._live(), f"shoal {settings.run}")
        try:
            self._entered.result()
        except BaseException:
            self.stop()
            raise

    # -- on the network thread

    async def _live(self) -> None:
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="shoal work") as executor:
                compute = ThreadCompute(executor)
                await self.presence.live(lambda: self._prepare(compute), lambda: self._entered.set_result(None))
        except BaseException as error:  # told to whoever waits for the entry
            if self._entered.done():
                raise
            self._entered.set_exception(error)

    def _prepare(self, compute: ThreadCompute) -> None:
        self.peer = Peer(self.presence.host, self.presence.members, self.presence.register, compute)
        self.presence.members.refresh = self._figures

    def _figures(self) -> dict[str, Any]:
        """What this peer's record says of its training, read when a status is sent."""
        figures: dict[str, Any] = {
            "averagings": self.peer.history.applied_count,
            "bandwidth": self.peer.bandwidth(),
        }
        if self._replica is not None:
            figures |= self._replica.figures()
        return figures

    async def say_farewell(self, taking_part: Future[None]) -> None:
        """One last averaging, if anybody is there, and the end of the rolls that others wait for here."""
        peer = self.peer
        peer.leaving = True
        peer.stir.set()
        await asyncio.wrap_future(taking_part)
        peer.members.update(state=JOINED)  # nobody counts on this peer from now on
        quiet_since = started_at = peer.clock.now()
        while (now := peer.clock.now()) < started_at + LAST_ROLL_SECONDS and now < quiet_since + QUIET_SECONDS:
            if peer.rolls.collecting():
                quiet_since = now
            await peer.clock.sleep(0.01)

    # -- from the user's thread

    @property
    def alive(self) -> bool:
        """Whether the network thread runs."""
        return self._thread.alive

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self.peer.id

    @property
    def address(self) -> str:
        """The address others join by; a secret that was given is not part of it."""
        return self.presence.address

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the network thread."""
        if not self.alive:
            work.close()
            raise LeftError("the network thread of this swarm has ended; join again for a new swarm")
        return self._thread.submit(work)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Call something on the network thread."""
        self._thread.loop.call_soon_threadsafe(work)

    def watch(self, replica: ThreadReplica) -> None:
        """Tell the others this replica's figures from now on."""
        self._replica = replica

    def unwatch(self) -> None:
        """The replica could not be attached."""
        self._replica = None

    def stop(self) -> None:
        """Say goodbye and end the thread; an entry that is still under way is given up."""
        if self.alive:
            with contextlib.suppress(RuntimeError):  # the loop closed this very moment
                self.call_soon(self.presence.stop.set if self._entered.done() else self._thread.cancel)
        self._thread.join(LEAVE_SECONDS)

    def report(self, replica: ThreadReplica | None) -> Report:
        """See `Swarm.report`."""
        peer, history = self.peer, self.peer.history
        applied = tuple(history.applied)
        stale = [averaging.stale_steps for averaging in applied]
        return Report(
            run=self.settings.run,
            peer_id=peer.id,
            state=peer.members.me.state if self.alive else "left",
            seconds=time.monotonic() - self._joined_at,
            steps=replica.steps if replica else 0,
            progress=replica.progress if replica else 0,
            averagings=history.applied_count,
            applied=applied,
            global_steps=tuple(history.steps),
            failures=tuple(history.failures),
            peers_met=tuple(peer.members.met),
            peers_now=tuple(peer.members.members),
            participating=tuple(peer.members.others(TRAINING)),
            bytes_sent=peer.host.sent.total_bytes,
            bytes_received=peer.host.received.total_bytes,
            bandwidth_bytes_per_second=peer.bandwidth(),
            staleness_steps=sum(stale) / len(stale) if stale else 0.0,
            samples_per_second=history.samples_per_second,
            batches_left_out=replica.batches_left_out if replica else 0,
            samples_dropped=replica.samples_dropped if replica else 0.0,
            events=tuple(peer.log.recent),
            event_counts=dict(peer.log.counts),
            dropped=dict(peer.rounds.dropped),
        )
