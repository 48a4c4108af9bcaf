"""What a host holds of one other peer: its connections, its open calls, and when it was last heard."""

from __future__ import annotations

import asyncio

from shoal.core.address import Endpoint
from shoal.core.clock import Clock
from shoal.core.gauges import RateGauge, Silence
from shoal.net.channel import Channel
from shoal.net.envelope import Answer


class Remote:
    """Bytes of any kind, on any connection, are a sign of life."""

    def __init__(self, peer_id: str, clock: Clock) -> None:
        self.peer_id = peer_id
        self._clock = clock
        self.endpoints: tuple[Endpoint, ...] = ()
        self.links: list[Channel] = []
        self.idle_streams: list[tuple[float, Channel]] = []
        self.connections = 0
        self.calls_running = 0
        self.last_sent = clock.now()
        self.silence = Silence(clock.now())
        self.pending: dict[int, asyncio.Future[Answer]] = {}

    def hear(self, channel: Channel, sent_gauge: RateGauge, received_gauge: RateGauge) -> None:
        """Count what passes on this connection from now on."""

        def traffic(sent: int, received: int) -> None:
            now = self._clock.now()
            if received:
                self.silence.heard(now)
                received_gauge.add(received, now)
            if sent:
                self.last_sent = now
                sent_gauge.add(sent, now)

        self.silence.heard(self._clock.now())
        channel.on_traffic = traffic
