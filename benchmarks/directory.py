"""How long the directory takes to store and to find, next to hivemind's DHT in as many processes, in turn.

    python benchmarks/directory.py [--peers 8] [--operations 200] [--repeats 3] [--json FILE]

Peer 0 stores; it finds keys that the others stored and that it never asked for (cold), and the same again at once
(cached). Values have 200 bytes. hivemind gets a virtual environment of its own beside this file, where it can be
installed; its node runs in the loop that measures, as shoal's does, so the pipe of its DHT class is not counted, and
without its signatures. `latest=True` makes it ask every replica, as shoal always does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HIVEMIND, VENV = "hivemind==1.1.12", HERE / ".hivemind"
INSTALL_SECONDS, WAIT_SECONDS = 480, 120
TTL_SECONDS, VALUE = 600.0, b"v" * 200
KEYS_PER_PEER, OWN_KEYS = 29, 20
"""Under the 32 that a node of shoal keeps for one owner."""
KINDS = "store", "get cold", "get cached"

Node = tuple[Callable[[str], Awaitable[bool]], Callable[[str, bool], Awaitable[bool]], Callable[[], Awaitable[None]]]
"""store(key) and get(key, cached), each whether it succeeded, and stop()."""


async def shoal_node(folder: Path, rank: int) -> Node:
    """A host with a directory."""
    from shoal.core.address import Endpoint, parse_address
    from shoal.core.clock import Clock
    from shoal.core.events import EventLog
    from shoal.net.host import Host
    from shoal.net.identity import KEY_BYTES, Identity
    from shoal.net.tcp import TcpTransport
    from shoal.overlay.directory import Directory

    identity, clock = Identity(os.urandom(KEY_BYTES)), Clock()
    log = EventLog(clock.now)
    options = {"run": "bench", "secret": "a-secret", "clock": clock, "random": random.SystemRandom(), "log": log}
    host = await Host(identity, TcpTransport(identity), **options).__aenter__()
    await host.start(Endpoint("127.0.0.1", 0))
    node = Directory(host)
    publish(folder, rank, f"shoal://{host.peer_id}@{host.endpoints[0]}")
    if rank:
        entry = parse_address((folder / "address-0").read_text())
        node.meet(entry.peer_id, [str(endpoint) for endpoint in entry.endpoints])
    await node.bootstrap()

    async def store(key: str) -> bool:
        return await node.store(key, VALUE, TTL_SECONDS) > 1

    async def get(key: str, cached: bool) -> bool:
        return [entry.value for entry in (await node.get(key))[key].values()] == [VALUE]

    return store, get, lambda: host.__aexit__(None, None, None)


async def hivemind_node(folder: Path, rank: int) -> Node:
    """A node of its DHT."""
    from hivemind.dht.node import DHTNode
    from hivemind.utils.timed_storage import get_dht_time

    entries = json.loads((folder / "address-0").read_text()) if rank else []
    node = await DHTNode.create(initial_peers=entries, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    publish(folder, rank, json.dumps([str(place) for place in await node.get_visible_maddrs()]))

    async def store(key: str) -> bool:
        return await node.store(key, VALUE, get_dht_time() + TTL_SECONDS, subkey=rank)

    async def get(key: str, cached: bool) -> bool:
        found = await node.get(key, latest=not cached)
        return [entry.value for entry in found.value.values()] == [VALUE]

    return store, get, node.shutdown


def publish(folder: Path, rank: int, text: str) -> None:
    draft = folder / f"draft-{rank}"
    draft.write_text(text)
    draft.rename(folder / f"address-{rank}")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  another process makes it true
        await asyncio.sleep(0.02)


async def child(name: str, rank: int, peers: int, operations: int, folder: Path) -> None:
    """One process. Each of the others stores keys; then peer 0 measures, alone."""
    if rank:
        await until((folder / "address-0").exists)
    store, get, stop = await (shoal_node if name == "shoal" else hivemind_node)(folder, rank)
    await until(lambda: all((folder / f"address-{other}").exists() for other in range(peers)))
    if rank:
        for number in range(rank - 1, operations, peers - 1):
            assert await store(f"key {number}")
        (folder / f"ready-{rank}").touch()
        await until((folder / "done").exists)
    else:
        await until(lambda: all((folder / f"ready-{other}").exists() for other in range(1, peers)))
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(-10, operations):  # the first ones warm up
            for kind in KINDS:
                begun = time.perf_counter()
                if kind == "store":
                    done = await store(f"own {number % OWN_KEYS}")
                else:
                    done = await get(f"key {number % operations}", kind == "get cached")
                seconds[kind].append(time.perf_counter() - begun)
                assert done, f"{name}: {kind} number {number} failed"
        print(json.dumps({kind: series[10:-10] for kind, series in seconds.items()}), flush=True)
        (folder / "done").touch()
    await stop()


def measure(name: str, python: str, peers: int, operations: int) -> dict[str, list[float]]:
    """Run the processes once and return what the first one measured."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        commands = [
            [python, __file__, "--child", name, str(n), str(peers), str(operations), folder] for n in range(peers)
        ]
        children = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
            for command in commands
        ]
        try:
            seconds: dict[str, list[float]] = json.loads(children[0].communicate(timeout=WAIT_SECONDS)[0])
            for process in children[1:]:
                process.wait(timeout=10)
        finally:
            for process in children:
                end(process)
    return seconds


def end(process: subprocess.Popen[str]) -> None:
    """Kill it and what it started (hivemind starts a daemon), where there are process groups."""
    try:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
    process.wait()


def hivemind_python() -> str | None:
    """The interpreter that has hivemind; None, with one line that says why, where it can't be had."""
    python = VENV / ("Scripts" if os.name == "nt" else "bin") / "python"
    try:
        if not (VENV / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True, timeout=60)
            paths = sysconfig.get_paths("venv", {"base": str(VENV), "platbase": str(VENV)})
            Path(paths["purelib"], "torch_of_shoal.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
            command = [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "-c",
                str(HERE.parent / "constraints.txt"),
                HIVEMIND,
            ]
            subprocess.run(command, check=True, timeout=INSTALL_SECONDS, capture_output=True)
            (VENV / "installed").touch()
        subprocess.run([python, "-c", "import hivemind"], check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{HIVEMIND} can't be installed here, so shoal's figures stand alone: {str(error)[-200:]}")
        return None
    return str(python)


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    return {"median_ms": 1e3 * statistics.median(seconds), "p99_ms": 1e3 * statistics.quantiles(seconds, n=100)[98]}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        name, rank, peers, operations = sys.argv[2], *map(int, sys.argv[3:6])
        asyncio.run(child(name, rank, peers, operations, Path(sys.argv[6])))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--operations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.operations = min(options.operations, KEYS_PER_PEER * (options.peers - 1))
    pythons = {"shoal": sys.executable}
    if python := hivemind_python():
        pythons["hivemind"] = python
    pooled: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in pythons}
    for _ in range(options.repeats):
        for name, python in pythons.items():
            for kind, seconds in measure(name, python, options.peers, options.operations).items():
                pooled[name][kind] += seconds
    figures: dict[str, Any] = {name: {kind: spread(pooled[name][kind]) for kind in KINDS} for name in pythons}
    print(f"{options.peers} processes, {options.repeats} x {options.operations} operations, milliseconds:")
    for name, rows in figures.items():
        for kind, row in rows.items():
            print(f"  {name:9} {kind:11} median {row['median_ms']:8.3f}   p99 {row['p99_ms']:8.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"peers": options.peers, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
