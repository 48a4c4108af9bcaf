"""The whole protocol stack on virtual time: training, deaths, newcomers, restarts, one seed one run."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from random import Random

import pytest
import torch

from shoal.core.errors import CharterMismatch, JoinError, ModelMismatch, RoundError
from shoal.planning.shares import shares_by_bandwidth
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL
from shoal.sim import Machine, SimPeer, VirtualReplica, World
from shoal.strategies.allreduce import AllReduce

EVERY_SECOND = AllReduce(every_seconds=1.0)
MARK = 1e6
"""A value that no fresh replica reaches: whoever has it holds the trained state."""


def replica(value: float = 0.0, drift: float = 1.0, step_seconds: float = 0.1, size: int = 1000) -> VirtualReplica:
    return VirtualReplica(torch.full((size,), value), drift=drift, step_seconds=step_seconds)


async def pair(world: World, size: int = 1000) -> tuple[SimPeer, SimPeer]:
    founder = await world.start("a", strategy=EVERY_SECOND, replica=replica(MARK, size=size))
    await founder.attached.wait()
    other = await world.start("b", peers=[founder.address], replica=replica(size=size))
    await other.attached.wait()
    return founder, other


def spread(peers: list[SimPeer]) -> float:
    values = torch.stack([peer.replica.tensors[0] for peer in peers if peer.replica])
    return float((values - values.mean(0)).abs().max())


def test_unequal_peers_train_as_one() -> None:
    async def scenario(world: World) -> None:
        peers = list(await pair(world))
        peers.append(await world.start("c", peers=[peers[0].address], replica=replica(drift=3.0, step_seconds=0.3)))
        await asyncio.sleep(30)
        assert all(peer.peer.history.applied_count >= 28 for peer in peers)
        assert not any(peer.peer.history.failures for peer in peers)
        assert all(entry.exact for peer in peers for entry in peer.peer.history.applied)
        # all drift 10 a second; between averagings they differ by at most the steps of one interval and a bit
        assert spread(peers) < 15
        assert abs(float(peers[0].replica.tensors[0][0]) - (MARK + 10 * asyncio.get_running_loop().time())) < 15

    World(seed=1).run(scenario)


def test_no_step_is_lost_while_an_averaging_runs() -> None:
    """Two peers of equal speed and drift on slow lines: the mean of their values grows by the mean of their steps."""

    async def scenario(world: World) -> None:
        a, b = await pair(world)

        def means() -> tuple[float, float]:
            values = [float(peer.replica.tensors[0][0]) - MARK for peer in (a, b)]
            return sum(values) / 2, (a.replica.steps + b.replica.steps) / 2

        await asyncio.sleep(10)
        value_before, steps_before = means()
        await asyncio.sleep(30)
        value_after, steps_after = means()
        assert a.peer.history.applied_count >= 10
        assert max(entry.stale_steps for entry in a.peer.history.applied) >= 5
        assert abs((value_after - value_before) - (steps_after - steps_before)) <= 0.5

    World(seed=2, latency_seconds=0.1, bytes_per_second=5e3).run(scenario)


@pytest.mark.parametrize("seed", range(10))
def test_a_death_at_any_moment_leaves_the_others_averaging(seed: int) -> None:
    async def scenario(world: World) -> None:
        founder = await world.start("a", strategy=EVERY_SECOND, replica=replica(MARK, size=20_000))
        others = [
            await world.start(name, peers=[founder.address], replica=replica(step_seconds=0.1 * speed, size=20_000))
            for name, speed in (("b", 1), ("c", 2), ("d", 4))
        ]
        peers = [founder, *others]
        await asyncio.sleep(5 + Random(seed).random())
        victim = peers.pop(seed % 4)
        await victim.crash()
        died_at = asyncio.get_running_loop().time()
        before = [peer.peer.history.applied_count for peer in peers]
        await asyncio.sleep(5)
        for peer, count in zip(peers, before, strict=True):
            assert victim.id not in peer.peer.members.members
            assert peer.peer.history.applied_count >= count + 2, list(peer.peer.history.failures)
            assert len(peer.peer.history.failures) <= 2
            times = [entry.at_seconds for entry in peer.peer.history.applied]
            assert max(later - earlier for earlier, later in itertools.pairwise(times[-6:])) < 5
        assert asyncio.get_running_loop().time() == died_at + 5
        assert spread(peers) < 40

    World(seed=seed, bytes_per_second=1e6).run(scenario)


def test_a_newcomer_does_not_wait_for_a_peer_that_died_before_it_came() -> None:
    """The register lists the dead one for a while yet."""

    async def scenario(world: World) -> None:
        a, b = await pair(world)
        dead = await world.start("dead", peers=[a.address], replica=replica())
        await asyncio.sleep(15)
        await dead.crash()
        late = await world.start("late", peers=[b.address], replica=replica())
        await late.attached.wait()
        await asyncio.sleep(5)
        assert late.peer.register.everybody().keys() == {a.id, b.id, late.id}
        for peer in (a, b, late):
            times = [entry.at_seconds for entry in list(peer.peer.history.applied)[-4:]]
            assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 1.5
            assert len(peer.peer.history.applied[-1].members) == 3

    World(seed=12).run(scenario)


def test_a_newcomer_takes_over_the_state_and_does_not_dilute_it() -> None:
    async def scenario(world: World) -> None:
        a, b = await pair(world)
        await asyncio.sleep(10)
        late = await world.start("late", peers=[b.address], replica=replica(value=-5e6))
        await late.attached.wait()
        assert float(late.replica.tensors[0].min()) > MARK
        await asyncio.sleep(5)
        assert all(float(peer.replica.tensors[0].min()) > MARK for peer in (a, b, late))
        assert late.replica.progress > 100

    World(seed=3).run(scenario)


@pytest.mark.parametrize("who", ["founder", "joiner"])
def test_a_peer_of_two_restarted_empty_twenty_times_finds_its_run(who: str) -> None:
    """Each restart with the first command, and what the state folder keeps: identity, port and the other's address."""

    async def scenario(world: World) -> None:
        a, b = await pair(world)
        keys = {"a": world.random.randbytes(32), "b": world.random.randbytes(32)}
        for _ in range(20):
            await asyncio.sleep(1 + world.random.random())
            old, stays = (a, b) if who == "founder" else (b, a)
            await old.crash()
            await asyncio.sleep(world.random.random())
            fresh = await world.start(
                old.name,
                peers=[] if who == "founder" else [stays.address],
                remembered=[stays.address],
                strategy=EVERY_SECOND if who == "founder" else None,
                replica=replica(-1.0),
                key=keys[old.name],
            )
            await fresh.attached.wait()
            a, b = (fresh, stays) if who == "founder" else (stays, fresh)
            assert a.peer.members.charter.charter_id == b.peer.members.charter.charter_id
            assert min(float(p.replica.tensors[0].min()) for p in (a, b)) > MARK
        await asyncio.sleep(5)
        assert a.peer.history.applied_count >= 3
        assert b.peer.history.applied_count >= 3

    World(seed=4).run(scenario)


def test_a_founder_that_lost_its_memory_yields_to_its_old_run() -> None:
    """It founds a second run at the old place; the other peer finds it there, and the untrained run yields."""

    async def scenario(world: World) -> None:
        a, b = await pair(world)
        await asyncio.sleep(10)
        await a.crash()
        await asyncio.sleep(1)
        fresh = await world.start("a", strategy=EVERY_SECOND, replica=replica(-1.0))
        await fresh.attached.wait()
        assert float(fresh.replica.tensors[0].max()) < 100  # it began to train on its own
        await asyncio.sleep(8)
        assert fresh.peer.log.counts["yielded"] == 1
        assert fresh.peer.members.charter.charter_id == b.peer.members.charter.charter_id
        assert min(float(peer.replica.tensors[0].min()) for peer in (fresh, b)) > MARK
        assert b.peer.log.counts["yielded"] == 0
        assert fresh.peer.history.applied_count >= 1

    World(seed=5).run(scenario)


def test_a_restarted_founder_that_first_meets_a_peer_without_a_state_founds_nothing() -> None:
    """It kept its identity, and its run's charter names it as the founder: yet its state is gone, and it catches up."""

    async def scenario(world: World) -> None:
        key = world.random.randbytes(32)
        a = await world.start("a", strategy=EVERY_SECOND, replica=replica(MARK), key=key)
        await a.attached.wait()
        b = await world.start("b", peers=[a.address], replica=replica())
        idle = await world.start("idle", peers=[a.address])
        await asyncio.sleep(10)
        await a.crash()
        await asyncio.sleep(0.5)
        fresh = await world.start("a", remembered=[idle.address], strategy=EVERY_SECOND, replica=replica(-1.0), key=key)
        await fresh.attached.wait()
        await asyncio.sleep(5)
        assert min(float(peer.replica.tensors[0].min()) for peer in (fresh, b)) > MARK
        assert fresh.peer.history.applied_count >= 2

    World(seed=9).run(scenario)


def test_a_peer_that_yields_to_a_run_which_then_dies_goes_on_with_its_own() -> None:
    async def scenario(world: World) -> None:
        a, b = await pair(world, size=100_000)
        await asyncio.sleep(10)
        await a.crash()
        fresh = await world.start("a", strategy=EVERY_SECOND, replica=replica(size=100_000))
        await fresh.attached.wait()
        yielded = asyncio.Event()
        fresh.peer.members.on_change.append(lambda: yielded.set() if fresh.peer.log.counts["yielded"] else None)
        await yielded.wait()
        await b.crash()
        steps = fresh.replica.steps
        await asyncio.sleep(40)
        assert fresh.peer.members.me.state == "training"
        assert fresh.replica.steps > steps + 300
        late = await world.start("late", peers=[fresh.address], replica=replica(size=100_000))
        await late.attached.wait()
        await asyncio.sleep(5)
        assert late.peer.history.applied_count >= 2

    World(seed=10).run(scenario)


def test_a_member_that_gives_an_averaging_up_does_not_hold_up_the_others() -> None:
    async def scenario(world: World) -> None:
        strategy = AllReduce(every_seconds=3600.0)
        first = await world.start("a", strategy=strategy)
        peers = [first, *[await world.start(name, peers=[first.address]) for name in "bc"]]
        await asyncio.sleep(1)
        vectors = torch.ones(500_000), torch.empty(0, dtype=torch.float64)
        averaging = [
            asyncio.create_task(strategy.all_reduce(peer.peer, CALL, vectors, 1.0, [((500_000,), "float32")]))
            for peer in peers
        ]
        await asyncio.sleep(1)
        averaging[0].cancel()
        given_up_at = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(*averaging, return_exceptions=True)
        assert asyncio.get_running_loop().time() < given_up_at + 5
        assert all(isinstance(outcome, RoundError | Outcome) for outcome in outcomes[1:]), outcomes

    World(seed=11, bytes_per_second=1e6).run(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_where_views_of_who_is_there_differ_two_rolls_become_one(seed: int) -> None:
    """News of who is there need not reach all in the same moment: collectors differ, averagings go on."""

    async def scenario(world: World) -> None:
        founder = await world.start("a", strategy=EVERY_SECOND, replica=replica(MARK))
        await founder.attached.wait()
        rest = [await world.start(name, peers=[founder.address], replica=replica()) for name in "bcd"]
        peers = [founder, *rest]
        await asyncio.sleep(3)
        for _ in range(60):
            await asyncio.sleep(0.3 * world.random.random())
            late, unknown = world.random.sample(peers, 2)
            record = late.peer.members.members.pop(unknown.id)
            await asyncio.sleep(0.2 * world.random.random())
            late.peer.members.members.setdefault(unknown.id, record)
        await asyncio.sleep(3)
        for peer in peers:
            assert not peer.peer.history.failures, peer.peer.history.failures
            times = [entry.at_seconds for entry in peer.peer.history.applied]
            assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 3.5

    World(seed=seed).run(scenario)


def test_shares_follow_the_measured_bandwidths() -> None:
    """Three peers at 1 MB/s and one at a quarter of that, which is measured, and therefore reduces nothing."""

    async def scenario(world: World) -> None:
        founder = await world.start("a", strategy=AllReduce(every_seconds=5.0), replica=replica(size=250_000))
        await founder.attached.wait()
        for name, rate in (("b", 1e6), ("c", 1e6), ("slow", 0.25e6)):
            await world.start(
                name, peers=[founder.address], replica=replica(size=250_000), machine=Machine(bytes_per_second=rate)
            )
        await asyncio.sleep(120)
        measured = {peer.name: peer.peer.bandwidth() for peer in world.peers}
        assert measured["slow"] == pytest.approx(0.25e6, rel=0.2)
        assert all(measured[name] == pytest.approx(1e6, rel=0.3) for name in "abc")
        shares = shares_by_bandwidth(list(measured.values()))
        assert shares[3] == 0.0
        assert founder.peer.history.applied_count >= 12

    World(seed=8, bytes_per_second=1e6).run(scenario)


def test_two_peers_of_one_run_that_meet_late_become_one_swarm() -> None:
    """Two joiners come through different peers at once: each hears of the other."""

    async def scenario(world: World) -> None:
        a, b = await pair(world)
        c, d = await asyncio.gather(
            world.start("c", peers=[a.address], replica=replica()),
            world.start("d", peers=[b.address], replica=replica()),
        )
        await asyncio.sleep(2)
        for peer in (a, b, c, d):
            assert len(peer.peer.members.members) == 3

    World(seed=6).run(scenario)


def test_refusals_are_typed() -> None:
    async def scenario(world: World) -> None:
        a, _ = await pair(world)
        with pytest.raises(CharterMismatch) as mismatch:
            await world.start("other-strategy", peers=[a.address], strategy=AllReduce(every_seconds=7.0))
        assert mismatch.value.field == "strategy.every_seconds"
        assert any(event.kind == "refused" for event in a.peer.log.recent)
        with pytest.raises(JoinError) as nobody:
            await world.start("lonely", peers=[a.address.replace("@a:", "@nowhere:")])
        assert "connection refused" in str(nobody.value)
        other_model = await world.start("other-model", peers=[a.address], replica=replica(size=999))
        await asyncio.sleep(1)
        assert not other_model.attached.is_set()
        assert isinstance(other_model.peer.host.faults.pop(), ModelMismatch)
        assert any("could not take part" in event.reason for event in a.peer.log.recent)

    World(seed=7).run(scenario)


DIGEST = """
import asyncio, {first}
import torch
from shoal.sim import Machine, VirtualReplica, World
from shoal.strategies.allreduce import AllReduce

async def scenario(world):
    def replica():
        return VirtualReplica(torch.zeros(5000), drift=1.0, step_seconds=0.05)
    a = await world.start("a", strategy=AllReduce(every_seconds=0.5), replica=replica())
    rest = [await world.start(name, peers=[a.address], replica=replica()) for name in "bcde"]
    await asyncio.sleep(5)
    await rest[1].crash()
    await asyncio.sleep(5)

world = World(seed={seed})
world.run(scenario)
print(world.digest())
"""


def digest_of(seed: int, first: str, hash_seed: str) -> str:
    code = DIGEST.format(seed=seed, first=first)
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed, "PATH": ""}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    return run.stdout.strip()


def test_one_seed_is_one_run_in_any_process() -> None:
    one, same, other = digest_of(1, "json", "1"), digest_of(1, "decimal", "2"), digest_of(2, "json", "1")
    assert len(one) == 64
    assert one == same
    assert one != other
