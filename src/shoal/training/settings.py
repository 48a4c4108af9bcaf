"""Where `join`'s settings come from: argument, then environment (`shoal run` sets it), then a default."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.address import Address, Endpoint, check_run, check_secret, parse_address, parse_endpoint, run_in_secret
from shoal.core.errors import AddressError, OptionError

FIRST_PORT, PORTS = 10_000, 20_000
PORTS_TO_TRY = 20
DEFAULT_HOST = "0.0.0.0"
DEFAULT_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class Settings:
    """All that decides how a peer enters a run. `port` None: the run's own, or the next that is free."""

    run: str
    peers: tuple[Address, ...]
    secret: str | None
    secret_was_given: bool
    host: str
    port: int | None
    identity: Path | None
    join_timeout_seconds: float

    def listen_candidates(self, remembered_port: int | None) -> list[Endpoint]:
        """Where to listen, best first."""
        if self.port:
            return [Endpoint(self.host, self.port)]
        if self.port == 0:
            return [Endpoint(self.host, port) for port in (remembered_port, 0) if port is not None]
        first = default_port(self.run)
        ports = [first + offset for offset in range(PORTS_TO_TRY)]
        if remembered_port:
            ports.insert(0, remembered_port)
        return [Endpoint(self.host, port) for port in ports]


def _timeout(argument: float | None, otherwise: float | str) -> float:
    """The seconds that `join` may take. Raises OptionError."""
    given = otherwise if argument is None else argument
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise OptionError("join_timeout_seconds", given, "a number of seconds above 0, up to 3600")
    return seconds


def run_in_addresses(addresses: Sequence[Address]) -> str | None:
    """The run's name, where an address with a secret that shoal made tells it."""
    return next((name for address in addresses if (name := run_in_secret(address.secret))), None)


def default_port(run: str) -> int:
    """A stable port from the run's name, below the range that systems give to outgoing connections."""
    return FIRST_PORT + int.from_bytes(hashlib.sha256(run.encode()).digest()[:4]) % PORTS


def read_settings(
    run: str | None,
    peers: Sequence[str],
    secret: str | None,
    listen: str | None,
    identity: str | os.PathLike[str] | None,
    join_timeout_seconds: float | None,
) -> Settings:
    """Arguments over environment. Raises OptionError or AddressError that name the argument."""
    if isinstance(peers, str):
        raise OptionError("peers", peers, "a list of addresses, also for one")
    addresses = tuple(parse_address(text) for text in (peers or os.environ.get("SHOAL_JOIN", "").split()))
    run = run or os.environ.get("SHOAL_RUN") or run_in_addresses(addresses)
    if run is None:
        raise OptionError("run", None, "given: shoal.join('a-name'), or SHOAL_RUN in the environment")
    given = secret if secret is not None else os.environ.get("SHOAL_SECRET") or None
    secrets = {address.secret for address in addresses if address.secret}
    if given is None and len(secrets) > 1:
        shown = [str(Address(address.peer_id, address.endpoints)) for address in addresses]
        raise OptionError("peers", shown, "addresses of one run: these have different secrets")
    if given is not None:
        check_secret(given)
    where = listen if listen is not None else os.environ.get("SHOAL_LISTEN") or None
    host, port = DEFAULT_HOST, None
    if where is not None:
        try:
            endpoint = parse_endpoint(where, lowest_port=0)
        except AddressError as error:
            raise OptionError("listen", where, f"HOST:PORT, with port 0 for any free one ({error})") from None
        host, port = endpoint.host, endpoint.port
    wait = _timeout(join_timeout_seconds, os.environ.get("SHOAL_JOIN_TIMEOUT_SECONDS") or DEFAULT_JOIN_SECONDS)
    key = identity if identity is not None else os.environ.get("SHOAL_IDENTITY") or None
    return Settings(
        check_run(run), addresses, given or next(iter(secrets), None), given is not None,
        host, port, Path(key) if key else None, wait,
    )  # fmt: skip
