"""An access line of a host in the fluid network: its rate, its queue of packets, and the accounts of both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shoal.core.errors import OptionError
from shoal.core.gauges import RateGauge

if TYPE_CHECKING:
    from shoal.net.flows import Flows, Pipe

YIELD_SECONDS = 0.25
"""Within so much time bulk gives back what packets took of its line."""
NEGLIGIBLE = 0.01
"""The share of a line, and of a rate's change, that is not worth new rates."""
LEAST_BULK = 1 / 16
"""What bulk keeps of a line however many packets there are."""


class Line:
    """One direction of a host's access line, with the accounts that a checker of capacity needs.

    At any moment `carried_bytes <= possible_bytes + waiting_bytes`.
    """

    __slots__ = (
        "_free_at",
        "_network",
        "_possible_bytes",
        "_rate",
        "_settled_at",
        "_unmeasured_bytes",
        "_waiting_bytes",
        "bulk_rate",
        "carried_bytes",
        "crowd",
        "gauge",
        "has_yielded",
        "index",
        "mark",
        "measured_rate",
        "pipes",
    )

    def __init__(self, network: Flows, bytes_per_second: float) -> None:
        self._network, self._rate = network, _checked(bytes_per_second)
        self.pipes: dict[Pipe, None] = {}
        self.bulk_rate = 0.0  # of its flows, in sum
        self.has_yielded = False  # they have less than the line, for packets' sake
        self.crowd = 0  # how many flows share something with it, directly or through others
        self.carried_bytes = 0
        self.gauge: RateGauge | None = None
        self.measured_rate = 0.0  # of the flows that it is to hear of
        self._unmeasured_bytes = 0.0  # that it has not heard of
        self.mark = self.index = 0  # of the search for what is connected
        self._free_at = self._possible_bytes = self._waiting_bytes = 0.0
        self._settled_at = network.now()

    @property
    def bytes_per_second(self) -> float:
        """May be set while transfers run, and acts at once."""
        return self._rate

    @bytes_per_second.setter
    def bytes_per_second(self, rate: float) -> None:
        before, now = self._rate, self._network.now()
        self.settle(now)
        self._rate = _checked(rate)
        if self._free_at > now:
            self._free_at = now + (self._free_at - now) * before / rate
        if self.pipes:
            self._network.change(self, at_once=True)

    @property
    def possible_bytes(self) -> float:
        """What it could have carried up to now."""
        self.settle(self._network.now())
        return self._possible_bytes

    @property
    def waiting_bytes(self) -> float:
        """Packets' bytes that are on their way though bulk had the line."""
        self.settle(self._network.now())
        return self._waiting_bytes

    def settle(self, now: float) -> None:
        """Bring the accounts up to date."""
        if (elapsed := now - self._settled_at) > 0:
            self._settled_at = now
            self._possible_bytes += self._rate * elapsed
            self._unmeasured_bytes += self.measured_rate * elapsed
            if self._waiting_bytes:
                self._waiting_bytes = max(0.0, self._waiting_bytes - (self._rate - self.bulk_rate) * elapsed)

    def measure(self, now: float) -> None:
        """Tell the gauge what has passed since it was told last."""
        self.settle(now)
        count_bytes = int(self._unmeasured_bytes)
        self._unmeasured_bytes -= count_bytes
        if self.gauge is not None and count_bytes:
            self.gauge.add(count_bytes, now)

    def book(self, now: float, count_bytes: int) -> float:
        """Send a packet behind the packets before it; returns when its last byte is through."""
        self.settle(now)
        self._waiting_bytes += count_bytes
        self.carried_bytes += count_bytes
        self._free_at = max(now, self._free_at) + count_bytes / self._rate
        return self._free_at

    def should_yield(self) -> bool:
        """Whether packets took more of this line than its flows gave back, or it is time to give them back theirs."""
        return self.has_yielded or self._waiting_bytes > NEGLIGIBLE * YIELD_SECONDS * self._rate

    def left_for_bulk(self, now: float) -> float:
        """The rate for its flows from now on."""
        self.settle(now)
        self.has_yielded = self._waiting_bytes > NEGLIGIBLE * YIELD_SECONDS * self._rate
        if not self.has_yielded:
            return self._rate
        return max(self._rate - self._waiting_bytes / YIELD_SECONDS, LEAST_BULK * self._rate)


def _checked(bytes_per_second: float) -> float:
    if not 0 < bytes_per_second < math.inf:
        raise OptionError("bytes_per_second", bytes_per_second, "above 0 and finite")
    return bytes_per_second
