"""Signs of life between hosts, and what a host does when they fail to come."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RemoteError
from shoal.net.envelope import Ping, encode

if TYPE_CHECKING:
    from shoal.net.host import Host

HEARTBEAT_SECONDS, SILENT_SECONDS, SHORTEST_PAUSE_SECONDS = 0.5, 3.0, 0.02
IDLE_STREAM_SECONDS = 30.0


async def heartbeat(host: Host) -> None:
    """Send signs of life, and notice whoever sends none. Our own stall is no silence of theirs."""
    while True:
        woke_at = host.clock.now()
        silent_at = min((r.life.last_heard + SILENT_SECONDS for r in host.remotes.values() if r.links), default=inf)
        await host.clock.sleep(min(HEARTBEAT_SECONDS, max(SHORTEST_PAUSE_SECONDS, silent_at - woke_at)))
        now = host.clock.now()
        stalled = now - woke_at > 2 * HEARTBEAT_SECONDS
        for remote in list(host.remotes.values()):
            if not remote.links:
                continue
            if stalled:
                remote.life.excuse(now)
            if now - remote.life.last_heard >= SILENT_SECONDS:
                for link in list(remote.links):
                    link.abort()
                reason = host.silent[remote.peer_id] = f"silent for {now - remote.life.last_heard:.1f} s"
                host.unlink(remote, reason, polite=False)
            elif now - remote.last_sent > HEARTBEAT_SECONDS:
                host.spawn(quietly(remote.links[-1].send(encode(Ping()))), "ping")
                remote.last_sent = now
            fresh = [(since, stream) for since, stream in remote.idle_streams if now - since < IDLE_STREAM_SECONDS]
            for entry in remote.idle_streams:
                if entry not in fresh:
                    entry[1].close()
            remote.idle_streams = fresh


async def quietly(sending: Coroutine[Any, Any, None]) -> None:
    """A message whose loss is noticed elsewhere: the reader of the same connection learns that it broke."""
    with contextlib.suppress(RemoteError):
        await sending
