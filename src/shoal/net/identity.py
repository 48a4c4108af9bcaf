"""Who a peer is: an ed25519 key. Its id is a hash of the public key, so nobody can claim another's id."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from shoal.core.errors import IdentityInUse, OptionError

KEY_BYTES = 32
_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw
_ANY_TIME = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)  # the key is what counts, not the date


@functools.lru_cache(maxsize=16_384)
def peer_id_of(public_key: bytes) -> str:
    """32 characters of a-z2-7: 160 bits of the hash of a 32-byte public key."""
    return base64.b32encode(hashlib.sha256(b"shoal peer" + public_key).digest()[:20]).decode().lower()


class Identity:
    """An ed25519 key pair made from 32 secret bytes."""

    def __init__(self, secret_bytes: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret_bytes)
        self.public_key: bytes = self._key.public_key().public_bytes(*_RAW)
        self.peer_id = peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """A 64-byte signature."""
        return self._key.sign(message)

    def certificate_pem(self) -> bytes:
        """Private key and self-signed certificate, as a TLS server needs them. Only the key in it is ever checked."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.peer_id)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_ANY_TIME[0])
            .not_valid_after(_ANY_TIME[1])
            .sign(self._key, None)
        )
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return key + certificate.public_bytes(serialization.Encoding.PEM)


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `public_key` signed `message`. False for malformed keys too."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@contextlib.contextmanager
def identity_file(path: Path) -> Iterator[Identity]:
    """The identity kept at `path` (made with mode 0600 when missing), locked while in use.

    Raises IdentityInUse when another process, or another peer of this one, holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise IdentityInUse(
            f"the identity {path} is in use by another peer; give each peer its own identity file, or none"
        ) from None
    try:
        if not path.exists():
            write_private(path, os.urandom(KEY_BYTES))
        secret_bytes = path.read_bytes()
        if len(secret_bytes) != KEY_BYTES:
            raise OptionError("identity", str(path), f"a file of exactly {KEY_BYTES} bytes that shoal itself wrote")
        yield Identity(secret_bytes)
    finally:
        lock.release()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(draft, path)
