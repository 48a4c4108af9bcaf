"""The door of a host: how a connection becomes an authenticated one, on the dialling and on the listening side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from shoal.core.address import Endpoint
from shoal.core.clock import Random
from shoal.core.errors import PeerLost, ProtocolError, RefusedError, RemoteError
from shoal.core.events import EventLog
from shoal.net.channel import Channel, Transport
from shoal.net.handshake import NONCE_BYTES, answer, greet, run_key
from shoal.net.identity import Identity

HANDSHAKE_SECONDS = 5.0
DIAL_SECONDS = 5.0
MAX_STRANGERS = 2048
"""Connections that may stand in the door at once; more are closed unread, and whoever opened one counts as lost there.

All members of a group open a link and a stream in the same moment, and a group may have 1024."""


class Door:
    """Dials and admits for one identity and one run."""

    def __init__(
        self, identity: Identity, transport: Transport, *, run: str, secret: str, random: Random, log: EventLog
    ) -> None:
        self._identity, self._transport, self._random, self._log = identity, transport, random, log
        self._run, self._secret = run, secret
        self._strangers = 0

    async def open(self, listen: Endpoint, accept: Callable[[Channel], None]) -> list[Endpoint]:
        """Start to listen; returns where others can dial."""
        self._key = run_key(self._run, self._secret)
        return await self._transport.start(listen, accept)

    async def dial(self, endpoints: Iterable[Endpoint], expected: str | None, purpose: str) -> tuple[Channel, str]:
        """A channel to the first endpoint that answers as the expected peer, and its peer id.

        Raises RefusedError or ProtocolError when somebody answered and the two do not fit, else PeerLost.
        """
        places = tuple(endpoints)
        problem: RemoteError = PeerLost("no endpoint is known")
        for endpoint in places:
            try:
                async with asyncio.timeout(DIAL_SECONDS / len(places)):
                    channel = await self._transport.dial(endpoint)
            except TimeoutError:
                problem = PeerLost(f"{endpoint}: no answer within {DIAL_SECONDS / len(places):.1f} s")
                continue
            except PeerLost as error:
                problem = PeerLost(f"{endpoint}: {error}")
                continue
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    nonce = self._random.randbytes(NONCE_BYTES)
                    return channel, await greet(channel, self._identity, self._key, nonce, expected, purpose)
            except TimeoutError:
                problem = PeerLost(f"{endpoint} went silent in the handshake")
                channel.abort()
            except RemoteError as error:
                problem = error
                channel.close()
            except BaseException:
                channel.abort()
                raise
        raise problem

    async def admit(self, channel: Channel) -> tuple[str, str] | None:
        """Who came, and what for (link or stream); None when it was turned away, with an event that says why."""
        if self._strangers >= MAX_STRANGERS:
            channel.abort()
            return None
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await answer(channel, self._identity, self._key, self._random.randbytes(NONCE_BYTES))
        except TimeoutError:
            self._log.add("refused", f"{channel.remote} went silent in the handshake")
            channel.abort()
        except PeerLost:
            channel.abort()  # a port scan, or a connection that broke: nobody to refuse
        except (RefusedError, ProtocolError) as error:
            self._log.add("refused", f"{channel.remote}: {error}")
            channel.close()
        except BaseException:
            channel.abort()
            raise
        finally:
            self._strangers -= 1
        return None

    async def close(self) -> None:
        """Stop listening and close every channel."""
        await self._transport.close()
