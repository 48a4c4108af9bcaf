"""What a host holds of one other peer: its connections, its open calls, and when it was last heard."""

from __future__ import annotations

import asyncio

from shoal.core.address import Endpoint
from shoal.core.clock import Clock
from shoal.core.errors import PeerLost
from shoal.core.gauges import RateGauge, Silence
from shoal.net.channel import Channel
from shoal.net.envelope import Answer


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
        self.calls_running = 0
        self.last_sent = self.used_at = clock.now()
        self.life, self.bulk = Silence(clock.now()), Silence(clock.now())
        self.pending: dict[int, asyncio.Future[Answer]] = {}

    def hear(self, channel: Channel, sent_gauge: RateGauge, received_gauge: RateGauge, *, bulk: bool) -> None:
        """Count what passes on this connection from now on."""

        def traffic(sent: int, received: int) -> None:
            now = self._clock.now()
            if received:
                self.life.heard(now)
                if bulk:
                    self.bulk.heard(now)
                received_gauge.add(received, now)
            if sent:
                self.last_sent = now
                sent_gauge.add(sent, now)

        self.life.heard(self._clock.now())
        channel.on_traffic = traffic

    def use(self) -> None:
        """A call or a stream needs this peer: signs of life and news alone do not."""
        self.used_at = self._clock.now()

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
