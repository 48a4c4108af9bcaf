"""Strikes a process of a test at a named moment of its next averaging, from within: a signal to its own thread.

It wraps methods of the library, counts, and at the `count`-th event writes one JSON line and sends the signal; the
thread that runs the protocol does not get one instruction further. The line tells when it was, and what was out:

    {"struck": moment, "at": time.monotonic(), "share": [[start, stop], ...], "out": [[start, stop], ...]}

`share`: the parts that this member reduces, empty before the round; `out`: those of which it began to send the mean.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from swarm_process import reply

from shoal.net import serving
from shoal.net.envelope import Ask
from shoal.net.host import Host
from shoal.net.stream import Stream
from shoal.net.tcp import TcpChannel
from shoal.protocols import agreement
from shoal.protocols.roll import RollBook
from shoal.protocols.round_record import Given, PartMeanSent, PartSent
from shoal.protocols.round_state import Round
from shoal.protocols.rounds import Rounds

COLLECTING, CALLED = "roll, as its collector", "roll, as a caller"
HANDED_OUT = "roll, handed out to some"
PART_SENT, SHARE_HALF_REDUCED = "k-th part sent", "own share half reduced"
RESULTS_HALF_SENT, CLOSING = "half its results sent", "closing exchange"


class Strike:
    """One signal at one moment. `count`: at which of its events; None is half of all."""

    def __init__(self, moment: str, signal_number: int, count: int | None) -> None:
        self.moment, self.signal_number, self.count = moment, signal_number, count
        self.events = 0
        self.callers: dict[str, None] = {}
        self.round: Round | None = None
        self.out: dict[int, None] = {}
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._wrap(Rounds, "open", self._open)
        self._wrap(Stream, "send", self._send)
        {
            COLLECTING: lambda: self._wrap(RollBook, "_collect", self._collect),
            CALLED: lambda: self._wrap(TcpChannel, "send", self._send_frame),
            PART_SENT: lambda: None,
            SHARE_HALF_REDUCED: lambda: self._wrap(Round, "hold", self._hold),
            RESULTS_HALF_SENT: lambda: None,
            HANDED_OUT: lambda: self._wrap(serving, "_answer_call", self._answer_call),
            CLOSING: self._wrap_closing,
        }[moment]()

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._wrapped.append((owner, name, original))
        setattr(owner, name, lambda *args, **options: wrapper(original, *args, **options))

    def lift(self) -> None:
        """Take the wrapping away."""
        while self._wrapped:
            setattr(*self._wrapped.pop())

    def event(self, limit: int) -> None:
        self.events += 1
        if self.events == limit:
            share = self.round.owned_by(self.round.me) if self.round else []
            reply(struck=self.moment, at=time.monotonic(), share=self._spans(share), out=self._spans(self.out))
            signal.pthread_kill(threading.get_ident(), self.signal_number)

    def _spans(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        parts = self.round.parts if self.round else []
        return [(parts[index].start, parts[index].stop) for index in indices]

    # -- what is counted

    def _open(self, original: Any, rounds: Rounds, round_: Round, *rest: Any) -> None:
        self.round = round_
        original(rounds, round_, *rest)

    async def _send(self, original: Any, stream: Stream, message: Any, payload: Any = b"") -> None:
        mean = message if isinstance(message, PartMeanSent) else getattr(message, "mean", None)
        if isinstance(message, PartMeanSent | Given) and mean is not None:
            self.out[mean.index] = None
        await original(stream, message, payload)
        if self.moment == PART_SENT and isinstance(message, PartSent):
            self.event(self.count or 1)
        if self.moment == RESULTS_HALF_SENT and isinstance(message, PartMeanSent) and self.round:
            share, others = self.round.owned_by(self.round.me), len(self.round.group.members) - 1
            self.event(self.count or (len(share) * others + 1) // 2)

    def _hold(self, original: Any, round_: Round, index: int, *rest: Any, **options: Any) -> None:
        original(round_, index, *rest, **options)
        if round_.owners[index] == round_.me:
            self.event(self.count or (len(round_.owned_by(round_.me)) + 1) // 2)

    async def _collect(self, original: Any, rolls: RollBook, caller: str, *rest: Any) -> Any:
        """The victim's own call is one of them: whoever is stopped before it called has not been cut off."""
        self.callers[caller] = None
        if not self.events and rolls._host.peer_id in self.callers and len(self.callers) >= (self.count or 2):
            self.event(1)
        return await original(rolls, caller, *rest)

    async def _send_frame(self, original: Any, channel: TcpChannel, header: bytes, payload: Any = b"") -> None:
        await original(channel, header, payload)
        if b"Here" in header:
            self.event(1)

    def _wrap_closing(self) -> None:
        """Count None: as it enters the first exchange; k: once it has given its list to the k-th that asked."""
        if self.count is None:
            self._wrap(agreement, "_gather_lists", self._gather_lists)
        else:
            self._wrap(serving, "_answer_call", self._answer_call)

    async def _gather_lists(self, original: Any, *args: Any) -> Any:
        self.event(1)
        return await original(*args)

    async def _answer_call(self, original: Any, host: Host, remote: Any, channel: Any, ask: Ask) -> None:
        await original(host, remote, channel, ask)
        if ask.name == ("AskVersions" if self.moment == CLOSING else "Here"):
            self.event(self.count or 1)
