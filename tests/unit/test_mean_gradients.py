"""Steps taken later, with mean gradients from others: what a donor may send, and what is told when none has them."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.core.clock import Clock
from shoal.core.errors import OutOfStep
from shoal.overlay.member_record import CATCHING_UP, TRAINING, Record
from shoal.protocols.large_batch import _catch_up
from shoal.protocols.mean_gradients import PIECE_BYTES, MeanGradients, MeanPiece

SHAPES = [((PIECE_BYTES // 2,), "float32")]  # two pieces


class Donor:
    """A host with one donor, which sends these pieces."""

    peer_id = "donor"

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces, self.taken, self.warnings = pieces, 0, []
        self.random = SimpleNamespace(shuffle=lambda values: None)
        self.log = SimpleNamespace(add=lambda *event: self.warnings.append(event[1]))

    def serve_stream(self, *args: Any) -> None:
        pass

    @contextlib.asynccontextmanager
    async def stream(self, who: str, opening: Any) -> Any:
        yield self

    async def receive(self, kind: Any) -> Any:
        self.taken += 1
        return MeanPiece(), memoryview(self.pieces[self.taken - 1])

    def fetch(self) -> Any:
        members = SimpleNamespace(others=lambda state: {"donor": Record("donor", [], 0.0, state=TRAINING, progress=5)})
        return asyncio.run(MeanGradients(self, members).fetch(5, SHAPES))  # type: ignore[arg-type]


def test_a_donor_sends_whole_pieces() -> None:
    mean = torch.randn(PIECE_BYTES // 2)
    data = mean.numpy().tobytes()
    fetched = Donor([data[:PIECE_BYTES], data[PIECE_BYTES:]]).fetch()
    assert torch.equal(fetched[0], mean)


@pytest.mark.parametrize("piece", [b"", b"\0" * 4, b"\0" * (PIECE_BYTES - 1), b"\0" * (PIECE_BYTES + 1)])
def test_a_donor_that_drips_is_given_up_at_its_first_piece(piece: bytes) -> None:
    """Each piece may take its time: of a byte each they would keep the training thread waiting for days."""
    donor = Donor([piece] * 100)
    assert donor.fetch() is None
    assert donor.taken == 1
    assert "bytes of a mean gradient" in donor.warnings[0]


def test_nobody_waits_for_a_newcomer_that_has_to_download_again() -> None:
    """It asked the others to wait, and then nobody kept the next step any more."""
    me = SimpleNamespace(state=CATCHING_UP, behind_seconds=0.0, asked=0.0)
    level = [10]

    def update(**changes: float) -> None:
        me.behind_seconds = changes["behind_seconds"]
        me.asked = max(me.asked, me.behind_seconds)

    async def fetch(step: int, shapes: Any) -> Any:
        await asyncio.sleep(0.01)
        return None if step > 3 else (torch.zeros(1), torch.zeros(0))

    async def step(mean: Any, *, missed: bool) -> None:
        replica.progress += 1
        level[0] += 2  # the others step faster

    replica = SimpleNamespace(progress=0, gradient_shapes=[], step=step)
    members = SimpleNamespace(
        me=me, update=update, tell_figures=lambda: None,
        others=lambda state: {"other": SimpleNamespace(progress=level[0])},
    )  # fmt: skip
    peer = SimpleNamespace(clock=Clock(), members=members, mean_gradients=SimpleNamespace(fetch=fetch))

    async def scenario() -> None:
        with pytest.raises(OutOfStep):
            await _catch_up(peer, replica)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert me.asked > 0
    assert me.behind_seconds == 0
