"""What a host holds of one other peer: its connections, its open calls, and when it was last heard."""

from __future__ import annotations

import asyncio

from shoal.core.address import Endpoint
from shoal.core.clock import Clock
from shoal.core.errors import PeerLost, ProtocolError, RefusedError, RemoteError
from shoal.core.gauges import Allowance, RateGauge, Silence
from shoal.net.channel import Channel
from shoal.net.envelope import MAX_CODE, MAX_REASON, Answer, Fail

MESSAGES_PER_SECOND, MESSAGES_AT_ONCE = 1000.0, 5000.0
"""On links, from one peer."""
FIRST_PAUSE_SECONDS = 0.5
"""Between two signs of life on a new link."""
MAX_TELLING = 100
"""Messages without answer that wait until one peer takes them; further ones are lost."""


class Remote:
    """Bytes of any kind, on any connection, are a sign of life; `bulk` hears those on streams alone."""

    def __init__(self, peer_id: str, clock: Clock) -> None:
        self.peer_id = peer_id
        self._clock = clock
        self.endpoints: tuple[Endpoint, ...] = ()
        self.links: list[Channel] = []
        self.idle_streams: list[tuple[float, Channel]] = []
        self.streams: dict[Channel, None] = {}
        self.connections = 0
        self.is_one_way = False  # it has dialled us, but could not be dialled
        self.calls_running = self.telling = 0
        self.answering = asyncio.Lock()
        self.our_pause_seconds = self.its_pause_seconds = FIRST_PAUSE_SECONDS
        self._messages = Allowance(MESSAGES_AT_ONCE, MESSAGES_PER_SECOND, clock.now())
        self.last_sent = self.used_at = clock.now()
        self.life, self.bulk = Silence(clock.now()), Silence(clock.now())
        self.pending: dict[int, asyncio.Future[Answer]] = {}

    def hear(self, channel: Channel, sent_gauge: RateGauge, received_gauge: RateGauge, *, bulk: bool) -> None:
        """Count what passes on this connection from now on. Only bulk says how fast the line is."""
        measured = bulk and not channel.measure(sent_gauge, received_gauge)

        def traffic(sent: int, received: int) -> None:
            now = self._clock.now()
            if received:
                self.life.heard(now)
                if bulk:
                    self.bulk.heard(now)
                received_gauge.count(received)
                if measured:
                    received_gauge.add(received, now)
            if sent:
                self.last_sent = now
                sent_gauge.count(sent)
                if measured:
                    sent_gauge.add(sent, now)

        self.life.heard(self._clock.now())
        channel.on_traffic = traffic

    def use(self) -> None:
        """A call or a stream needs this peer: signs of life and news alone do not."""
        self.used_at = self._clock.now()

    @property
    def is_busy(self) -> bool:
        """Whether a call or a stream is under way."""
        return bool(self.pending or self.streams or self.calls_running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost when it is forgotten."""
        return not (self.is_busy or self.connections or self.links or self.idle_streams)

    def count_message(self) -> None:
        """A message came on a link. Raises ProtocolError where they are too many."""
        if not self._messages.take(self._clock.now()):
            raise ProtocolError(f"more than {MESSAGES_PER_SECOND:g} messages a second")

    def take_answer(self, frame: Answer | Fail) -> None:
        """Give it to whoever still waits for it."""
        future = self.pending.get(frame.id)
        if future is None or future.done():
            return
        if isinstance(frame, Answer):
            future.set_result(frame)
        else:
            future.set_exception(RefusedError(frame.reason[:MAX_REASON], frame.code[:MAX_CODE]))

    async def post_later(self, header: bytes) -> None:
        """Send what wants no answer, once its link can take it. Where that breaks, its reader learns of it."""
        self.telling += 1
        try:
            await self.links[-1].send(header)
        except RemoteError:
            pass  # nobody waits for it
        finally:
            self.telling -= 1

    def close(self, reason: str) -> None:
        """End every connection with it; whoever waits for an answer, or on a stream, learns of it now."""
        for link in self.links:
            link.close()
        for _, idle in self.idle_streams:
            idle.close()
        for stream in list(self.streams):
            stream.abort()
        self.links, self.idle_streams = [], []
        for future in self.pending.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self.peer_id[:8]}: {reason}"))
