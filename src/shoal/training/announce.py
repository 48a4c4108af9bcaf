"""What a peer tells the person at the terminal."""

from __future__ import annotations

import ipaddress
import os
import sys

from shoal.core.address import parse_address

ALONE_SECONDS = 30.0


def say(text: str) -> None:
    """One line on stderr, so that the script's own output stays its own."""
    sys.stderr.write(f"shoal: {text}\n")
    sys.stderr.flush()


def alone_seconds() -> float:
    """After how long a founder says that nobody has connected yet."""
    return float(os.environ.get("SHOAL_ALONE_SECONDS") or ALONE_SECONDS)


def invitation(address: str, command: str, run: str) -> list[str]:
    """How others join, and from where each endpoint can be reached."""
    own = "" if parse_address(address).secret else f" --run {run} --secret THE-SECRET"
    lines = [f"others join with:  {command} --join {address}{own}"]
    lines += [f"  {place} is reachable from {_reach(place.host)}" for place in parse_address(address).endpoints]
    return lines


def _reach(host: str) -> str:
    try:
        place = ipaddress.ip_address(host)
    except ValueError:
        return "wherever this name is known"
    if place.is_loopback:
        return "this machine only"
    if place.is_private:
        return "the local network (from outside only where a router forwards this port)"
    return "the internet, unless a firewall closes this port"
