"""What a peer remembers of a run between its starts: the secret, the port, and where the other peers were.

A founder that is started again with its first command must find its run instead of founding a second one.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import platformdirs

from shoal.core.address import Address, Endpoint, parse_address
from shoal.core.errors import AddressError
from shoal.net.identity import write_private

MAX_REMEMBERED = 50


class Remembered(msgspec.Struct):
    """The content of run.json."""

    secret: str | None = None
    port: int | None = None
    peers: list[str] = []


class RunFolder:
    """$SHOAL_STATE/RUN: run.json with mode 0600, and the identities that `shoal run` keeps."""

    def __init__(self, run: str, base: str | os.PathLike[str] | None = None) -> None:
        chosen = base or os.environ.get("SHOAL_STATE") or platformdirs.user_state_dir("shoal")
        self.path = Path(chosen) / run
        self._file = self.path / "run.json"

    def read(self) -> Remembered:
        """What is remembered; nothing when the file is missing or not shoal's."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Remembered)
        except (OSError, msgspec.MsgspecError):
            return Remembered()

    def addresses(self) -> list[Address]:
        """The remembered peers that can still be read."""
        found = []
        for text in self.read().peers:
            try:
                found.append(parse_address(text))
            except AddressError:
                continue
        return found

    def remember(self, secret: str, port: int, peers: dict[str, list[str]]) -> None:
        """Keep secret, port and peers; those known from earlier stay behind the ones that are here now."""
        earlier = {address.peer_id: [str(endpoint) for endpoint in address.endpoints] for address in self.addresses()}
        merged = {**peers, **{peer_id: places for peer_id, places in earlier.items() if peer_id not in peers}}
        texts = [
            str(Address(peer_id, tuple(Endpoint(*_parted(place)) for place in places)))
            for peer_id, places in list(merged.items())[:MAX_REMEMBERED]
            if places
        ]
        write_private(self._file, msgspec.json.format(msgspec.json.encode(Remembered(secret, port, texts))))


def _parted(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host, int(port)
