"""The door of a host: how a connection becomes an authenticated one, on the dialling and on the listening side.

Who stands before it costs little: few handshakes at once (see planning/crowd.py), small frames, 5 s. An address whose
handshakes fail again and again is turned away unread for a moment; a peer that broke the protocol is refused longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from shoal.core.address import Endpoint
from shoal.core.clock import Random
from shoal.core.errors import PeerLost, ProtocolError, RefusedError, RemoteError
from shoal.core.events import REFUSED, EventLog
from shoal.core.gauges import Allowance
from shoal.net.channel import Channel, Transport
from shoal.net.handshake import CREDENTIALS, NONCE_BYTES, PENALTY, answer, greet, run_key
from shoal.net.identity import Identity
from shoal.planning.crowd import Crowd, Step
from shoal.planning.penalties import Penalties

HANDSHAKE_SECONDS, PARTING_SECONDS = 5.0, 0.5
DIAL_SECONDS = 5.0
FAILURES_AT_ONCE, FAILURES_PER_SECOND, MAX_ADDRESSES = 20, 1.0, 1000
"""Handshakes of one address that may fail. Never counted on this machine itself, where all peers share one address."""
NEAR = ("127.", "::1")


class Door:
    """Dials and admits for one identity and one run."""

    def __init__(
        self, identity: Identity, transport: Transport, *, run: str, secret: str, random: Random, log: EventLog
    ) -> None:
        self._identity, self._transport, self._random, self._log = identity, transport, random, log
        self._run, self._secret = run, secret
        self._crowd: Crowd[Channel] = Crowd(transport.max_waiting)
        self._turns: dict[Channel, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._failures: dict[str, Allowance] = {}
        self._penalties = Penalties()

    async def open(self, listen: Endpoint, accept: Callable[[Channel], None]) -> list[Endpoint]:
        """Start to listen; returns where others can dial."""
        self._key = run_key(self._run, self._secret)
        return await self._transport.start(listen, accept)

    async def dial(self, endpoints: Iterable[Endpoint], expected: str | None, purpose: str) -> tuple[Channel, str]:
        """A channel to the first endpoint that answers as the expected peer, and its peer id.

        Raises RefusedError or ProtocolError when somebody answered and the two do not fit, else PeerLost.
        """
        if expected and (penalty := self.penalty_of(expected)):
            raise RefusedError(penalty, PENALTY)
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
                    peer_id = await greet(channel, self._identity, self._key, nonce, expected, purpose)
                    if penalty := self.penalty_of(peer_id):
                        raise RefusedError(penalty, PENALTY)
                    return channel, peer_id
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
        turn = self._turns[channel] = asyncio.get_running_loop().create_future()
        try:
            self._check_failures(channel.address)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                self._take(self._crowd.arrive(channel, channel.address, self._now()))
                await turn
                await channel.secure()
                nonce = self._random.randbytes(NONCE_BYTES)
                return await answer(channel, self._identity, self._key, nonce, self.penalty_of)
        except TimeoutError:
            self._refused(channel, "went silent in the handshake", counts=True)
            channel.abort()
        except PeerLost:
            channel.abort()  # a port scan, or a connection that broke: nobody to refuse
        except (RefusedError, ProtocolError) as error:
            strange = isinstance(error, ProtocolError) or error.code == CREDENTIALS
            self._refused(channel, str(error), counts=strange)
            await _let_read(channel)
            channel.abort()
        except BaseException:
            channel.abort()
            raise
        finally:
            del self._turns[channel]
            self._take(self._crowd.gone(channel, channel.address, self._now()))
        return None

    def _take(self, step: Step[Channel]) -> None:
        """Let in and send away, and look again when it is time."""
        for channel in step.enter:
            if not self._turns[channel].done():
                self._turns[channel].set_result(None)
        for channel in step.leave:
            self._log.add(REFUSED, f"{channel.remote}: too many connections stand in the door")
            if not self._turns[channel].done():
                self._turns[channel].set_exception(PeerLost("sent away"))
            channel.abort()
        if self._timer is not None:
            self._timer.cancel()
        at = step.again_at
        look_again = lambda: self._take(self._crowd.look(self._now()))  # noqa: E731
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, look_again)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- who is turned away

    def _refused(self, channel: Channel, reason: str, *, counts: bool) -> None:
        self._log.add(REFUSED, f"{channel.remote}: {reason}")
        if counts and not channel.address.startswith(NEAR):
            failures = self._failures.pop(channel.address, None)
            failures = failures or Allowance(FAILURES_AT_ONCE, FAILURES_PER_SECOND, self._now())
            failures.take(self._now())
            self._failures[channel.address] = failures
            if len(self._failures) > MAX_ADDRESSES:
                del self._failures[next(iter(self._failures))]

    def _check_failures(self, address: str) -> None:
        failures = self._failures.get(address)
        if failures and not failures.has_any(self._now()):
            self._log.add(REFUSED, f"{address}: too many of its handshakes failed")
            raise PeerLost("turned away")

    def punish(self, peer_id: str, reason: str) -> None:
        """This peer broke the protocol: no new connection with it for a while."""
        seconds = self._penalties.punish(peer_id, self._now())
        self._log.add(REFUSED, f"{reason}; no new connection for {seconds:.3g} s", peer_id)

    def penalty_of(self, peer_id: str) -> str:
        """Why there is no new connection with this peer now; empty where there may be one."""
        left = self._penalties.left_seconds(peer_id, self._now())
        return f"peer {peer_id[:8]} broke the protocol, no new connection with it for {left:.1f} s" if left else ""

    async def close(self) -> None:
        """Stop listening and close every channel."""
        if self._timer is not None:
            self._timer.cancel()
        await self._transport.close()


async def _let_read(channel: Channel) -> None:
    """Until whoever is refused has read why, and closed: what was sent gets lost where we close first."""
    with contextlib.suppress(TimeoutError, RemoteError):
        async with asyncio.timeout(PARTING_SECONDS):
            while True:
                await channel.receive()
