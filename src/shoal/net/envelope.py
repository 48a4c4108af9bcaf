"""What travels in the header of a frame once two peers know each other.

On a link: Ask, Answer, Fail, Ping, Bye, Part. On a stream: Open, Item (with a payload), Ping, End, Fail. Bodies are
msgspec structs that the receiver decodes with the type it expects: nothing that a peer sends chooses a type here, and
nothing is unpickled.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from shoal.core.errors import ProtocolError


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every message body. Its class name is its name on the wire."""


class Done(Message, frozen=True):
    """The empty answer."""


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    pass


class Ask(_Frame, tag=1, frozen=True):
    """A call, or with id 0 a message that wants no answer."""

    id: int
    name: str
    body: msgspec.Raw


class Answer(_Frame, tag=2, frozen=True):
    """The answer to call `id`."""

    id: int
    body: msgspec.Raw


class Fail(_Frame, tag=3, frozen=True):
    """The other end refuses call `id` (on a stream: the stream), with a reason."""

    id: int
    code: str
    reason: str


MAX_PAUSE_SECONDS = 10.0


class Ping(_Frame, tag=4, frozen=True):
    """A sign of life where nothing else is sent; the next one comes within `next_seconds`."""

    next_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_PAUSE_SECONDS)]


class Bye(_Frame, tag=5, frozen=True):
    """This peer leaves the run."""

    reason: str


class Open(_Frame, tag=6, frozen=True):
    """Begin a stream on this connection."""

    name: str
    body: msgspec.Raw


class Item(_Frame, tag=7, frozen=True):
    """One message of the stream; the frame's payload belongs to it."""

    body: msgspec.Raw


class End(_Frame, tag=8, frozen=True):
    """This end of the stream sends no more; when both did, the connection can serve another."""


class Part(_Frame, tag=9, frozen=True):
    """This link is not needed any more; the sender stays in the run."""


LinkFrame = Ask | Answer | Fail | Ping | Bye | Part
StreamFrame = Open | Item | Ping | End | Fail
MAX_REASON, MAX_CODE = 500, 100
UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What decoding raises: a value nested a thousand deep is no MsgspecError."""

Body = TypeVar("Body", bound=Message)
_encode = msgspec.msgpack.Encoder().encode
_decode_link = msgspec.msgpack.Decoder(LinkFrame)
_decode_stream = msgspec.msgpack.Decoder(StreamFrame)


def encode(frame: _Frame) -> bytes:
    """A frame's header bytes."""
    return _encode(frame)


def raw(body: Message) -> msgspec.Raw:
    """A body, ready to be put into a frame."""
    return msgspec.Raw(_encode(body))


def decode_link(header: bytes) -> LinkFrame:
    """Raises ProtocolError."""
    return _decoded(_decode_link, header)  # type: ignore[no-any-return]


def decode_stream(header: bytes) -> StreamFrame:
    """Raises ProtocolError."""
    return _decoded(_decode_stream, header)  # type: ignore[no-any-return]


def decode_body(body: msgspec.Raw, kind: type[Body]) -> Body:
    """A body as the type that is expected here. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"no valid {kind.__name__}: {error}") from None


def _decoded(decoder: msgspec.msgpack.Decoder[Any], header: bytes) -> Any:
    try:
        return decoder.decode(header)
    except UNREADABLE as error:
        raise ProtocolError(f"no valid frame: {error}") from None
