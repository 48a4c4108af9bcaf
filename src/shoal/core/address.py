"""The address grammar: shoal://PEERID@HOST:PORT[,HOST:PORT]...[/SECRET]

Only A-Z a-z 0-9 @ : , . / _ - occur, so an address needs no quotes in any shell. A secret is 8 to 100 of A-Za-z0-9._-.
One that shoal makes is 128 random bits and the run's name, so the address is all that a joiner needs to be given.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from shoal.core.errors import AddressError, OptionError

FORM = "shoal://PEERID@HOST:PORT[,HOST:PORT]...[/SECRET]"
MAX_ENDPOINTS = 16
_PEER_ID = re.compile(r"[a-z2-7]{32}\Z")
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}\Z")
_SECRET = re.compile(r"[A-Za-z0-9._-]{8,100}\Z")
_MADE_SECRET = re.compile(r"[a-z2-7]{26}-(?P<run>.+)\Z")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True)
class Endpoint:
    """Where a peer listens. An IPv6 host stands without brackets: the last colon parts host and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Address:
    """A peer that can be joined: who it is, where it listens, and the run's secret where it is part of the address."""

    peer_id: str
    endpoints: tuple[Endpoint, ...]
    secret: str | None = None

    def __str__(self) -> str:
        places = ",".join(map(str, self.endpoints))
        return f"shoal://{self.peer_id}@{places}" + (f"/{self.secret}" if self.secret else "")


def parse_endpoint(text: str, *, lowest_port: int = 1) -> Endpoint:
    """`HOST:PORT` as an Endpoint. Raises AddressError that shows the text and what was expected."""
    host, colon, port = text.rpartition(":")
    if not colon or not _HOST.match(host):
        raise AddressError(f"{text!r} is not HOST:PORT (for example 192.168.1.20:4711)")
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or not lowest_port <= int(port) <= 65535:
        raise AddressError(f"{text!r}: the port must be a number from {lowest_port} to 65535, got {port!r}")
    return Endpoint(host, int(port))


def parse_address(text: str) -> Address:
    """Read an address; AddressError says what was wrong and shows the form."""

    def wrong(problem: str) -> AddressError:
        return AddressError(f"{text!r} is not a shoal address: {problem}. Expected {FORM}")

    scheme, found, rest = text.strip().partition("://")
    if not found or scheme != "shoal":
        raise wrong("it does not start with shoal://")
    peer_id, at, rest = rest.partition("@")
    if not at:
        raise wrong("there is no @ between peer id and host")
    if not _PEER_ID.match(peer_id):
        raise wrong(f"the peer id must be 32 characters of a-z and 2-7, got {len(peer_id)}: {peer_id!r}")
    places, slash, secret = rest.partition("/")
    if slash and not _SECRET.match(secret):
        raise wrong("the secret must be 8 to 100 characters of A-Za-z0-9._-")
    texts = places.split(",")
    if len(texts) > MAX_ENDPOINTS:
        raise wrong(f"it has {len(texts)} endpoints, at most {MAX_ENDPOINTS} are allowed")
    try:
        endpoints = tuple(parse_endpoint(place) for place in texts)
    except AddressError as error:
        raise wrong(str(error)) from None
    return Address(peer_id, endpoints, secret or None)


def check_run(run: str) -> str:
    """The run's name, or OptionError."""
    if not isinstance(run, str) or not _RUN.match(run):
        raise OptionError("run", run, "1 to 64 characters of A-Za-z0-9._- that start with a letter or digit")
    return run


def check_secret(secret: str) -> str:
    """A given secret, or OptionError, which does not repeat it. It is never part of an address: any text will do."""
    if not isinstance(secret, str) or not 8 <= len(secret) <= 200 or not secret.isprintable():
        raise OptionError("secret", "...", "8 to 200 printable characters")
    return secret


def make_secret(random_bytes: bytes, run: str) -> str:
    """A new secret from 16 random bytes, with the run's name in it."""
    return f"{base64.b32encode(random_bytes).decode().rstrip('=').lower()}-{run}"


def run_in_secret(secret: str | None) -> str | None:
    """The run's name in a secret that shoal made; None in one that a person chose."""
    made = _MADE_SECRET.match(secret or "")
    return made["run"] if made else None
