"""The peer host: authenticated links to other peers, typed calls over them, and bulk streams beside them.

Between two peers there is a link (calls, signs of life) and, from a small pool, a connection for each stream, so that a
call never waits behind bulk. Bytes of any kind are a sign of life. Each connection and each incoming call is a failure
boundary: what goes wrong there becomes an event and, at most, closes that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from shoal.core.address import Endpoint
from shoal.core.clock import Clock, Random
from shoal.core.errors import CallTimeout, PeerLost, ProtocolError, RemoteError
from shoal.core.events import EventLog
from shoal.core.gauges import RateGauge
from shoal.net.channel import Channel, Transport
from shoal.net.door import Door
from shoal.net.envelope import (
    Answer,
    Ask,
    Body,
    Bye,
    Fail,
    Message,
    Open,
    Part,
    Ping,
    decode_body,
    decode_link,
    encode,
    raw,
)
from shoal.net.heartbeat import heartbeat, quietly
from shoal.net.identity import Identity
from shoal.net.remote import FIRST_PAUSE_SECONDS, MAX_TELLING, Remote
from shoal.net.serving import CallHandler, StreamHandler, serve_streams, take_call, take_notice
from shoal.net.stream import Stream

BOTH_WAYS = "Averagings need its port to be open, and an address that others can reach (listen=HOST:PORT)"
PARTED = "parted"
"""The reason in `on_lost` of a link that was given up because nobody needed it: the peer stays in the run."""
MAX_FAULTS = 20
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER = 4096, 24
IDLE_STREAMS_PER_PEER = 2
MAX_REMOTES = 4096
"""Peers that are remembered; beyond, those without a connection are forgotten, the longest unused first."""

Reply = TypeVar("Reply", bound=Message)


class Host:
    """One peer's end of the network. Use `async with host:`; everything it started ends with it.

    Whoever wants to know that a peer is gone appends to `on_lost` a callback of (peer_id, reason, polite).
    """

    def __init__(
        self, identity: Identity, transport: Transport, *, run: str, secret: str,
        clock: Clock, random: Random, log: EventLog,
    ) -> None:  # fmt: skip
        self.identity, self.peer_id = identity, identity.peer_id
        self.clock, self.random, self.log = clock, random, log
        self._door = Door(identity, transport, run=run, secret=secret, random=random, log=log)
        self.endpoints: tuple[Endpoint, ...] = ()
        self.remotes: dict[str, Remote] = {}
        self.silent: dict[str, str] = {}
        """Peers that were lost because nothing came from them, though their connections stood: a dial hangs too."""
        self.sent, self.received = RateGauge(), RateGauge()
        self.faults: deque[Exception] = deque(maxlen=MAX_FAULTS)
        self.on_lost: list[Callable[[str, str, bool], None]] = []
        self.connections = 0
        self._closing = False
        self._running: dict[asyncio.Task[None], None] = {}
        self._call_ids = itertools.count(1)
        self.call_handlers: dict[str, tuple[type[Message], CallHandler]] = {}
        self.notice_handlers: dict[str, tuple[type[Message], Callable[[str, Any], None]]] = {}
        self.stream_handlers: dict[str, tuple[type[Message], StreamHandler]] = {}

    # -- life

    async def __aenter__(self) -> Host:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._closing = True
        await self._door.close()
        for task in list(self._running):
            task.cancel()
        await self._tasks.__aexit__(None, None, None)  # an error of the body goes on as it is, not in a group

    async def start(self, listen: Endpoint) -> None:
        """Listen. `endpoints` then says where. Raises OptionError when that place is taken."""
        self.endpoints = tuple(await self._door.open(listen, self._accept))
        self.spawn(heartbeat(self), "heartbeat")

    async def goodbye(self, reason: str) -> None:
        """Tell everybody that this peer leaves, for at most half a second; nobody is met or missed from now on."""
        self._closing = True
        links = [remote.links[-1] for remote in self.remotes.values() if remote.links]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5), asyncio.TaskGroup() as tasks:
                for link in links:
                    tasks.create_task(quietly(link.send(encode(Bye(reason)))))

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` within this host's life. Its failure is an event, and ends nothing else."""
        task = self._tasks.create_task(self._bounded(work, what), name=f"{self.peer_id[:6]} {what}")
        self._running[task] = None

        def ended(done: asyncio.Task[None]) -> None:
            self._running.pop(done, None)
            work.close()  # a task that is cancelled before its first step never touched it

        task.add_done_callback(ended)
        return task

    async def _bounded(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except RemoteError as error:
            self.log.add("warning", f"{what}: {error}")
        except Exception as error:  # noqa: BLE001  a failure boundary: counted, shown, never in the user's loop
            self.faults.append(error)
            self.log.add("fault", f"{what}: {type(error).__name__}: {error}")

    # -- serving

    def serve(self, kind: type[Body], handler: Callable[[str, Body], Awaitable[Message]]) -> None:
        """`handler(peer_id, request)` answers calls of this type. A ShoalError it raises is told to the caller."""
        self.call_handlers[kind.__name__] = kind, handler

    def hear(self, kind: type[Body], handler: Callable[[str, Body], None]) -> None:
        """`handler(peer_id, message)` takes what is told with this type; it must not wait."""
        self.notice_handlers[kind.__name__] = kind, handler

    def serve_stream(self, kind: type[Body], handler: Callable[[Stream, Body], Awaitable[None]]) -> None:
        """`handler(stream, request)` serves streams opened with a message of this type."""
        self.stream_handlers[kind.__name__] = kind, handler

    # -- links

    async def link(self, endpoints: Iterable[Endpoint], expected: str | None) -> str:
        """Connect to whoever answers first of `endpoints`; returns its peer id.

        Raises RefusedError when somebody answered and the two do not fit, PeerLost when nobody did.
        """
        channel, peer_id = await self._door.dial(endpoints, expected, "link")
        self._keep_link(peer_id, channel)
        return peer_id

    def linked(self, peer_id: str) -> bool:
        """Whether calls to this peer can be made now."""
        remote = self.remotes.get(peer_id)
        return bool(remote and remote.links)

    def know(self, peer_id: str, endpoints: Iterable[Endpoint]) -> None:
        """Where this peer listens, by its own word: streams to it are dialled there."""
        self._remote(peer_id).endpoints = tuple(endpoints)

    def knows(self, peer_id: str) -> bool:
        """Whether it is known where this peer listens."""
        return bool(peer_id in self.remotes and self.remotes[peer_id].endpoints)

    def drop(self, peer_id: str, reason: str) -> None:
        """Close every connection with this peer."""
        if remote := self.remotes.get(peer_id):
            self.unlink(remote, reason, polite=False)

    def punish(self, peer_id: str, reason: str) -> None:
        """This peer broke the protocol: an event, and no new connection with it for a while."""
        self._door.punish(peer_id, reason)

    def unused_seconds(self, peer_id: str) -> float:
        """For how long no call and no stream has needed this peer; 0 while one does."""
        remote = self._remote(peer_id)
        return 0.0 if remote.is_busy else self.clock.now() - remote.used_at

    async def part(self, peer_id: str) -> None:
        """Give up the link to a peer that stays in the run."""
        if (remote := self.remotes.get(peer_id)) and remote.links:
            await quietly(remote.links[-1].send(encode(Part())))
            self.unlink(remote, PARTED, polite=True)

    def _accept(self, channel: Channel) -> None:
        if self._closing:
            channel.abort()
        else:
            self.spawn(self._admit(channel), f"connection from {channel.remote}")

    async def _admit(self, channel: Channel) -> None:
        admitted = await self._door.admit(channel)
        if admitted is None:
            return
        peer_id, purpose = admitted
        remote = self._remote(peer_id)
        if remote.connections >= MAX_CONNECTIONS_PER_PEER:
            self.log.add("refused", f"more than {MAX_CONNECTIONS_PER_PEER} connections", peer_id)
            channel.abort()
        elif self.connections >= MAX_CONNECTIONS:
            self.log.add("refused", f"more than {MAX_CONNECTIONS} connections with all peers", peer_id)
            channel.abort()
        elif purpose == "link":
            self._keep_link(peer_id, channel)
        else:
            await serve_streams(self, remote, channel)

    def count_connection(self, remote: Remote, change: int) -> None:
        """One that is kept open began (1) or ended (-1)."""
        remote.connections += change
        self.connections += change

    def _remote(self, peer_id: str) -> Remote:
        if peer_id not in self.remotes:
            if len(self.remotes) >= MAX_REMOTES:
                unused = (other for other in self.remotes.values() if other.is_idle)
                if oldest := min(unused, key=lambda other: other.used_at, default=None):
                    del self.remotes[oldest.peer_id]
                    self.silent.pop(oldest.peer_id, None)
            self.remotes[peer_id] = Remote(peer_id, self.clock)
        return self.remotes[peer_id]

    def _keep_link(self, peer_id: str, channel: Channel) -> None:
        remote = self._remote(peer_id)
        remote.hear(channel, self.sent, self.received, bulk=False)
        self.silent.pop(peer_id, None)
        remote.links.append(channel)
        remote.our_pause_seconds = remote.its_pause_seconds = FIRST_PAUSE_SECONDS
        self.count_connection(remote, 1)
        self.spawn(self._read_link(remote, channel), f"link with {peer_id[:6]}")

    async def _read_link(self, remote: Remote, channel: Channel) -> None:
        reason, polite = "its connection closed", False
        try:
            while True:
                header, _ = await channel.receive()
                remote.count_message()
                frame = decode_link(header)
                if isinstance(frame, Ask):
                    (take_call if frame.id else take_notice)(self, remote, channel, frame)
                elif isinstance(frame, Ping):
                    remote.its_pause_seconds = max(frame.next_seconds, FIRST_PAUSE_SECONDS)
                elif isinstance(frame, Answer | Fail):
                    remote.take_answer(frame)
                elif isinstance(frame, Bye | Part):
                    reason, polite = frame.reason[:100] if isinstance(frame, Bye) else PARTED, True
                    break
        except PeerLost as error:
            reason = str(error)
        except ProtocolError as error:
            reason = f"it sent {error}"
            self.punish(remote.peer_id, reason)
        finally:
            channel.close()
            self.count_connection(remote, -1)
            if channel in remote.links:
                remote.links.remove(channel)
                if polite or not remote.links:
                    self.unlink(remote, reason, polite)

    def unlink(self, remote: Remote, reason: str, polite: bool) -> None:
        """Close every connection with a peer, and tell whoever wants to know."""
        remote.close(reason)
        if not self._closing:
            for notice in self.on_lost:
                notice(remote.peer_id, reason, polite)

    # -- calls

    async def call(self, peer_id: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Call a linked peer. Raises RefusedError (its reason), PeerLost, CallTimeout or ProtocolError."""
        remote = self.remotes.get(peer_id)
        if remote is None or not remote.links:
            raise PeerLost(f"{peer_id[:8]} is not connected")
        remote.use()
        call_id = next(self._call_ids)
        future = remote.pending[call_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_seconds):
                await remote.links[-1].send(encode(Ask(call_id, type(request).__name__, raw(request))))
                answered = await future
        except TimeoutError:
            name = type(request).__name__
            raise CallTimeout(f"{peer_id[:8]} did not answer {name} within {timeout_seconds:.1f} s") from None
        finally:
            del remote.pending[call_id]
            if future.done() and not future.cancelled():
                future.exception()  # the connection broke while we were still sending: seen, not lost
        try:
            return decode_body(answered.body, reply)
        except ProtocolError as error:
            self.punish(peer_id, str(error))
            self.drop(peer_id, str(error))
            raise

    def tell(self, peer_ids: Iterable[str], message: Message) -> None:
        """Send a message that wants no answer. It may get lost; the next one tells the same."""
        header = encode(Ask(0, type(message).__name__, raw(message)))
        for peer_id in peer_ids:
            if (remote := self.remotes.get(peer_id)) and remote.links:
                self.post(remote, header)

    def post(self, remote: Remote, header: bytes) -> None:
        """Send a frame that wants no answer on a link: now where it can take it, else behind what is on the way."""
        if not (self._closing or remote.links[-1].post(header) or remote.telling >= MAX_TELLING):
            self.spawn(remote.post_later(header), "post")

    # -- streams

    @contextlib.asynccontextmanager
    async def stream(self, peer_id: str, request: Message) -> AsyncIterator[Stream]:
        """Open a stream. On a clean exit both ends finish and the connection goes back to the pool."""
        remote = self._remote(peer_id)
        remote.use()
        channel = await self._open_channel(remote, encode(Open(type(request).__name__, raw(request))))
        stream = Stream(channel, peer_id)
        remote.streams[channel] = None
        try:
            yield stream
            await stream.end()
        except BaseException:
            channel.abort()
            raise
        finally:
            remote.streams.pop(channel, None)
        try:
            async with asyncio.timeout(1.0):
                await stream.drain()
        except (TimeoutError, RemoteError):
            channel.abort()
            return
        if len(remote.idle_streams) < IDLE_STREAMS_PER_PEER and remote.links:
            remote.idle_streams.append((self.clock.now(), channel))
        else:
            channel.close()

    async def _open_channel(self, remote: Remote, opening: bytes) -> Channel:
        while remote.idle_streams:
            _, channel = remote.idle_streams.pop()
            with contextlib.suppress(RemoteError):  # the other end closed it while it lay in the pool
                await channel.send(opening)
                return channel
        try:
            channel, _ = await self._door.dial(remote.endpoints, remote.peer_id, "stream")
        except PeerLost as error:
            if remote.links and not remote.is_one_way:
                remote.is_one_way = True
                self.log.add("advice", f"it is connected, but can't be dialled: {error}. {BOTH_WAYS}", remote.peer_id)
            raise
        remote.is_one_way = False
        remote.hear(channel, self.sent, self.received, bulk=True)
        await channel.send(opening)
        return channel
