"""Hosts behind shaped lines: network namespaces on one bridge, as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

needs_namespaces = [
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="making network namespaces needs root"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="needs ip and tc (iproute2)"),
]


def command(text: str) -> None:
    subprocess.run(text.split(), check=True, timeout=20)


@contextlib.contextmanager
def shaped_hosts(tag: str, count: int, shape: str) -> Iterator[list[str]]:
    """Namespaces 10.77.0.1 and following; each line has this tbf in both directions."""
    bridge, hosts = f"{tag}-bridge", [f"{tag}-{number}" for number in range(1, count + 1)]
    try:
        command(f"ip netns add {bridge}")
        command(f"ip -n {bridge} link add br0 type bridge")
        command(f"ip -n {bridge} link set br0 up")
        for number, host in enumerate(hosts, start=1):
            command(f"ip netns add {host}")
            command(f"ip link add eth0 netns {host} type veth peer name port{number} netns {bridge}")
            command(f"ip -n {host} addr add 10.77.0.{number}/24 dev eth0")
            for space, device in ((host, "lo"), (host, "eth0"), (bridge, f"port{number}")):
                command(f"ip -n {space} link set {device} up")
            command(f"ip -n {bridge} link set port{number} master br0")
            for space, device in ((host, "eth0"), (bridge, f"port{number}")):
                command(f"ip netns exec {space} tc qdisc add dev {device} root tbf {shape}")
        yield hosts
    finally:
        for space in (*hosts, bridge):
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL, timeout=20)
