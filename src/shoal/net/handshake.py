"""Who is there, and does it know the run's secret? Four small frames, before anything else is read.

    dialler                                             listener
      Hello(version, nonce, key)             ->
                                             <-         Challenge(version, nonce)
      Proof(signature, mac, purpose)         ->
                                             <-         Accepted(mac)

The transport vouches for the listener's key (`channel.server_key`: TLS checked it), and the dialler signs the
listener's nonce together with `channel.binding`, the hash of the listener's certificate, so that nobody in between can
pass the proof on. Both then show that they know the secret: an HMAC over both nonces, both ids and the binding, under a
key from scrypt(secret, run). The dialler proves first: a stranger learns nothing. Either end may send Refusal instead.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shoal.core.errors import ProtocolError, RefusedError
from shoal.net.channel import Channel
from shoal.net.envelope import UNREADABLE
from shoal.net.identity import Identity, peer_id_of, verify

PROTOCOL_VERSION = 5
NONCE_BYTES = 16
CREDENTIALS, PENALTY = "credentials", "penalty"
"""The second: code of the refusal of a peer that broke the protocol not long ago: it may come again."""
WRONG_CREDENTIALS = "the run's name or its secret is not the same at both ends"


class Hello(msgspec.Struct, tag="hello", frozen=True, forbid_unknown_fields=True):
    """The dialler's version, nonce (16 bytes) and public key (32 bytes)."""

    version: int
    nonce: bytes
    key: bytes


class Challenge(msgspec.Struct, tag="challenge", frozen=True, forbid_unknown_fields=True):
    """The listener's version and nonce."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, tag="proof", frozen=True, forbid_unknown_fields=True):
    """Signature and HMAC of the dialler, and what the connection is for: link or stream."""

    signature: bytes
    mac: bytes
    purpose: str


class Accepted(msgspec.Struct, tag="accepted", frozen=True, forbid_unknown_fields=True):
    """HMAC of the listener."""

    mac: bytes


class Refusal(msgspec.Struct, tag="refusal", frozen=True, forbid_unknown_fields=True):
    """Why one end refuses the other."""

    code: str
    reason: str


Message = TypeVar("Message", bound=msgspec.Struct)
_decode = msgspec.msgpack.Decoder(Hello | Challenge | Proof | Accepted | Refusal).decode
_encode = msgspec.msgpack.Encoder().encode


@functools.lru_cache(maxsize=64)
def run_key(run: str, secret: str) -> bytes:
    """32 bytes that only those who know the run's name and secret can make (scrypt, about 50 ms)."""
    return hashlib.scrypt(secret.encode(), salt=b"shoal run " + run.encode(), n=2**14, r=8, p=1, dklen=32)


async def greet(channel: Channel, me: Identity, key: bytes, nonce: bytes, expected: str | None, purpose: str) -> str:
    """The dialler's side. Returns the listener's peer id; raises RefusedError, ProtocolError or PeerLost."""
    listener = peer_id_of(channel.server_key)
    await channel.send(_encode(Hello(PROTOCOL_VERSION, nonce, me.public_key)))
    challenge = await _expect(channel, Challenge)
    if challenge.version != PROTOCOL_VERSION:
        await _refuse(channel, "version", _versions(PROTOCOL_VERSION, challenge.version))
    if expected is not None and listener != expected:
        await _refuse(channel, "identity", f"at {channel.remote} answers peer {listener}, not {expected}")
    if listener == me.peer_id:
        await _refuse(channel, "self", "this address is this peer's own")
    context = _context(nonce, challenge.nonce, me.peer_id, listener, channel.binding)
    channel.trust()  # it is who we dialled, and its first message as a peer may come with its last as a stranger
    await channel.send(
        _encode(Proof(me.sign(b"dial" + context), _mac(key, b"dial", context), purpose)),
    )
    accepted = await _expect(channel, Accepted)
    if not hmac.compare_digest(accepted.mac, _mac(key, b"accept", context)):
        await _refuse(channel, CREDENTIALS, WRONG_CREDENTIALS)
    return listener


async def answer(
    channel: Channel, me: Identity, key: bytes, nonce: bytes, penalty_of: Callable[[str], str] = lambda peer_id: ""
) -> tuple[str, str]:
    """The listener's side. Returns the dialler's peer id and the purpose; raises as `greet` does.

    `penalty_of(peer_id)`: why it is refused though it knows the secret, empty where it is not.
    """
    hello = await _expect(channel, Hello)
    await channel.send(_encode(Challenge(PROTOCOL_VERSION, nonce)))
    if hello.version != PROTOCOL_VERSION:
        await _refuse(channel, "version", _versions(hello.version, PROTOCOL_VERSION))
    dialler = peer_id_of(hello.key)
    context = _context(hello.nonce, nonce, dialler, me.peer_id, channel.binding)
    proof = await _expect(channel, Proof)
    if not verify(hello.key, proof.signature, b"dial" + context):
        await _refuse(channel, "identity", f"peer {dialler} did not prove its identity")
    if not hmac.compare_digest(proof.mac, _mac(key, b"dial", context)):
        await _refuse(channel, CREDENTIALS, WRONG_CREDENTIALS)
    if dialler == me.peer_id:
        await _refuse(channel, "self", "this address is this peer's own")
    if penalty := penalty_of(dialler):
        await _refuse(channel, PENALTY, penalty)
    channel.trust()  # before the dialler learns of it: its first message as a peer may be here the next moment
    await channel.send(_encode(Accepted(_mac(key, b"accept", context))))
    return dialler, proof.purpose


def _versions(dialler: int, listener: int) -> str:
    return f"the dialling peer speaks protocol version {dialler}, the listening one {listener}: install the same shoal"


def _context(dial_nonce: bytes, accept_nonce: bytes, dialler: str, listener: str, binding: bytes) -> bytes:
    fields = (dial_nonce, accept_nonce, dialler.encode(), listener.encode(), binding)
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def _mac(key: bytes, side: bytes, context: bytes) -> bytes:
    return hmac.digest(key, side + context, "sha256")


async def _refuse(channel: Channel, code: str, reason: str) -> None:
    await channel.send(_encode(Refusal(code, reason)))
    raise RefusedError(reason, code)


async def _expect(channel: Channel, kind: type[Message]) -> Message:
    header, _ = await channel.receive()
    try:
        message = _decode(header)
    except UNREADABLE as error:
        raise ProtocolError(f"no handshake message: {error}") from None
    if isinstance(message, Refusal):
        raise RefusedError(message.reason[:300], message.code[:30])
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message
