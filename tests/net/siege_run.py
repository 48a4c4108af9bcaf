"""A siege of two honest processes from the test's own process, with figures before, in and after it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siege import Siege
from swarm_process import PeerProcess, Peers, ask_all, wait_until

from shoal.core.address import parse_address

RUN, SECRET = "besieged", "a-secret-of-the-besieged"
EVERY_SECONDS, SIZE = 0.2, 20_000
HERE = Path(__file__).resolve().parent


@dataclass
class Outcome:
    """Figures of the two honest peers: the first is attacked. `rates`: averagings per second, by phase."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    rates: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    most_grown_bytes: int = 0

    def __str__(self) -> str:
        rates = ", ".join(f"{phase} {rate:.2f}" for phase, rate in self.rates.items())
        growth = [(now["rss"] - then["rss"]) / 1e6 for now, then in zip(self.after, self.before, strict=True)]
        return (
            f"sent {self.sent}; averagings per second: {rates}; memory grew by {growth[0]:.1f} and {growth[1]:.1f} MB, "
            f"at most {self.most_grown_bytes / 1e6:.1f} MB; refused {self.after[0]['refused']} (events kept: "
            f"{self.after[0]['events']}); files {self.before[0]['files']} -> {self.after[0]['files']}, tasks "
            f"{self.before[0]['tasks']} -> {self.after[0]['tasks']}"
        )


def besieged(
    folder: Path,
    *,
    stranger_frames: int,
    peer_frames: int,
    held: int,
    hold_seconds: float,
    flood: int,
    window_seconds: float,
    seed: int,
) -> Outcome:
    with Peers(folder) as peers:
        honest = [peers.start(HERE / "steady_child.py") for _ in range(2)]
        options = {"run": RUN, "secret": SECRET, "every_seconds": EVERY_SECONDS, "size": SIZE}
        address = honest[0].ask("enter", peers=[], **options)
        honest[1].ask("enter", peers=[address], **options)
        wait_until(lambda: _averagings(honest) >= 3, 30, "three averagings")
        before = ask_all(honest, "figures")
        outcome = Outcome(before, before)
        rate = _Rate(honest, outcome)
        with rate.of("before"):
            time.sleep(window_seconds)
        asyncio.run(
            _attack(address, rate, stranger_frames, peer_frames, held, hold_seconds, flood, seed, window_seconds)
        )
        with rate.of("after"):
            time.sleep(window_seconds)
        wait_until(lambda: _settled(honest, before), 40, "connections and tasks of the siege are gone", 0.5)
        outcome.after = ask_all(honest, "figures")
        return outcome


async def _attack(
    address: str,
    rate: _Rate,
    stranger_frames: int,
    peer_frames: int,
    held: int,
    hold_seconds: float,
    flood: int,
    seed: int,
    window_seconds: float,
) -> None:
    siege = Siege(parse_address(address), RUN, SECRET, seed)
    sent = rate.outcome.sent

    async def phase(name: str, work: Coroutine[Any, Any, Any]) -> None:
        siege.sent = 0
        watching = asyncio.create_task(rate.watch())
        try:
            with rate.of(name):
                await work
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        sent[name] = sent.get(name) or siege.sent

    async def until(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        least = time.monotonic() + window_seconds  # a shorter phase would say nothing about averagings
        while siege.sent < count or time.monotonic() < least:
            await siege.abreast(max(1, (count - siege.sent) // 3), work)

    async def hold() -> None:
        await siege.hold(held)
        sent["half-open"] = len(siege._held)
        for _ in range(4):
            await asyncio.sleep(hold_seconds / 4)
            await siege.trickle()

    async def floods() -> None:
        sent["floods"] = sum(await asyncio.gather(*(siege.call_flood(flood) for _ in range(4))))
        await siege.abreast(40, siege.oversized)
        slow = [await siege.read_nothing(300) for _ in range(4)]
        await asyncio.sleep(1)
        for channel in slow:
            channel.abort()

    try:
        await phase("strangers", until(stranger_frames, siege.stranger_frames))
        await phase("no TLS", until(stranger_frames, siege.no_tls))
        await phase("half-open", hold())
        await phase("a peer", until(peer_frames, siege.peer_frames))
        await phase("floods", floods())
    finally:
        await siege.close()


class _Rate:
    """Averagings per second in each phase, and the most memory."""

    def __init__(self, honest: list[PeerProcess], outcome: Outcome) -> None:
        self._honest, self.outcome = honest, outcome

    @contextlib.contextmanager
    def of(self, phase: str):
        began, averagings = time.monotonic(), _averagings(self._honest)
        memory = self.outcome.after[0]["rss"]
        yield
        elapsed = time.monotonic() - began
        self.outcome.after = ask_all(self._honest, "figures")
        grown = (self.outcome.after[0]["rss"] - memory) / 1e6
        print(f"{phase}: {elapsed:.1f} s, memory {grown:+.1f} MB", flush=True)
        self.outcome.rates[phase] = (_averagings(self._honest) - averagings) / elapsed

    async def watch(self) -> None:
        import psutil

        processes = [
            (psutil.Process(peer.pid), then["rss"])
            for peer, then in zip(self._honest, self.outcome.before, strict=True)
        ]
        while True:
            grown = max(process.memory_info().rss - before for process, before in processes)
            self.outcome.most_grown_bytes = max(self.outcome.most_grown_bytes, grown)
            await asyncio.sleep(0.1)


def _averagings(honest: list[PeerProcess]) -> int:
    return min(figures["averagings"] for figures in ask_all(honest, "figures"))


def _settled(honest: list[PeerProcess], before: list[dict[str, Any]]) -> bool:
    now = ask_all(honest, "figures")
    return all(
        one["files"] <= then["files"] + 6 and one["tasks"] <= then["tasks"] + 8
        for one, then in zip(now, before, strict=True)
    )


def check(outcome: Outcome) -> None:
    for figures in outcome.after:
        assert not figures["faults"], figures["faults"]
        assert not figures["raised"]
        assert figures["peers"] == 1
    assert outcome.most_grown_bytes < 50e6, outcome
    assert outcome.after[0]["refused"] > 100, outcome
    for phase, rate in outcome.rates.items():
        assert rate > 0.2 * outcome.rates["before"], f"{phase}: {outcome}"
