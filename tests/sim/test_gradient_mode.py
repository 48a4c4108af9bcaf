"""Gradient mode on virtual time: who steps with whom, and what becomes of those who are slow, late, new, or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from crowd import now
from learners import events, given_by_name, learner, replay, start, steps_of

from shoal.protocols.mean_gradients import KEPT_STEPS
from shoal.protocols.replica import State
from shoal.protocols.taking_part import REPAIR_SECONDS
from shoal.sim import Machine, SimPeer, World
from shoal.strategies import AllReduce, Moshpit

TARGET = 64


def gathering(target: int = TARGET, **options: float) -> AllReduce:
    return AllReduce(average="gradients", target_batch=target, **options)


async def reach(peers: list[SimPeer], step: int, limit_seconds: float = 120.0) -> None:
    """Return when all have taken that many steps. All are at rest then, or within the next gathering."""
    until = now() + limit_seconds
    while any(peer.replica.progress < step for peer in peers):
        assert now() < until, [peer.replica.progress for peer in peers]
        await asyncio.sleep(0.02)


def assert_equal(peers: list[SimPeer], tolerance: float = 1e-6) -> None:
    """Those that are at the same step hold the same values."""
    by_step: dict[int, list[SimPeer]] = {}
    for peer in peers:
        by_step.setdefault(peer.replica.progress, []).append(peer)
    for level in by_step.values():
        for peer in level[1:]:
            assert torch.allclose(peer.replica.tensors[0], level[0].replica.tensors[0], atol=tolerance, rtol=0)


# ---------------------------------------------------------------- the mean gradient of the swarm


@pytest.mark.parametrize("paces", [[0.1], [0.1, 0.4], [0.1, 0.1, 0.13, 0.4]])
def test_one_process_that_replays_the_reported_batches_ends_equal(paces: list[float]) -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, paces, gathering())
        await reach(peers, 20)
        for peer in peers:
            assert (peer.replica.tensors[0] - replay(peers, peer.replica.progress)).abs().max() < 1e-5
            assert not peer.peer.history.failures
            assert all(step.exact for step in steps_of(peer))

    World(seed=1).run(scenario)


def test_a_step_has_the_target_and_little_more() -> None:
    """Nobody ends another batch that is not needed: what is over the target is the batches that were under way."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.1, 0.1, 0.1], gathering())
        await reach(peers, 30)
        for step in steps_of(peers[0])[5:]:
            assert len(step.given) == 4
            assert TARGET <= step.samples <= 1.25 * TARGET

    World(seed=2).run(scenario)


def test_peers_of_a_grid_step_together() -> None:
    """Nine in groups of three: two rounds, the exact mean, equal replicas up to rounding."""

    async def scenario(world: World) -> None:
        strategy = Moshpit(group_size=3, average="gradients", target_batch=144)
        peers = await start(world, [0.1] * 9, strategy)
        await reach(peers, 10)
        assert_equal(peers)
        assert (peers[0].replica.tensors[0] - replay(peers, peers[0].replica.progress)).abs().max() < 1e-5
        assert len(steps_of(peers[0])[-1].given) == 9

    World(seed=3).run(scenario)


# ---------------------------------------------------------------- slow ones, and targets that do not fit


def test_a_peer_ten_times_slower_gives_within_three_steps_and_stays_in() -> None:
    async def scenario(world: World) -> None:
        fast = await start(world, [0.1], gathering(32))
        await asyncio.sleep(5)
        before = fast[0].replica.progress
        slow = await world.start("p1", peers=[fast[0].address], replica=learner("p1", 1.0))
        await slow.attached.wait()
        joined_at = slow.replica.progress
        assert joined_at >= before
        await reach([slow], joined_at + 20)
        steps = [step for step in steps_of(fast[0]) if step.step > joined_at]
        gave = [slow.id in step.given for step in steps]
        assert gave.index(True) < 3
        assert all(gave[gave.index(True) :])
        assert events(slow, "downloaded") and len(events(slow, "downloaded")) == 1
        assert not events(slow, "behind", "diverged")

    World(seed=4).run(scenario)


def test_a_target_that_the_fleet_can_not_gather_is_stepped_at_the_deadline_with_a_proposal() -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.2], gathering(100_000, gather_timeout_seconds=4.0))
        await reach(peers, 3)
        steps = steps_of(peers[0])
        assert {step.why for step in steps} <= {"time", "invited"}
        assert all(3.9 <= step.gathering_seconds <= 5.0 for step in steps)
        (advice,) = events(peers[0], "advice")
        assert "gathers 120.0 samples/s" in advice
        assert "A target_batch of 240 would suit it" in advice

    World(seed=5).run(scenario)


def test_a_target_that_one_batch_of_the_slowest_exceeds_is_advised_against() -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 1.0], gathering(32))
        await reach(peers, 8)
        (advice,) = events(peers[0], "advice")
        assert "gathers 88.0 samples/s" in advice
        assert "A target_batch of 89 would suit it" in advice

    World(seed=6).run(scenario)


# ---------------------------------------------------------------- newcomers, and who misses a step


def test_a_newcomer_whose_download_takes_five_steps_joins_and_stays_in() -> None:
    """Its line takes 2 s for the state; the others step every 0.4 s or so meanwhile, and keep what led to them."""

    async def scenario(world: World) -> None:
        size = 200_000
        peers = await start(world, [0.1, 0.1], gathering(), size)
        await reach(peers, 5)
        before = peers[0].replica.progress
        newcomer = await world.start(
            "p2", peers=[peers[0].address], replica=learner("p2", 0.1, size), machine=Machine(bytes_per_second=400_000)
        )
        await newcomer.attached.wait()
        missed = peers[0].replica.progress - before
        assert missed >= 5
        await reach([*peers, newcomer], newcomer.replica.progress + 5, 600)
        assert_equal([*peers, newcomer])
        assert len(events(newcomer, "downloaded")) == 1
        assert "with the others' mean gradients" in events(newcomer, "repaired")[0]
        assert not events(newcomer, "behind", "diverged")
        assert all(newcomer.id in step.given for step in steps_of(peers[0])[-3:])

    World(seed=7).run(scenario)


@pytest.mark.parametrize(("pause_seconds", "repaired_by"), [(2.0, "repaired"), (30.0, "downloaded")])
def test_a_peer_that_pauses_repairs_itself(pause_seconds: float, repaired_by: str) -> None:
    """After a step or two it takes them later, with the same mean gradients; after many it downloads, with a reason."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.1, 0.1], gathering())
        await reach(peers, 10)
        late = peers[2]
        late.replica.step_seconds = pause_seconds  # the pause is one long batch; its figures still say 0.1 s
        late.replica.figures = lambda: {**type(late.replica).figures(late.replica), "step_seconds": 0.1}
        await asyncio.sleep(0.3)
        late.replica.step_seconds = 0.1
        await asyncio.sleep(pause_seconds - 0.4)
        missed = peers[0].replica.progress - late.replica.progress
        assert missed >= 1
        assert (missed <= KEPT_STEPS) == (repaired_by == "repaired")
        await reach(peers, peers[0].replica.progress + 10)
        assert_equal(peers)
        assert events(late, "repaired") or repaired_by == "downloaded"
        assert len(events(late, "downloaded")) == 1 + (repaired_by == "downloaded")
        assert len(events(late, "behind")) == (repaired_by == "downloaded")
        assert all(late.id in step.given for step in steps_of(peers[0])[-3:])
        assert (peers[0].replica.tensors[0] - replay(peers, peers[0].replica.progress)).abs().max() < 1e-5

    World(seed=8).run(scenario)


def test_a_peer_that_dies_leaves_the_others_equal_and_stepping() -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.1, 0.15, 0.2], gathering(), 100_000)
        for number in (3, 2):
            await reach(peers[: number + 1], peers[0].replica.progress + 4)
            await asyncio.sleep(0.6 * world.random.random())
            await peers[number].crash()
        await reach(peers[:2], peers[0].replica.progress + 5)
        assert_equal(peers[:2], tolerance=0.0 if peers[0].replica.progress == peers[1].replica.progress else 1e-6)
        assert {peer.id for peer in peers[:2]} == steps_of(peers[0])[-1].given.keys()
        assert not events(peers[0], "behind", "diverged")

    for seed in range(8):
        World(seed=seed).run(scenario)


# ---------------------------------------------------------------- replicas that part


def flip_exponent_bit(peer: SimPeer, index: int = 7) -> None:
    bits = peer.replica.tensors[0].view(torch.int32)
    bits[index] ^= 1 << 27


def test_of_three_the_one_that_parted_is_named_and_repaired_within_two_averagings() -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.1, 0.1], gathering())
        await reach(peers, 10)
        at = peers[0].replica.progress
        flip_exponent_bit(peers[1])
        await reach(peers, at + 3)
        (named,) = events(peers[0], "diverged")
        assert named.startswith("theta differs from the others'")
        assert [event.peer_id for event in peers[0].peer.log.recent if event.kind == "diverged"] == [peers[1].id]
        first_after = next(step for step in steps_of(peers[0]) if step.step > at)
        assert peers[1].id not in first_after.given
        assert len(events(peers[1], "diverged")) == 1
        assert len(events(peers[1], "downloaded")) == 2
        await reach(peers, at + 8)
        assert_equal(peers)
        assert all(len(step.given) == 3 for step in steps_of(peers[0])[-3:])

    World(seed=9).run(scenario)


def repair_takes(donors: list[SimPeer], seconds: float) -> None:
    """Their training threads come to no safe point for so long."""

    def late(take: Callable[[], Awaitable[State]]) -> Callable[[], Awaitable[State]]:
        async def taken() -> State:
            await asyncio.sleep(seconds)
            return await take()

        return taken

    for donor in donors:
        assert donor.peer.donor.take_state
        donor.peer.donor.take_state = late(donor.peer.donor.take_state)


def test_the_others_wait_with_their_next_step_for_a_repair() -> None:
    """It takes 0.3 s, and a step 0.06 s."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.005] * 3, gathering())
        await reach(peers, 10)
        repair_takes([peers[0], peers[2]], 0.3)
        at = peers[0].replica.progress
        flip_exponent_bit(peers[1])
        await reach(peers, at + 20)
        assert len(events(peers[1], "diverged")) == 1
        absent = [step.step for step in steps_of(peers[0]) if step.step > at and peers[1].id not in step.given]
        assert len(absent) <= 2
        assert len(events(peers[1], "downloaded")) == 2
        assert not events(peers[1], "behind")

    World(seed=16, latency_seconds=0.002).run(scenario)


def test_they_do_not_wait_for_a_long_one() -> None:
    """Two gather 64 samples in 4 batches of 0.1 s."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.1] * 3, gathering())
        await reach(peers, 10)
        repair_takes([peers[0], peers[2]], 20.0)
        flip_exponent_bit(peers[1])
        await reach(peers[:1], peers[0].replica.progress + 1)
        assert events(peers[1], "diverged")
        at, began_at = peers[0].replica.progress, now()
        await reach(peers[:1], at + 10)
        assert len(events(peers[1], "downloaded")) == 1
        assert now() - began_at < 10 * 0.5 + REPAIR_SECONDS + 1.0  # a roll's deadline

    World(seed=17).run(scenario)


def test_of_two_that_parted_both_take_the_average() -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.1], gathering())
        await reach(peers, 10)
        peers[1].replica.tensors[0].add_(0.5)
        await reach(peers, peers[0].replica.progress + 3)
        assert_equal(peers)
        for peer in peers:
            assert not events(peer, "behind")
            assert len(peer.peer.history.applied) == 1  # the one averaging of everything

    World(seed=10).run(scenario)


def test_everything_is_averaged_every_hundred_steps() -> None:
    async def scenario(world: World) -> None:
        peers = await start(world, [0.05, 0.05], gathering(16))
        await reach(peers, 50)
        peers[1].replica.tensors[0].mul_(1 + 1e-6)  # rounding: too small to be called different
        await reach(peers, 210)
        assert_equal(peers, tolerance=1e-7)
        for peer in peers:
            assert [entry.exact for entry in peer.peer.history.applied] == [True, True]
            assert not events(peer, "diverged", "behind")

    World(seed=11).run(scenario)


def test_two_runs_of_one_seed_are_the_same_run() -> None:
    def run() -> str:
        world = World(seed=12)

        async def scenario(world: World) -> None:
            await reach(await start(world, [0.1, 0.17, 0.4], gathering()), 10)

        world.run(scenario)
        return world.digest()

    assert run() == run()


def test_batches_that_were_gathered_too_late_are_in_no_step() -> None:
    """Each batch of each peer is in one step at most."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.13, 0.4], gathering())
        await reach(peers, 30)
        for peer in peers:
            given = [given_by_name(peers, step).get(peer.name) for step in steps_of(peers[0])]
            ranges = [one for part in given if part for one in part.batches]
            batches = [batch for first, last in ranges for batch in range(first, last + 1)]
            assert batches == sorted(set(batches))

    World(seed=13).run(scenario)


def test_whoever_stopped_ahead_goes_on_where_the_others_pause() -> None:
    """The other one is in the run, tells its figures each second, and gathers nothing: its loop evaluates."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.1, 0.1], gathering())
        await reach(peers, 10)
        paused = peers[1].replica
        for _ in range(6):  # at whatever moment of a step the pause begins
            await asyncio.sleep(0.4 * world.random.random())
            figures = {"step_seconds": 0.1, "samples_per_second": 80.0}  # as they were before the pause
            paused.figures = lambda figures=figures: {**type(paused).figures(paused), **figures}
            paused.step_seconds = 20.0
            await asyncio.sleep(4)
            at = peers[0].replica.progress
            await asyncio.sleep(4)
            assert peers[0].replica.progress >= at + 3
            paused.step_seconds = 0.1
            del paused.figures
            await reach(peers, peers[0].replica.progress + 15)

    World(seed=14).run(scenario)


def test_a_minority_that_is_far_ahead_takes_over_the_state_of_the_others() -> None:
    """As after a split that heals: it would be turned away, and train apart, until the others are as far."""

    async def scenario(world: World) -> None:
        peers = await start(world, [0.1] * 4, gathering())
        await reach(peers, 10)
        peers[0].replica._inherited_steps += 200
        peers[0].replica.tensors[0].add_(1.0)
        await asyncio.sleep(5)
        await reach(peers, 40)
        assert peers[0].replica.progress < 100
        assert "where most of the others are at" in events(peers[0], "behind")[0]
        assert_equal(peers)
        assert all(len(step.given) == 4 for step in steps_of(peers[1])[-3:])

    World(seed=15).run(scenario)
