"""The mean gradients of the last steps, kept for whoever missed them: it takes the same steps, later.

    who is behind                             who is not
      stream FetchMean(step)         ->
                                     <-         MeanPiece, bytes
                                     <-         ...

Two are kept, for a peer that missed a step; up to 32, or 1 GB, while somebody downloads a state, which is older by the
time it is there. Whoever finds no donor that still keeps the step that it needs downloads the state again.
"""

from __future__ import annotations

import asyncio

import torch

from shoal.core.errors import ProtocolError, RefusedError, RemoteError
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.net.stream import Stream, StreamEnded
from shoal.overlay.member_record import CATCHING_UP, TRAINING
from shoal.overlay.membership import Membership
from shoal.tensors.flat import WIRE_DTYPES, Shapes, Vectors, as_bytes, vector_sizes

KEPT_STEPS, KEPT_FOR_NEWCOMERS, KEPT_BYTES = 2, 32, 1 << 30
PIECE_BYTES = 1 << 20
PIECE_SECONDS = 20.0


class FetchMean(Message, frozen=True):
    """Opens a stream: send me the mean gradient that led to `step`."""

    step: int


class MeanPiece(Message, frozen=True):
    """The next bytes of it, as payload: those of the float32 vector, then those of the float64 one."""


class MeanGradients:
    """Keeps and serves them at one peer."""

    def __init__(self, host: Host, members: Membership) -> None:
        self._host, self._members = host, members
        self._kept: dict[int, Vectors] = {}
        host.serve_stream(FetchMean, self._serve)

    def keep(self, step: int, mean: Vectors) -> None:
        """`mean` led to `step`. The oldest is forgotten."""
        self._kept[step] = mean
        newcomers = any(record.state == CATCHING_UP for record in self._members.members.values())
        most = min(KEPT_FOR_NEWCOMERS, KEPT_BYTES // max(1, sum(vector.nbytes for vector in mean)))
        while len(self._kept) > (max(KEPT_STEPS, most) if newcomers else KEPT_STEPS):
            del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """This peer takes over another state: what it kept led elsewhere."""
        self._kept.clear()

    async def _serve(self, stream: Stream, fetch: FetchMean) -> None:
        if fetch.step not in self._kept:
            raise RefusedError(f"the mean gradient of step {fetch.step} is not kept here", "gone")
        for vector in self._kept[fetch.step]:
            data = as_bytes(vector)
            for start in range(0, len(data), PIECE_BYTES):
                await stream.send(MeanPiece(), data[start : start + PIECE_BYTES])

    async def fetch(self, step: int, shapes: Shapes) -> Vectors | None:
        """The mean gradient that led to `step`, from whoever keeps it; None where nobody does."""
        donors = [who for who, record in self._members.others(TRAINING).items() if record.progress >= step]
        self._host.random.shuffle(donors)
        for who in donors:
            try:
                return await self._fetch_from(who, step, shapes)
            except RefusedError:
                continue
            except (RemoteError, TimeoutError) as error:
                self._host.log.add("warning", f"mean gradient of step {step}: {error or 'too slow'}", who)
        return None

    async def _fetch_from(self, who: str, step: int, shapes: Shapes) -> Vectors:
        sizes = vector_sizes(shapes)
        vectors = torch.empty(sizes[0], dtype=WIRE_DTYPES[0]), torch.empty(sizes[1], dtype=WIRE_DTYPES[1])
        async with self._host.stream(who, FetchMean(step)) as stream:
            for vector in vectors:
                data, filled = as_bytes(vector), 0
                while filled < len(data):
                    piece = await self._piece(stream)
                    if len(piece) != min(PIECE_BYTES, len(data) - filled):  # smaller ones could go on for ever
                        raise ProtocolError(f"{len(piece)} bytes of a mean gradient where {len(data) - filled} miss")
                    data[filled : filled + len(piece)] = piece
                    filled += len(piece)
        if not all(torch.isfinite(vector).all() for vector in vectors):
            raise ProtocolError("a mean gradient that is not finite")
        return vectors

    async def _piece(self, stream: Stream) -> memoryview:
        async with asyncio.timeout(PIECE_SECONDS):
            try:
                _, payload = await stream.receive(MeanPiece)
            except StreamEnded:
                raise ProtocolError("a mean gradient that ends early") from None
        return payload
