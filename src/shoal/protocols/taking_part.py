"""Taking part in a run with a model: as its founder, or as a newcomer that takes over the run's state first.

A peer trains and donates only with a state that is the run's: a fresh one never overwrites or dilutes it. When its
run yields to another of its name (a founder that restarted empty meets its old run), the same way is taken again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from shoal.core.errors import DownloadError, OutOfStep
from shoal.overlay.charter import Options, Schema
from shoal.overlay.member_record import CATCHING_UP, JOINED, TRAINING
from shoal.protocols.download import Download, Progress
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Replica, State
from shoal.protocols.roll_record import TRAIN

POLL_SECONDS = 0.2
GIVE_UP_SECONDS = 20.0
"""How long a newcomer looks for a donor in a run whose charter says that there was a founder."""
FRESH_AVERAGE_SECONDS = 30.0
REPAIR_SECONDS = 1.0
"""For so long the others wait with their next step for a peer that took part and has to download the run's state."""


class Strategy(Protocol):
    """One algorithm: averages a replica with the other peers until this one leaves."""

    async def prepare(self, peer: Peer, replica: Replica) -> None:
        """With the run's state, before this peer trains. Raises AttachError or OutOfStep."""

    async def run(self, peer: Peer, replica: Replica) -> None:
        """All running state is local to this coroutine."""


async def take_part(
    peer: Peer,
    replica: Replica,
    schema: Schema,
    strategy: Options | None,
    default: Options,
    build: Callable[[Options], Strategy],
    on_training: Callable[[], None],
) -> None:
    """Found or catch up, then run the charter's strategy for as long as this run stays.

    `strategy` is what this peer asks for (None adopts the run's, and `default` where it founds). `on_training` is
    called each time this peer has the run's state and begins to train. Raises CharterMismatch, ModelMismatch,
    DownloadError or SchemaChanged.
    """
    members = peer.members
    yielded = asyncio.Event()
    members.on_yield = yielded.set
    peer.donor.take_state = lambda: donor_state(peer, replica)
    trained, too_old = False, -1
    try:
        while True:
            yielded.clear()
            if not await _settle(peer, schema, strategy, default):
                try:
                    await _catch_up(peer, replica, too_old)
                except DownloadError as error:
                    if not trained:
                        raise
                    peer.log.add("advice", f"goes on with its own state: {error}")
                    members.found_again()
            if yielded.is_set():
                continue
            assert members.charter is not None and members.charter.strategy is not None
            strategy = members.charter.strategy  # another run of this name may have another: that would not fit
            algorithm = build(strategy)
            try:
                await algorithm.prepare(peer, replica)
                members.update(state=TRAINING, **replica.figures())
                trained = True
                on_training()
                if await _run_strategy(peer, replica, algorithm, yielded):
                    return
            except OutOfStep as error:
                peer.log.add("diverged" if error.diverged else "behind", f"downloads the run's state: {error.reason}")
                too_old = replica.progress - 1 if error.diverged else replica.progress
                was_in = members.me.state == TRAINING  # and not on its way back in already
                members.update(state=CATCHING_UP, behind_seconds=REPAIR_SECONDS if was_in else 0.0)
    finally:
        if members.me.state != JOINED:
            members.update(state=JOINED)  # nobody waits for a peer whose strategy has ended


async def _run_strategy(peer: Peer, replica: Replica, algorithm: Strategy, yielded: asyncio.Event) -> bool:
    """Run the charter's strategy. True when it has ended; False when this run yields to another."""
    running = asyncio.create_task(algorithm.run(peer, replica), name=f"{peer.id[:6]} strategy")
    yielding = asyncio.create_task(yielded.wait(), name=f"{peer.id[:6]} yield")
    try:
        await asyncio.wait([running, yielding], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        return running.done()
    finally:
        running.cancel()
        yielding.cancel()
        await asyncio.gather(running, yielding, return_exceptions=True)


async def _settle(peer: Peer, schema: Schema, strategy: Options | None, default: Options) -> bool:
    """Wait until the run has a founder; True when that is this peer, which then needs nobody's state."""
    while True:
        founder = await peer.members.settle(strategy, default, schema)
        if founder is True and not peer.members.others(TRAINING):
            return True
        if founder is not None:
            return False
        await peer.clock.sleep(POLL_SECONDS)


async def _catch_up(peer: Peer, replica: Replica, too_old: int) -> None:
    """Download a state of the run that is newer than step `too_old`, and install it, whole."""
    peer.members.update(state=CATCHING_UP)
    withdrawing = asyncio.create_task(_ask_no_longer_to_wait(peer), name=f"{peer.id[:6]} withdraw")
    try:
        state, done = await _download(peer, replica, too_old)
        await replica.install(state)
    finally:
        withdrawing.cancel()
        await asyncio.gather(withdrawing, return_exceptions=True)
    peer.log.add(
        "downloaded",
        f"{done.total_bytes} bytes of state at step {state.progress} (donors: {len(set(done.donors))}) "
        f"({done.fetched_bytes} bytes fetched, {len(done.lost_donors)} donors lost, {done.kept_bytes} bytes kept)",
    )


async def _ask_no_longer_to_wait(peer: Peer) -> None:
    """Nobody waits for the download of a large state, or over a slow line."""
    await peer.clock.sleep(REPAIR_SECONDS)
    if peer.members.me.behind_seconds:
        peer.members.update(behind_seconds=0.0)
        peer.members.tell_figures()


async def _download(peer: Peer, replica: Replica, too_old: int) -> tuple[State, Progress]:
    download = Download(peer.host, peer.members, peer.compute, replica.shapes, after_step=too_old)
    progressed_at, fetched_bytes = peer.clock.now(), 0
    while True:
        try:
            return await download.run(), download.progress
        except DownloadError:
            if download.progress.fetched_bytes > fetched_bytes:
                progressed_at, fetched_bytes = peer.clock.now(), download.progress.fetched_bytes
            if peer.clock.now() > progressed_at + GIVE_UP_SECONDS:
                raise
            await peer.clock.sleep(POLL_SECONDS)


async def donor_state(peer: Peer, replica: Replica) -> State:
    """What a newcomer gets: the last averaging's vectors where they are fresh, so that other donors have the same."""
    own = await replica.state()
    last = peer.history.applied[-1] if peer.history.applied else None
    average = replica.last_average
    if (
        last is None
        or average is None
        or last.number < peer.rolls.newest.get(TRAIN, 0)
        or peer.log.seconds() - last.at_seconds > FRESH_AVERAGE_SECONDS
    ):
        return own
    return dataclasses.replace(own, vectors=average, number=last.number)
