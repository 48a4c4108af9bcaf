"""The fluid network: when things arrive, calculated by hand; its faults, its accounts, and that two runs are one."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.core.address import Endpoint
from shoal.core.errors import OptionError, PeerLost, ProtocolError
from shoal.core.loop import OWNER, run_virtual
from shoal.net import flows as flows_module
from shoal.net.channel import PAYLOAD_BYTES, PREFIX
from shoal.net.identity import Identity
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.net.memory_channel import BULK_BYTES, WINDOW_BYTES, MemoryChannel

MB = 1_000_000
LATENCY_SECONDS = 0.01
HEADER = b"h"
CLOSE = {"abs": 1e-6}


def now() -> float:
    return asyncio.get_running_loop().time()


class Lan:
    """Hosts "a", "b", ... with lines of 1 MB/s, each listening."""

    def __init__(self, hosts: str, **options: Any) -> None:
        self.network = MemoryNetwork(lambda: LATENCY_SECONDS, float(MB), **options)
        self.hosts: dict[str, MemoryTransport] = {}
        self.accepted: dict[str, list[MemoryChannel]] = {}
        for name in hosts:
            self.add(name)

    def add(self, name: str, **options: Any) -> MemoryTransport:
        identity = Identity(hashlib.sha256(name.encode()).digest())
        self.hosts[name] = self.network.transport(name, identity, **options)
        return self.hosts[name]

    async def start(self) -> Lan:
        for name, host in self.hosts.items():
            self.accepted[name] = []
            await host.start(Endpoint("any", 1), self.accepted[name].append)
        return self

    async def connect(self, one: str, other: str) -> tuple[MemoryChannel, MemoryChannel]:
        near = await self.hosts[one].dial(Endpoint(other, 1))
        far = self.accepted[other][-1]
        near.trust()
        far.trust()
        return near, far


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test(), limit_seconds=1000)

    run.__name__ = test.__name__
    return run


def of_size(count_bytes: int) -> bytes:
    """A payload with which a frame takes so many bytes on the lines."""
    return bytes(count_bytes - PREFIX.size - len(HEADER))


async def seconds(work: Coroutine[Any, Any, Any]) -> float:
    began = now()
    await work
    return now() - began


async def leaves(channel: MemoryChannel, count_bytes: int) -> float:
    """After how many seconds the last byte of a frame of this size has left."""
    return await seconds(channel.send(HEADER, of_size(count_bytes)))


# ---------------------------------------------------------------- bulk


@virtual
async def test_a_lone_frame_takes_its_bytes_over_the_rate_and_arrives_a_latency_later() -> None:
    lan = await Lan("ab").start()
    near, far = await lan.connect("a", "b")
    assert now() == pytest.approx(2 * LATENCY_SECONDS)
    arriving = asyncio.create_task(seconds(far.receive()))
    assert await leaves(near, MB) == pytest.approx(1.0, **CLOSE)
    assert await arriving == pytest.approx(1.0 + LATENCY_SECONDS, **CLOSE)


@virtual
async def test_two_flows_into_one_downlink_have_half_of_it_each() -> None:
    lan = await Lan("abc").start()
    (one, _), (other, _) = await lan.connect("a", "c"), await lan.connect("b", "c")
    assert await asyncio.gather(leaves(one, MB), leaves(other, MB)) == pytest.approx([2.0, 2.0], **CLOSE)


@virtual
async def test_three_unequal_ones_share_what_the_ended_ones_leave() -> None:
    """0.3, 0.6 and 0.9 MB into 0.9 MB/s: 1 s at 0.3, then 2/3 s at 0.45, then 0.3 MB alone."""
    lan = await Lan("abcd").start()
    lan.hosts["d"].downlink.bytes_per_second = 0.9 * MB
    channels = [(await lan.connect(name, "d"))[0] for name in "abc"]
    sizes = [300_000, 600_000, 900_000]
    times = await asyncio.gather(*(leaves(channel, size) for channel, size in zip(channels, sizes, strict=True)))
    assert times == pytest.approx([1.0, 1.0 + 2 / 3, 2.0], **CLOSE)


@virtual
async def test_what_a_slow_sender_can_not_use_goes_to_the_others() -> None:
    lan = await Lan("abc").start()
    lan.hosts["a"].uplink.bytes_per_second = 0.2 * MB
    (slow, _), (fast, _) = await lan.connect("a", "c"), await lan.connect("b", "c")
    assert await asyncio.gather(leaves(slow, 200_000), leaves(fast, 800_000)) == pytest.approx([1.0, 1.0], **CLOSE)


@virtual
async def test_a_new_rate_acts_at_once_in_the_middle_of_a_transfer() -> None:
    lan = await Lan("ab").start()
    near, _ = await lan.connect("a", "b")
    asyncio.get_running_loop().call_later(0.5, setattr, lan.hosts["a"].uplink, "bytes_per_second", 0.25 * MB)
    assert await leaves(near, MB) == pytest.approx(0.5 + 2.0, **CLOSE)


@virtual
async def test_an_aborted_flow_frees_its_lines_for_the_others() -> None:
    """0.25 MB at half of the rate, then 0.75 MB alone; the receiver learns of the end a latency later."""
    lan = await Lan("abc").start()
    (one, end), (other, _) = await lan.connect("a", "c"), await lan.connect("b", "c")
    asyncio.get_running_loop().call_later(0.5, one.abort)
    lost, time = await asyncio.gather(leaves(one, MB), leaves(other, MB), return_exceptions=True)
    assert isinstance(lost, PeerLost)
    assert time == pytest.approx(0.5 + 0.75, **CLOSE)
    with pytest.raises(PeerLost):
        await end.receive()


@virtual
async def test_both_directions_of_an_asymmetric_line_have_their_own_rate() -> None:
    lan = await Lan("ab").start()
    lan.hosts["a"].uplink.bytes_per_second = 0.1 * MB
    near, far = await lan.connect("a", "b")
    assert await asyncio.gather(leaves(near, MB // 10), leaves(far, MB)) == pytest.approx([1.0, 1.0], **CLOSE)


@virtual
async def test_latency_may_depend_on_the_two_hosts() -> None:
    lan = await Lan("abc", pair_latency_seconds=lambda dialler, listener: {"b": 0.05, "c": 0.2}[listener]).start()
    for name, latency_seconds in (("b", 0.05), ("c", 0.2)):
        began = now()
        near, far = await lan.connect("a", name)
        assert now() - began == pytest.approx(2 * latency_seconds, **CLOSE)
        await near.send(HEADER)
        assert await seconds(far.receive()) == pytest.approx(latency_seconds, abs=1e-4)


@virtual
async def test_both_ends_hear_of_progress_all_the_time() -> None:
    lan = await Lan("ab").start()
    near, far = await lan.connect("a", "b")
    lan.hosts["b"].downlink.bytes_per_second = 0.1 * MB
    sent, received = [(now(), 0)], [(now(), 0)]
    near.on_traffic = lambda out, into: sent.append((now(), out))
    far.on_traffic = lambda out, into: received.append((now(), into))
    await asyncio.gather(leaves(near, MB), far.receive())
    for heard in (sent, received):
        assert sum(count for _, count in heard) == MB
        assert max(after - before for (before, _), (after, _) in itertools.pairwise(heard)) <= 0.25
    assert sent[1][0] + LATENCY_SECONDS == pytest.approx(received[1][0], **CLOSE)


# ---------------------------------------------------------------- small frames


@virtual
async def test_a_small_frame_waits_behind_bulk_of_its_channel_and_of_no_other() -> None:
    lan = await Lan("ab").start()
    (near, far), (other, other_far) = await lan.connect("a", "b"), await lan.connect("a", "b")
    bulk = asyncio.create_task(leaves(near, MB))
    await asyncio.sleep(0)
    behind = asyncio.create_task(near.send(b"behind"))
    await other.send(b"beside")
    assert await seconds(other_far.receive()) == pytest.approx(LATENCY_SECONDS, abs=1e-4)
    assert not near.post(b"no room")
    assert len((await far.receive())[1]) == MB - 9
    assert (await far.receive())[0] == b"behind"
    assert now() == pytest.approx(4 * LATENCY_SECONDS + 1.0 + LATENCY_SECONDS, abs=1e-4)
    await asyncio.gather(bulk, behind)


@virtual
async def test_packets_take_their_turn_on_a_line() -> None:
    """A thousand of 1 kB from one host to ten others: no faster than its uplink."""
    lan = await Lan("abcdefghijk").start()
    ends = [await lan.connect("a", name) for name in "bcdefghijk"]
    began = now()
    for _ in range(100):
        for near, _ in ends:
            assert near.post(bytes(1000 - PREFIX.size))
    for _, far in ends:
        for _ in range(100):
            await far.receive()
    assert now() - began == pytest.approx(1.0 + LATENCY_SECONDS, abs=1e-3)


@virtual
async def test_a_small_payload_is_sent_when_it_left_the_uplink() -> None:
    lan = await Lan("ab").start()
    near, _ = await lan.connect("a", "b")
    assert await leaves(near, BULK_BYTES // 2) == pytest.approx(BULK_BYTES / 2 / MB, **CLOSE)


@virtual
async def test_a_large_call_is_a_flow_and_what_follows_comes_behind_it() -> None:
    """`send` does not wait for it; even the end of the connection travels behind."""
    lan = await Lan("ab").start()
    near, far = await lan.connect("a", "b")
    assert await seconds(near.send(bytes(MB - PREFIX.size))) == 0
    assert near.post(b"second")
    bulk = asyncio.create_task(near.send(b"third", bytes(10_000)))
    await asyncio.sleep(0)
    assert not bulk.done()
    assert len((await far.receive())[0]) == MB - PREFIX.size
    assert now() == pytest.approx(3 * LATENCY_SECONDS + 1.0, abs=1e-4)
    assert [(await far.receive())[0] for _ in range(2)] == [b"second", b"third"]
    await bulk
    await near.send(bytes(MB))
    near.close()
    assert len((await far.receive())[0]) == MB
    with pytest.raises(PeerLost):
        await far.receive()


# ---------------------------------------------------------------- faults


@virtual
async def test_a_partition_holds_everything_back_until_it_heals() -> None:
    """1 MB, cut for 1.5 s after half of it; frames that are on their way or sent meanwhile arrive in order."""
    lan = await Lan("abc").start()
    (near, far), (calls, calls_far) = await lan.connect("a", "b"), await lan.connect("a", "b")
    beside, beside_far = await lan.connect("a", "c")
    began = now()
    bulk = asyncio.create_task(leaves(near, MB))
    await asyncio.sleep(0.495)
    await calls.send(b"on its way")
    await asyncio.sleep(0.005)
    lan.network.partition([["a", "c"], ["b"]])
    await calls.send(b"meanwhile")
    await beside.send(b"same side")
    assert await seconds(beside_far.receive()) == pytest.approx(LATENCY_SECONDS, abs=1e-4)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.4):
            await calls_far.receive()
    await asyncio.sleep(began + 2.0 - now())
    lan.network.heal()
    assert [(await calls_far.receive())[0] for _ in range(2)] == [b"on its way", b"meanwhile"]
    assert now() - began == pytest.approx(2.0, abs=1e-3)
    await far.receive()
    assert now() - began == pytest.approx(2.5 + LATENCY_SECONDS, abs=1e-4)
    assert await bulk == pytest.approx(2.5, abs=1e-4)


@virtual
async def test_bulk_across_a_long_partition_is_given_up_and_the_far_end_learns_of_it_later() -> None:
    lan = await Lan("ab").start()
    near, far = await lan.connect("a", "b")
    lan.network.partition([["a"], ["b"]])
    began = now()
    with pytest.raises(PeerLost, match="took nothing of what was sent to it for 30 s"):
        await near.send(HEADER, bytes(MB))
    assert now() - began == pytest.approx(30.0)
    received = []
    far.on_traffic = lambda out, into: received.append(into)
    assert far.post(b"nobody reads this")
    await asyncio.sleep(5)
    lan.network.heal()
    with pytest.raises(PeerLost):
        await far.receive()
    assert now() - began == pytest.approx(35.0)
    assert sum(received) == 0


@virtual
async def test_who_dials_across_a_partition_gets_through_after_it_or_gives_up() -> None:
    lan = await Lan("ab").start()
    lan.network.partition([["b"]])
    asyncio.get_running_loop().call_later(5, lan.network.heal)
    assert await seconds(lan.connect("a", "b")) == pytest.approx(7.0 + 2 * LATENCY_SECONDS)
    lan.network.partition([["b"]])
    began = now()
    with pytest.raises(PeerLost, match=r"can't be reached \(Connection timed out\)"):
        await lan.connect("a", "b")
    assert now() - began == pytest.approx(127.0)


@virtual
async def test_a_host_behind_a_nat_dials_out_and_can_not_be_dialled() -> None:
    lan = Lan("a")
    lan.add("home", inbound=False)
    await lan.start()
    near, far = await lan.connect("home", "a")
    await far.send(b"an answer")
    assert (await near.receive())[0] == b"an answer"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await lan.connect("a", "home")
    await lan.connect("home", "home")


@virtual
async def test_a_broken_connection_is_lost_at_both_ends_and_only_that_one() -> None:
    lan = await Lan("abc").start()
    (near, far), (beside, _) = await lan.connect("a", "b"), await lan.connect("a", "c")
    sending = asyncio.create_task(near.send(HEADER, bytes(MB)))
    await asyncio.sleep(0.1)
    lan.network.break_connection("b", "a")
    with pytest.raises(PeerLost, match="the connection to b:1 closed: connection reset"):
        await sending
    with pytest.raises(PeerLost, match="the connection to a closed: connection reset"):
        await far.receive()
    assert await leaves(beside, MB) == pytest.approx(1.0, **CLOSE)


@virtual
async def test_damage_to_one_frame_breaks_its_connection_as_encryption_would() -> None:
    lan = await Lan("ab").start()
    (near, far), (other, other_far) = await lan.connect("a", "b"), await lan.connect("a", "b")
    await near.send(b"good")
    await asyncio.sleep(1)
    lan.network.corrupt("a", "b")
    await far.send(b"the other way")
    await near.send(b"damaged")
    assert (await far.receive())[0] == b"good"
    for end in (near, far):
        with pytest.raises(PeerLost, match="bad record mac"):
            while True:
                await end.receive()
    await other.send(b"fine")
    assert (await other_far.receive())[0] == b"fine"


@virtual
async def test_what_a_paused_host_sent_arrives_and_who_is_dialled_by_it_is_not_paused_with_it() -> None:
    lan, loop = await Lan("ab").start(), asyncio.get_running_loop()
    owners = []
    lan.hosts["b"]._accept = lambda channel: (lan.accepted["b"].append(channel), owners.append(OWNER.get()))

    async def life() -> None:
        OWNER.set("a")
        near, _ = await lan.connect("a", "b")
        await near.send(HEADER, bytes(MB))

    living = asyncio.create_task(life())
    await asyncio.sleep(0.5)
    loop.pause("a")
    await lan.accepted["b"][0].receive()
    assert now() == pytest.approx(1.0 + 3 * LATENCY_SECONDS, abs=1e-4)
    assert owners == [None]
    assert not living.done()
    loop.resume("a")
    await living


# ---------------------------------------------------------------- scale, windows, limits


@virtual
async def test_a_small_payload_can_stand_for_a_large_one() -> None:
    """10 kB that count as 1 MB, on the lines and for who counts traffic; what is received is what was sent."""
    lan = await Lan("ab", payload_scale=100.0).start()
    near, far = await lan.connect("a", "b")
    received = []
    far.on_traffic = lambda out, into: received.append(into)
    assert await seconds(near.send(HEADER, b"x" * 10_000)) == pytest.approx((MB + 9) / MB, **CLOSE)
    assert (await far.receive())[1] == b"x" * 10_000
    assert sum(received) == MB + 9


@virtual
async def test_the_window_is_scaled_and_the_limits_are_not() -> None:
    lan = await Lan("ab", payload_scale=100.0).start()
    near, far = await lan.connect("a", "b")
    for _ in range(WINDOW_BYTES // (10_000 * 100) + 1):
        await near.send(HEADER, bytes(10_000))
    waiting = asyncio.create_task(near.send(HEADER, bytes(10_000)))
    await asyncio.sleep(20)
    assert near._on_the_way_bytes > WINDOW_BYTES and not waiting.done()
    await far.receive()
    await waiting
    lan = await Lan("ab", payload_scale=0.001).start()
    near, far = await lan.connect("a", "b")
    await near.send(HEADER, bytes(PAYLOAD_BYTES + 1))
    with pytest.raises(ProtocolError, match=f"a frame of 1 . {PAYLOAD_BYTES + 1} bytes"):
        await far.receive()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_values_are_refused(bad: float) -> None:
    with pytest.raises(OptionError, match="payload_scale"):
        MemoryNetwork(payload_scale=bad)
    with pytest.raises(OptionError, match="bytes_per_second"):
        Lan("a").hosts["a"].uplink.bytes_per_second = bad


# ---------------------------------------------------------------- accounts


async def trouble(lan: Lan, choose: random.Random) -> None:
    """Changed rates, damaged frames, broken connections, partitions."""
    for _ in range(30):
        await asyncio.sleep(choose.uniform(0, 1))
        one, other = choose.sample(list(lan.hosts), 2)
        line = choose.choice([lan.hosts[one].uplink, lan.hosts[one].downlink])
        line.bytes_per_second = choose.choice([0.1, 1.0, 3.0]) * MB
        fault = choose.choice([lan.network.corrupt, lan.network.break_connection, None, None])
        if fault:
            fault(one, other)
        lan.network.partition([[one, other]] if choose.random() < 0.2 else [])
    lan.network.heal()


async def story(seed: int) -> str:
    """Random transfers and trouble; a hash of when what arrived. The accounts of all lines are looked at all along."""
    choose, names = random.Random(seed), "abcdefgh"
    lan = await Lan(names).start()
    log: list[tuple[float, str, int]] = []

    def check() -> None:
        for host in lan.hosts.values():
            for line in (host.uplink, host.downlink):
                assert line.carried_bytes <= line.possible_bytes + line.waiting_bytes + 1

    async def read(channel: MemoryChannel, who: str) -> None:
        while True:
            header, payload = await channel.receive()
            log.append((now(), who, len(header) + len(payload)))
            check()

    async def transfer(number: int) -> None:
        choose = random.Random(f"{seed} {number}")
        one, other = choose.sample(names, 2)
        await asyncio.sleep(choose.uniform(0, 5))
        reading = None
        try:
            near, far = await lan.connect(one, other)
            reading = asyncio.create_task(read(far, f"{one}{other}"))
            for _ in range(choose.randrange(1, 20)):
                near.post(bytes(choose.randrange(1, 3000)))
                await near.send(HEADER, bytes(choose.choice([100, 5_000, 100_000, 700_000])))
            await asyncio.sleep(1)
        except PeerLost as error:
            log.append((now(), str(error), number))
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    await asyncio.gather(trouble(lan, choose), *(transfer(number) for number in range(40)))
    check()
    assert sum(host.uplink.carried_bytes for host in lan.hosts.values()) > 10 * MB
    return hashlib.sha256(repr(log).encode()).hexdigest()


@pytest.mark.parametrize("seed", range(5))
def test_no_line_ever_carries_more_than_it_can(seed: int) -> None:
    run_virtual(story(seed))


def test_two_runs_are_one_whatever_the_hashes() -> None:
    program = "import test_flows as t; print(t.run_virtual(t.story(1)))"
    folder, source = Path(__file__).parent, Path(flows_module.__file__).parents[2]
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(folder), str(source)])
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        digests.add(done.stdout.strip())
    assert digests == {run_virtual(story(1))}


@virtual
async def test_bulk_yields_what_packets_take_of_the_line() -> None:
    """Calls of 0.4 MB/s for 5 s beside bulk: 3 MB of bulk take these 5 s, and no line was used twice."""
    lan = await Lan("ab").start()
    (bulk, _), (calls, _) = await lan.connect("a", "b"), await lan.connect("a", "b")
    uplink, began = lan.hosts["a"].uplink, now()

    async def call() -> None:
        for _ in range(2000):
            calls.post(bytes(1000 - PREFIX.size))
            calls._on_the_way_bytes = 0
            await asyncio.sleep(0.0025)

    calling = asyncio.create_task(call())
    for _ in range(3):
        await bulk.send(HEADER, of_size(MB))
    assert now() - began == pytest.approx(5.0, abs=0.3)
    assert uplink.waiting_bytes < 0.3 * MB
    await calling


# ---------------------------------------------------------------- what it costs


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often rates were computed, by the number of flows."""
    counted: Counter[int] = Counter()
    honest = flows_module.fair_rates

    def watched(ups: list[int], downs: list[int], capacities: list[float]) -> list[float]:
        counted[len(ups)] += 1
        return honest(ups, downs, capacities)

    monkeypatch.setattr(flows_module, "fair_rates", watched)
    return counted


def test_rates_are_computed_once_per_instant_and_only_for_what_is_connected(shared) -> None:
    async def main() -> None:
        lan = await Lan("abcdef").start()
        channels = [(await lan.connect(*pair))[0] for pair in ("ab", "ab", "cd", "ef")]
        late = asyncio.create_task(leaves(channels[3], MB))
        await asyncio.gather(*(leaves(channel, MB) for channel in channels[:3]))
        await late

    run_virtual(main())
    assert shared == {2: 1, 1: 2}


def test_the_next_part_of_a_stream_changes_no_rates(shared) -> None:
    async def main() -> None:
        lan = await Lan("abc").start()
        channels = [(await lan.connect(name, "c"))[0] for name in "ab"]

        async def stream(channel: MemoryChannel, count_bytes: int) -> None:
            for _ in range(20):
                await channel.send(HEADER, of_size(count_bytes))

        await asyncio.gather(stream(channels[0], 50_000), stream(channels[1], 70_000))

    run_virtual(main())
    assert shared == {2: 1, 1: 1}


def test_in_a_crowd_rates_follow_a_little_later(monkeypatch, shared) -> None:
    """Ends and beginnings of a hundredth of a second are taken together; no line carries more than it can."""
    monkeypatch.setattr(flows_module, "CROWD_FLOWS", 10)

    async def main() -> None:
        lan = await Lan("abcdefgh").start()
        pairs = [one + other for one in "abcd" for other in "efgh"]
        channels = [(await lan.connect(*pair))[0] for pair in pairs]
        sizes = [400_000 + 100 * number for number in range(16)]
        times = await asyncio.gather(*(leaves(channel, size) for channel, size in zip(channels, sizes, strict=True)))
        assert times == pytest.approx([size * 4 / MB for size in sizes], abs=0.03)
        for host in lan.hosts.values():
            for line in (host.uplink, host.downlink):
                assert line.carried_bytes <= line.possible_bytes + line.waiting_bytes + 1

    run_virtual(main())
    assert shared.total() <= 8
