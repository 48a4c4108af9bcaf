"""A peer: what strategies are given. They touch neither clock, randomness, sockets nor threads but through it."""

from __future__ import annotations

import asyncio

from shoal.core.clock import Clock, Random
from shoal.core.compute import Compute
from shoal.core.events import EventLog
from shoal.net.host import Host
from shoal.overlay.membership import Membership
from shoal.overlay.register import Register
from shoal.protocols.download import Donor
from shoal.protocols.history import History
from shoal.protocols.mean_gradients import MeanGradients
from shoal.protocols.meeting import Meetings
from shoal.protocols.roll import RollBook
from shoal.protocols.rounds import Rounds


class Peer:
    """One member of a run, in the world or on the wire.

    `stir` is set whenever something happened that may make an averaging due. `leaving` asks the strategy for one last
    averaging, at once, and then to end.
    """

    def __init__(self, host: Host, members: Membership, register: Register, compute: Compute) -> None:
        self.id = host.peer_id
        self.host, self.members, self.compute = host, members, compute
        self.clock: Clock = host.clock
        self.random: Random = host.random
        self.log: EventLog = host.log
        self.register = register
        self.rolls = RollBook(host, members, register)
        self.meetings = Meetings(host, members, register)
        self.rounds = Rounds(host)
        self.donor = Donor(host, members, compute)
        self.mean_gradients = MeanGradients(host, members)
        self.history = History(host.log)
        self.stir = asyncio.Event()
        self.leaving = False
        members.on_change.append(self.stir.set)
        self.rolls.on_invite.append(self.stir.set)
        self.meetings.on_start.append(self.stir.set)

    def bandwidth(self) -> float | None:
        """Bytes per second of this peer's slower direction, as measured; None before there is a measurement."""
        rates = self.host.sent.bytes_per_second(), self.host.received.bytes_per_second()
        return None if None in rates else min(rate for rate in rates if rate is not None)
