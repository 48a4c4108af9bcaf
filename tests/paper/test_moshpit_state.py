"""Moshpit reference, section 7, check 23: a state download that is truncated, corrupted or stalled.

On virtual time, with the real donor and one that breaks the protocol in its serving of chunks.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from shoal.core.errors import DownloadError
from shoal.net.stream import Stream, StreamEnded
from shoal.protocols.download import CHUNK_BYTES, CHUNK_SECONDS, Chunk, Download, Fetch, Want
from shoal.sim import SimPeer, VirtualReplica, World
from shoal.strategies import AllReduce

SIZE = CHUNK_BYTES  # elements of 4 bytes: four chunks
REASON = {
    "corrupted": "hash",
    "truncated": "hash",
    "cut": "ended before",
    "stalled": f"a chunk took longer than {CHUNK_SECONDS:g} s",
}


def breaks(donor: SimPeer, how: str) -> None:
    """From now on this donor serves its second chunk, and all later ones, wrongly."""
    images = donor.peer.donor._images

    async def serve(stream: Stream, fetch: Fetch) -> None:
        image = images[fetch.image_id][1]
        with contextlib.suppress(StreamEnded):
            for served in range(len(image.ranges)):
                want, _ = await stream.receive(Want)
                begin, end = image.ranges[want.number]
                data = bytearray(image.body[begin:end])
                if served and how == "cut":
                    return
                if served and how == "stalled":
                    await asyncio.Event().wait()
                if served and how == "corrupted":
                    data[len(data) // 2] ^= 1
                await stream.send(Chunk(want.number), data[: len(data) // 2] if served and how == "truncated" else data)

    donor.peer.host.serve_stream(Fetch, serve)


async def donors(world: World, honest: int) -> list[SimPeer]:
    """A hostile one, and honest ones that hold the very same state: none of them steps."""
    values = torch.arange(SIZE, dtype=torch.float32)
    founder = await world.start(
        "bad", strategy=AllReduce(), replica=VirtualReplica(values, drift=0.0, step_seconds=0.1)
    )
    await founder.attached.wait()
    rest = [
        await world.start(
            f"good{number}", peers=[founder.address],
            replica=VirtualReplica(torch.zeros(SIZE), drift=0.0, step_seconds=0.1),
        )
        for number in range(honest)
    ]  # fmt: skip
    for peer in rest:
        await peer.attached.wait()
    return [founder, *rest]


def download_of(newcomer: SimPeer, after_step: int = -1) -> Download:
    peer = newcomer.peer
    return Download(peer.host, peer.members, peer.compute, [((SIZE,), "float32")], after_step)


def test_an_image_is_shared_by_newcomers_that_come_together_unless_it_is_too_old_for_one() -> None:
    async def scenario(world: World) -> None:
        (donor,) = await donors(world, honest=0)
        newcomer = await world.start("newcomer", peers=[donor.address])
        first = await download_of(newcomer).run()
        await asyncio.sleep(0.3)
        assert (await download_of(newcomer).run()).progress == first.progress
        assert (await download_of(newcomer, after_step=first.progress - 1).run()).progress == first.progress
        assert (await download_of(newcomer, after_step=first.progress).run()).progress >= first.progress + 9

    World(seed=7).run(scenario)


@pytest.mark.parametrize("how", REASON)
def test_check_23_a_broken_download_has_a_typed_end_and_gives_no_state(how: str) -> None:
    async def scenario(world: World) -> None:
        (bad,) = await donors(world, honest=0)
        breaks(bad, how)
        newcomer = await world.start("newcomer", peers=[bad.address])
        began = asyncio.get_running_loop().time()
        with pytest.raises(DownloadError) as failed:
            await download_of(newcomer).run()
        assert REASON[how] in str(failed.value)
        assert bad.id[:8] in str(failed.value)
        assert asyncio.get_running_loop().time() < began + CHUNK_SECONDS + 2

    World(seed=1).run(scenario)


@pytest.mark.parametrize("how", REASON)
def test_check_23_what_was_whole_is_kept_and_the_rest_comes_from_another(how: str) -> None:
    async def scenario(world: World) -> None:
        bad, good = await donors(world, honest=1)
        breaks(bad, how)
        newcomer = await world.start("newcomer", peers=[good.address])
        await asyncio.sleep(0.5)  # by then it has met both
        download = download_of(newcomer)
        state = await download.run()
        assert torch.equal(state.vectors[0], torch.arange(SIZE, dtype=torch.float32))
        assert download.progress.lost_donors == [bad.id]
        assert download.progress.fetched_bytes < 4 * SIZE + 2 * CHUNK_BYTES, "whole chunks came twice"

    World(seed=2).run(scenario)


def test_check_23_the_callers_own_time_limit_holds() -> None:
    async def scenario(world: World) -> None:
        (bad,) = await donors(world, honest=0)
        breaks(bad, "stalled")
        newcomer = await world.start("newcomer", peers=[bad.address])
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await download_of(newcomer).run()
        assert asyncio.get_running_loop().time() == pytest.approx(began + 3.0, abs=0.1)

    World(seed=3).run(scenario)


def test_check_23_a_newcomer_keeps_its_own_values_until_the_whole_state_is_there() -> None:
    async def scenario(world: World) -> None:
        bad, good = await donors(world, honest=1)
        breaks(bad, "stalled")
        replica = VirtualReplica(torch.full((SIZE,), -1.0), drift=0.0, step_seconds=0.1)
        newcomer = await world.start("newcomer", peers=[good.address], replica=replica)
        while not newcomer.attached.is_set():
            assert replica.tensors[0].eq(-1.0).all()
            await asyncio.sleep(0.05)
        assert torch.equal(replica.tensors[0], torch.arange(SIZE, dtype=torch.float32))

    World(seed=4).run(scenario)
