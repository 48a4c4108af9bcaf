"""A door that strangers cannot force: real sockets, two honest processes that average all the while.

The full figures are those of tests/acceptance/test_siege.py; this is the same with few of everything.
"""

from __future__ import annotations

import asyncio
import gc
import os
from asyncio import sslproto

import pytest
from siege import Siege
from siege_run import besieged, check

from shoal.core.address import Address, Endpoint
from shoal.core.errors import PeerLost
from shoal.net.channel import Channel
from shoal.net.identity import Identity
from shoal.net.tcp import TcpTransport

pytestmark = pytest.mark.timeout(120)


def test_honest_averaging_goes_on_and_nothing_breaks(tmp_path):
    outcome = besieged(
        tmp_path,
        stranger_frames=100,
        peer_frames=150,
        held=100,
        hold_seconds=0.5,
        flood=4000,
        window_seconds=1.0,
        seed=1,
    )
    check(outcome)


@pytest.mark.parametrize("how", ["stranger_frames", "a peer's end"])
def test_a_connection_that_ended_is_freed_at_once(how):
    """Each holds 0.3 MB of TLS buffers: in a cycle of references they would stay until the collector comes."""

    async def main() -> None:
        listener = TcpTransport(Identity(os.urandom(32)))
        accepted: asyncio.Queue[Channel] = asyncio.Queue()

        async def admit(channel: Channel) -> None:
            try:
                await channel.secure()
                if how == "stranger_frames":
                    await channel.receive()
                accepted.put_nowait(channel)
            except Exception:
                channel.abort()

        tasks = set()
        endpoints = await listener.start(
            Endpoint("127.0.0.1", 0), lambda channel: tasks.add(asyncio.create_task(admit(channel)))
        )
        dialler = TcpTransport(Identity(os.urandom(32)))
        siege = Siege(Address("a" * 32, tuple(endpoints)), "run", "a-secret", 1)
        for _ in range(20):
            if how == "stranger_frames":
                await siege.abreast(1, siege.stranger_frames)
                while not accepted.empty():
                    accepted.get_nowait().abort()
                continue
            near = await dialler.dial(endpoints[0])
            far = await accepted.get()
            ends = (near, far) if how == "a peer's end" else (far, near)
            ends[0].abort()
            with pytest.raises(PeerLost):
                await ends[1].receive()
            ends[1].close()
            del near, far, ends
        await asyncio.sleep(0.2)
        while not accepted.empty():
            accepted.get_nowait().abort()
        await siege.close()
        await listener.close()
        tasks.clear()
        await asyncio.sleep(1.2)  # TLS says goodbye for a second at most
        assert sum(isinstance(one, sslproto.SSLProtocol) for one in gc.get_objects()) == 0

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
