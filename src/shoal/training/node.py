"""A peer on this machine: the network thread, and what lives on it from join to leave."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.address import Address, Endpoint
from shoal.core.clock import Clock
from shoal.core.compute import ThreadCompute
from shoal.core.errors import LeftError, OptionError
from shoal.core.events import Event, EventLog
from shoal.net.host import Host
from shoal.net.identity import KEY_BYTES, Identity, identity_file, write_private
from shoal.net.tcp import TcpTransport
from shoal.overlay.charter import Options
from shoal.overlay.joining import enter
from shoal.overlay.membership import TRAINER, TRAINING, Membership
from shoal.protocols.peer import Peer
from shoal.training.announce import alone_seconds, invitation, say
from shoal.training.network_thread import NetworkThread
from shoal.training.report import Report
from shoal.training.settings import Settings
from shoal.training.state_folder import RunFolder
from shoal.training.thread_replica import ThreadReplica

Result = TypeVar("Result")
SECRET_BYTES = 16
LEAVE_SECONDS = 2.5
REMEMBER_SECONDS = 0.5


class Node:
    """Starts the network thread and enters the run; returns from its constructor when that is done, or raises."""

    peer: Peer

    def __init__(self, settings: Settings, strategy: Options | None, on_event: Callable[[Event], None] | None) -> None:
        self.settings = settings
        self._strategy, self._on_event = strategy, on_event
        self._folder = RunFolder(settings.run)
        self._secret = self._choose_secret()
        self._replica: ThreadReplica | None = None
        self._entered: Future[None] = Future()
        self._thread = NetworkThread(self._live(), f"shoal {settings.run}")
        try:
            self._entered.result()
        except BaseException:
            self.stop()
            raise

    def _choose_secret(self) -> str:
        """The given secret, the address's, the remembered one of a run that this machine founded, or a new one."""
        remembered = self._folder.read().secret
        if self.settings.secret is not None:
            return self.settings.secret
        if self.settings.peers:
            raise OptionError("secret", None, "given when the address does not contain it")
        return remembered or base64.b32encode(os.urandom(SECRET_BYTES)).decode().rstrip("=").lower()

    # -- on the network thread

    async def _live(self) -> None:
        self._stop = asyncio.Event()
        try:
            with contextlib.ExitStack() as stack:
                executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="shoal work"))
                identity = (
                    stack.enter_context(identity_file(self.settings.identity))
                    if self.settings.identity
                    else Identity(os.urandom(KEY_BYTES))
                )
                await self._live_as(identity, ThreadCompute(executor))
        except BaseException as error:  # told to whoever waits for the entry
            if self._entered.done():
                raise
            self._entered.set_exception(error)

    async def _live_as(self, identity: Identity, compute: ThreadCompute) -> None:
        clock = Clock()
        self._joined_at = time.monotonic()
        self.log = EventLog(clock.now, self._on_event)
        host = Host(
            identity, TcpTransport(identity), run=self.settings.run, secret=self._secret,
            clock=clock, random=random.SystemRandom(), log=self.log,
        )  # fmt: skip
        async with host:
            members = Membership(host, role=TRAINER, strategy=self._strategy)
            self.peer = Peer(host, members, compute)
            members.refresh = self._figures
            await self._listen(host)
            members.start()
            await enter(
                members, self.settings.run, self.settings.peers, self._folder.addresses(),
                self.settings.join_timeout_seconds,
            )  # fmt: skip
            host.spawn(self._keep_remembering(), "remember peers")
            if os.environ.get("SHOAL_ANNOUNCE"):
                host.spawn(self._announce(os.environ["SHOAL_ANNOUNCE"]), "announce")
            if os.environ.get("SHOAL_ADDRESS_FILE"):
                write_private(Path(os.environ["SHOAL_ADDRESS_FILE"]), self.address.encode())
            self._entered.set_result(None)
            await self._stop.wait()
            await host.goodbye("it left")

    async def _listen(self, host: Host) -> None:
        candidates = self.settings.listen_candidates(self._folder.read().port)
        for candidate in candidates[:-1]:
            try:
                return await host.start(candidate)
            except OptionError:
                continue  # taken: the next one
        return await host.start(candidates[-1])

    def _figures(self) -> dict[str, Any]:
        """What this peer's record says of its training, read when a status is sent."""
        figures: dict[str, Any] = {
            "averagings": self.peer.history.applied_count,
            "bandwidth": self.peer.bandwidth(),
        }
        if (replica := self._replica) is not None:
            figures |= {"steps": replica.steps, "step_seconds": replica.step_seconds, "progress": replica.progress}
        return figures

    async def _keep_remembering(self) -> None:
        changed = asyncio.Event()
        self.peer.members.on_change.append(changed.set)
        while True:
            changed.clear()
            peers = {r.peer_id: r.endpoints for r in self.peer.members.members.values()}
            port = self.peer.host.endpoints[0].port
            self._folder.remember(self._secret, port, peers)
            await self.peer.clock.sleep(REMEMBER_SECONDS)
            await changed.wait()

    async def _announce(self, command: str) -> None:
        for line in invitation(self.address, command):
            say(line)
        await self.peer.clock.sleep(alone_seconds())
        if not self.peer.members.met:
            say(f"nobody has connected yet, after {alone_seconds():g} s. Is a firewall closing the port?")

    async def hurry(self) -> None:
        """One more averaging, now, if there is anybody to average with; returns when it was applied or failed."""
        peer = self.peer
        seen = peer.history.applied_count, len(peer.history.failures)
        peer.hurry = True
        while peer.members.others(TRAINING) and seen == (peer.history.applied_count, len(peer.history.failures)):
            peer.stir.set()
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
        endpoints: tuple[Endpoint, ...] = self.peer.host.endpoints
        return str(Address(self.peer.id, endpoints, None if self.settings.secret_was_given else self._secret))

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the network thread."""
        if not self.alive:
            work.close()
            raise LeftError("the network thread of this swarm has ended")
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
        """Say goodbye and end the thread."""
        if self.alive:
            with contextlib.suppress(RuntimeError):  # the loop closed this very moment
                self.call_soon(self._stop.set)
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
            failures=tuple(history.failures),
            peers_met=tuple(peer.members.met),
            peers_now=tuple(peer.members.members),
            bytes_sent=peer.host.sent.total_bytes,
            bytes_received=peer.host.received.total_bytes,
            bandwidth_bytes_per_second=peer.bandwidth(),
            staleness_steps=sum(stale) / len(stale) if stale else 0.0,
            events=tuple(self.log.recent),
            event_counts=dict(self.log.counts),
        )
