"""A peer's place in a run on this machine: identity, port, entry, and what is remembered for the next start.

Needs no torch: `shoal seed` is a presence and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

from shoal.core.address import Address, make_secret
from shoal.core.clock import Clock
from shoal.core.errors import OptionError
from shoal.core.events import Event, EventLog
from shoal.net.host import Host
from shoal.net.identity import KEY_BYTES, Identity, identity_file, write_private
from shoal.net.tcp import TcpTransport
from shoal.overlay.charter import Options
from shoal.overlay.joining import enter
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.training.announce import alone_seconds, invitation, say
from shoal.training.settings import Settings
from shoal.training.state_folder import RunFolder

SECRET_BYTES = 16
SHOWN = ("advice", "yielded")
SHOWN_LIVE = ("joined", "left", "lost", "refused", "downloaded", "failed", "behind", "diverged", "repaired")
"""Events that a person at the terminal of `shoal run` sees as they happen; the others are in the report."""


class Presence:
    """Lives on a running event loop from `live()` until `stop` is set; host, members, register exist then."""

    host: Host
    members: Membership
    register: Register

    def __init__(
        self, settings: Settings, role: str, strategy: Options | None, on_event: Callable[[Event], None] | None
    ) -> None:
        self.settings = settings
        self._role, self._strategy, self._on_event = role, strategy, on_event or (lambda event: None)
        self._folder = RunFolder(settings.run)
        self._secret = self._choose_secret()
        self.stop = asyncio.Event()

    def _choose_secret(self) -> str:
        """The given secret, the address's, the remembered one of a run that this machine founded, or a new one."""
        if self.settings.secret is not None:
            return self.settings.secret
        if self.settings.peers:
            raise OptionError(
                "secret", None, "given (secret=, --secret, SHOAL_SECRET): the address does not contain it"
            )
        return self._folder.read().secret or make_secret(os.urandom(SECRET_BYTES), self.settings.run)

    @property
    def address(self) -> str:
        """The address others join by; a secret that was given is not part of it."""
        secret = None if self.settings.secret_was_given else self._secret
        return str(Address(self.host.peer_id, self.host.endpoints, secret))

    async def live(self, prepare: Callable[[], None], entered: Callable[[], None]) -> None:
        """Listen, enter the run, stay, and say goodbye. `prepare` may serve more calls before the first peer comes.

        Raises what `enter` raises, OptionError where the place to listen is taken, IdentityInUse.
        """
        with contextlib.ExitStack() as stack:
            file = self.settings.identity
            identity = stack.enter_context(identity_file(file)) if file else Identity(os.urandom(KEY_BYTES))
            clock = Clock()
            self.log = EventLog(clock.now, self._tell)
            asyncio.get_running_loop().set_exception_handler(self._asyncio_complains)
            self.host = Host(
                identity, TcpTransport(identity), run=self.settings.run, secret=self._secret,
                clock=clock, random=random.SystemRandom(), log=self.log,
            )  # fmt: skip
            async with self.host:
                self.members = Membership(self.host, role=self._role, strategy=self._strategy)
                self.register = Register(self.members)
                prepare()
                await self._listen()
                self.members.start()
                self.host.spawn(self.register.keep(), "register")
                named, here = self.settings.peers, set(self.host.endpoints)
                remembered = [known for known in self._folder.addresses() if not here.issuperset(known.endpoints)]
                await enter(self.members, self.settings.run, named, remembered, self.settings.join_timeout_seconds)
                self._tell_launcher()
                self.host.spawn(self._keep_remembering(), "remember peers")
                entered()
                await self.stop.wait()
                await self.host.goodbye("it left")

    def _asyncio_complains(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.log.add("fault", f"asyncio: {context.get('exception') or context.get('message')!r}")

    def _tell(self, event: Event) -> None:
        if event.kind in SHOWN or (event.kind in SHOWN_LIVE and os.environ.get("SHOAL_ANNOUNCE")):
            say(f"{event.kind} {event.peer_id[:8]}: {event.reason}".replace(" :", ":"))
        self._on_event(event)

    async def _listen(self) -> None:
        candidates = self.settings.listen_candidates(self._folder.read().port)
        for candidate in candidates[:-1]:
            try:
                return await self.host.start(candidate)
            except OptionError:
                continue  # taken: the next one
        return await self.host.start(candidates[-1])

    def _tell_launcher(self) -> None:
        """What `shoal run` and `shoal seed` asked for through the environment."""
        if command := os.environ.get("SHOAL_ANNOUNCE"):
            self.host.spawn(self._announce(command), "announce")
        if path := os.environ.get("SHOAL_ADDRESS_FILE"):
            write_private(Path(path), self.address.encode())

    async def _announce(self, command: str) -> None:
        for line in invitation(self.address, command, self.settings.run):
            say(line)
        await self.host.clock.sleep(alone_seconds())
        if not self.members.met:
            places = ", ".join(map(str, self.host.endpoints))
            say(f"nobody has connected yet to {places}, after {alone_seconds():g} s. Does a firewall close this port?")

    async def _keep_remembering(self) -> None:
        """At once whenever somebody comes: this peer may be killed the next moment, and must find them again."""
        changed = asyncio.Event()
        self.members.on_change.append(changed.set)
        written: dict[str, list[str]] | None = None
        while True:
            changed.clear()
            peers = {record.peer_id: record.endpoints for record in self.members.members.values()}
            peers[self.members.me.peer_id] = self.members.me.endpoints  # another process of this machine finds us
            if peers != written:
                self._folder.remember(self._secret, self.host.endpoints[0].port, peers)
                written = peers
            await changed.wait()
