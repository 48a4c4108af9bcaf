"""What the transports need to know of this machine: its addresses, the names that it can look up, its open files."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
import threading
from typing import Any

import psutil

from shoal.core.address import MAX_ENDPOINTS, Endpoint
from shoal.core.errors import PeerLost


async def resolve(host: str) -> str:
    """The address of a name, looked up in a daemon thread. Raises PeerLost.

    asyncio's own look-up runs in an executor that is waited for at exit: a slow name server would hold up the end.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def look_up() -> None:
        address, problem = "", None
        try:
            address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            problem = PeerLost(f"unknown host {host!r} ({error.strerror or error})")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(_settle, found, address, problem)

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return await found


def _settle(found: asyncio.Future[str], address: str, problem: PeerLost | None) -> None:
    if found.done():
        return
    if problem is not None:
        found.set_exception(problem)
    else:
        found.set_result(address)


def open_files_allowed(most: int) -> int:
    """How many files and sockets this process may have open; `most` where that is more, or not limited."""
    if sys.platform == "win32":
        return most
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return allowed if 0 < allowed < most else most


def own_hosts() -> set[str]:
    """The addresses of this machine's interfaces. What goes to one of them may as well go over the loopback."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    }


def reachable_endpoints(host: str, port: int) -> list[Endpoint]:
    """Where others can dial a peer that listens at `host`: every address of this machine for a wildcard."""
    if host not in ("0.0.0.0", "::", ""):
        return [Endpoint(host, port)]
    wanted: Any = own_hosts()
    if host == "0.0.0.0":
        wanted = {address for address in wanted if ":" not in address}
    public = sorted(address for address in wanted if not address.startswith(("127.", "::1", "fe80", "169.254.")))
    return [Endpoint(address, port) for address in public[:MAX_ENDPOINTS] or ["127.0.0.1"]]
