"""Signs of life between hosts, and what a host does when they fail to come.

A host with many links sends them more rarely, or they would be most of its traffic; each says when the next one comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RemoteError
from shoal.net.envelope import MAX_PAUSE_SECONDS, Ping, encode
from shoal.net.remote import FIRST_PAUSE_SECONDS

if TYPE_CHECKING:
    from shoal.net.host import Host

SHORTEST_PAUSE_SECONDS = 0.02
SILENT_PAUSES = 6.0
"""A peer is lost when nothing came from it for so many of its own pauses: 3 s where it has few links."""
LINKS_AT_FULL_PACE = 16
IDLE_STREAM_SECONDS = 30.0


def pace(links: int) -> float:
    """How many times more rarely a peer with so many links tells each of them what is not urgent."""
    return max(1.0, links / LINKS_AT_FULL_PACE)


async def heartbeat(host: Host) -> None:
    """Send signs of life, and notice whoever sends none. Our own stall is no silence of theirs."""
    while True:
        woke_at = host.clock.now()
        linked = [remote for remote in host.remotes.values() if remote.links]
        silent_at = min((r.life.last_heard + SILENT_PAUSES * r.its_pause_seconds for r in linked), default=inf)
        await host.clock.sleep(min(FIRST_PAUSE_SECONDS, max(SHORTEST_PAUSE_SECONDS, silent_at - woke_at)))
        now = host.clock.now()
        stalled = now - woke_at > 2 * FIRST_PAUSE_SECONDS
        linked = [remote for remote in host.remotes.values() if remote.links]
        pause_seconds = min(FIRST_PAUSE_SECONDS * pace(len(linked)), MAX_PAUSE_SECONDS)
        for remote in linked:
            if stalled:
                remote.life.excuse(now)
            if now - remote.life.last_heard >= SILENT_PAUSES * remote.its_pause_seconds:
                for link in list(remote.links):
                    link.abort()
                reason = host.silent[remote.peer_id] = f"silent for {now - remote.life.last_heard:.1f} s"
                host.unlink(remote, reason, polite=False)
            elif now - remote.last_sent > remote.our_pause_seconds:
                remote.our_pause_seconds = pause_seconds
                host.post(remote, encode(Ping(pause_seconds)))
                remote.last_sent = now
            while remote.idle_streams and now - remote.idle_streams[0][0] >= IDLE_STREAM_SECONDS:
                remote.idle_streams.pop(0)[1].close()


async def quietly(sending: Coroutine[Any, Any, None]) -> None:
    """A message whose loss is noticed elsewhere: the reader of the same connection learns that it broke."""
    with contextlib.suppress(RemoteError):
        await sending
