"""What a host does for other peers: it answers their calls and serves their streams.

Each is a failure boundary. Where a peer breaks the protocol that connection is closed, and no new one is taken for a
while. What waits for a slow reader is bounded: one answer at a time is encoded, and a call ends when it is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from shoal.core.errors import PeerLost, ProtocolError, RefusedError, ShoalError
from shoal.net.channel import Channel
from shoal.net.envelope import MAX_REASON, Answer, Ask, Fail, Message, Open, decode_body, decode_stream, encode, raw
from shoal.net.heartbeat import quietly
from shoal.net.remote import Remote
from shoal.net.stream import Stream

if TYPE_CHECKING:
    from shoal.net.host import Host

MAX_CALLS_PER_PEER = 64

CallHandler = Callable[[str, Any], Awaitable[Message]]
StreamHandler = Callable[[Stream, Any], Awaitable[None]]


def take_call(host: Host, remote: Remote, channel: Channel, ask: Ask) -> None:
    """Answer it in a task of its own. Raises ProtocolError where too many of this peer's run."""
    if remote.calls_running >= MAX_CALLS_PER_PEER:
        raise ProtocolError(f"more than {MAX_CALLS_PER_PEER} calls at once")
    remote.use()
    remote.calls_running += 1
    host.spawn(_answer_call(host, remote, channel, ask), f"call {ask.name[:40]}")


def take_notice(host: Host, remote: Remote, channel: Channel, ask: Ask) -> None:
    """Take what is told and wants no answer. Raises ProtocolError on what is no message of its kind."""
    if ask.name in host.notice_handlers:
        kind, handler = host.notice_handlers[ask.name]
        with contextlib.suppress(RefusedError):  # nobody waits for a refusal
            handler(remote.peer_id, decode_body(ask.body, kind))


async def _answer_call(host: Host, remote: Remote, channel: Channel, ask: Ask) -> None:
    answer: Message | None = None
    code = reason = ""
    try:
        try:
            if ask.name not in host.call_handlers:
                raise RefusedError(f"nobody here answers {ask.name[:40]!r}", "unknown")
            kind, handler = host.call_handlers[ask.name]
            answer = await handler(remote.peer_id, decode_body(ask.body, kind))
        except RefusedError as error:
            code, reason = error.code, error.reason
        except ProtocolError as error:
            host.punish(remote.peer_id, str(error))
            channel.abort()
            return
        except ShoalError as error:
            code, reason = type(error).__name__, str(error)
        except Exception:
            channel.abort()
            raise
        async with remote.answering:
            response = Fail(ask.id, code, reason[:MAX_REASON]) if answer is None else Answer(ask.id, raw(answer))
            await quietly(channel.send(encode(response)))
    finally:
        remote.calls_running -= 1


async def serve_streams(host: Host, remote: Remote, channel: Channel) -> None:
    """Serve one stream after the other on a connection that the other peer opened."""
    remote.hear(channel, host.sent, host.received, bulk=True)
    host.count_connection(remote, 1)
    remote.streams[channel] = None
    try:
        while True:
            header, _ = await channel.receive()
            frame = decode_stream(header)
            if not isinstance(frame, Open) or frame.name not in host.stream_handlers:
                raise ProtocolError("a stream begins with an Open of a known kind")
            kind, handler = host.stream_handlers[frame.name]
            stream = Stream(channel, remote.peer_id)
            try:
                await handler(stream, decode_body(frame.body, kind))
                await stream.end()
            except RefusedError as error:
                await stream.fail(error.code, error.reason)
            await stream.drain()
    except PeerLost:
        pass  # the ordinary end of a pooled connection
    except ProtocolError as error:
        host.punish(remote.peer_id, str(error))
    finally:
        channel.abort()
        remote.streams.pop(channel, None)
        host.count_connection(remote, -1)
