"""Names of hosts: looked up where a slow name server holds up nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from shoal.core.address import Endpoint
from shoal.core.errors import PeerLost
from shoal.net.identity import Identity
from shoal.net.tcp import TcpTransport


def dial(host: str, within_seconds: float) -> None:
    async def main() -> None:
        async with asyncio.timeout(within_seconds):
            await TcpTransport(Identity(bytes(32))).dial(Endpoint(host, 1))

    asyncio.run(main())


def test_a_slow_name_server_delays_neither_the_deadline_nor_the_end(monkeypatch) -> None:
    answer = threading.Event()

    def slow(*args, **kwargs):
        answer.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    started_at = time.monotonic()
    with pytest.raises(TimeoutError):
        dial("slow.example", 0.1)
    assert time.monotonic() - started_at < 5
    answer.set()


def test_an_unknown_name_is_said_to_be_unknown(monkeypatch) -> None:
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PeerLost, match=r"unknown host 'nowhere\.example'"):
        dial("nowhere.example", 5)


def test_a_name_is_dialled_at_its_address(monkeypatch) -> None:
    there = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: there)
    with pytest.raises(PeerLost, match="nobody listens there"):
        dial("here.example", 5)
