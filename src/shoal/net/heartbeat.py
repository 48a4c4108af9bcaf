"""Signs of life between hosts, and what a host does when they fail to come.

A host with many links sends them more rarely, or they would be most of its traffic; each says when the next one comes.
Then news, which every peer tells all that it is linked with, come often enough to be the signs of life.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RemoteError
from shoal.net.envelope import Ping, encode
from shoal.net.remote import FIRST_PAUSE_SECONDS, Remote

if TYPE_CHECKING:
    from shoal.net.host import Host

SHORTEST_REST_SECONDS, LONGEST_REST_SECONDS = 0.02, 2.0
SILENT_SECONDS, SILENT_PAUSES = 3.0, 3.0
"""A peer is lost when nothing came from it for so long, and for so many of its own pauses."""
NEWS_SECONDS = 1.0
LINKS_AT_FULL_PACE, SLOWEST_PACE = 16, 8.0
IDLE_STREAM_SECONDS = 30.0


def news_seconds(links: int) -> float:
    """How often a peer with so many links tells each of them what is not urgent.

    With few each second; with more at most 16 of them in a second, with 64 and more 8 or 9.
    """
    return NEWS_SECONDS * min(SLOWEST_PACE, max(1.0, 2 * links / LINKS_AT_FULL_PACE - 1))


def pause_seconds(links: int) -> float:
    """Between two signs of life to each of so many: longer than between news where they are many."""
    return FIRST_PAUSE_SECONDS if links <= LINKS_AT_FULL_PACE else 1.25 * news_seconds(links)


async def heartbeat(host: Host) -> None:
    """Send signs of life, and notice whoever sends none. Our own stall is no silence of theirs."""
    earliest, pause = inf, FIRST_PAUSE_SECONDS
    while True:
        woke_at = host.clock.now()
        rest_seconds = min(max(pause / 4, FIRST_PAUSE_SECONDS), LONGEST_REST_SECONDS, earliest - woke_at)
        await host.clock.sleep(max(SHORTEST_REST_SECONDS, rest_seconds))
        now, earliest = host.clock.now(), inf
        stalled = now - woke_at > rest_seconds + FIRST_PAUSE_SECONDS
        linked = [remote for remote in host.remotes.values() if remote.links]
        pause = pause_seconds(len(linked))
        for remote in linked:
            if stalled:
                remote.life.excuse(now)
            lost_at = remote.life.last_heard + max(SILENT_SECONDS, SILENT_PAUSES * remote.its_pause_seconds)
            if now >= lost_at:
                _lose(host, remote, now)
                continue
            earliest = min(earliest, lost_at)
            if now - remote.last_sent > remote.our_pause_seconds or pause < remote.our_pause_seconds / 2:
                remote.our_pause_seconds = pause
                host.post(remote, encode(Ping(pause)))
                remote.last_sent = now
            while remote.idle_streams and now - remote.idle_streams[0][0] >= IDLE_STREAM_SECONDS:
                remote.idle_streams.pop(0)[1].close()


def _lose(host: Host, remote: Remote, now: float) -> None:
    for link in list(remote.links):
        link.abort()
    reason = host.silent[remote.peer_id] = f"silent for {now - remote.life.last_heard:.1f} s"
    host.unlink(remote, reason, polite=False)


async def quietly(sending: Coroutine[Any, Any, None]) -> None:
    """A message whose loss is noticed elsewhere: the reader of the same connection learns that it broke."""
    with contextlib.suppress(RemoteError):
        await sending
