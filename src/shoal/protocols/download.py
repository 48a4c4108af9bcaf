"""State download: what a newcomer takes over, from several donors at once, whole or not at all.

A donor serves an immutable image of its state, cut into hashed chunks:

    newcomer                                  donor
      Hold(after_step)             ->           takes an image (of its last averaging, if that is fresh), keeps it
                                   <-         Manifest(image, chunk hashes, layout)
      stream Fetch(image): Want(chunk) ->
                                   <-         Chunk(number), bytes
      ...

Chunks are named by their hash. The averaged vectors are equal, bit for bit, at all who took part in one averaging, so
their chunks can come from any donor that holds the same ones: when the chosen donor dies, what was checked before is
kept, and only what no other donor has (its own optimizer state) is asked anew. A newcomer installs nothing before every
byte is there and hashes as announced. Nothing is unpickled: the layout is JSON, the rest is numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.core.compute import Compute
from shoal.core.errors import CallTimeout, DownloadError, PeerLost, ProtocolError, RefusedError, RemoteError
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.net.stream import Stream, StreamEnded
from shoal.overlay.member_record import TRAINING
from shoal.overlay.membership import Membership
from shoal.protocols.replica import State
from shoal.tensors.flat import ITEM_BYTES, WIRE_DTYPES, Shapes, as_bytes, vector_sizes

CHUNK_BYTES = 1 << 20
MAX_DONORS = 3
HOLD_SECONDS, CHUNK_SECONDS, KEEP_SECONDS, SHARE_SECONDS = 30.0, 20.0, 30.0, 2.0
MAX_IMAGES = 3
MOST_STEPS = 10**9
EXTRAS_BYTES = 64 << 20
"""A state has at most eight times the bytes of its vectors in extras, and this much more: integer buffers, counters."""
HASH_SECONDS_PER_BYTE = 1e-9
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)}  # fmt: skip


class Extra(Message, frozen=True):
    """A tensor of the donor's own: optimizer state or an integer buffer."""

    name: str
    dtype: str
    shape: list[int]


class Layout(Message, frozen=True):
    """How the bytes of an image are to be read: two flat vectors, then the extras, in order."""

    vector_sizes: tuple[int, int]
    extras: list[Extra]
    scalars: dict[str, float | int | bool | None]
    optimizer: str
    progress: int
    number: int


class Hold(Message, frozen=True):
    """Take an image and keep it for me. One that was taken before will do if its progress is over `after_step`."""

    after_step: int


class Manifest(Message, frozen=True):
    """An image: its layout, and the hash of each chunk. Chunks of the vectors and of the extras never mix."""

    image_id: str
    layout: Layout
    vector_bytes: int
    total_bytes: int
    hashes: list[bytes]


class Fetch(Message, frozen=True):
    """Open a stream to fetch chunks of an image."""

    image_id: str


class Want(Message, frozen=True):
    """Send me chunk `number`."""

    number: int


class Chunk(Message, frozen=True):
    """Chunk `number`; the payload holds its bytes."""

    number: int


def chunk_ranges(vector_bytes: int, total_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of the chunks: the vectors' first, then the extras'."""
    ranges = []
    for begin, end in ((0, vector_bytes), (vector_bytes, total_bytes)):
        ranges += [(at, min(at + CHUNK_BYTES, end)) for at in range(begin, end, CHUNK_BYTES)]
    return ranges


def chunk_hash(data: memoryview | bytes) -> bytes:
    """32 bytes of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=32).digest()


class Image:
    """A state as bytes: immutable, served to any number of newcomers."""

    def __init__(self, image_id: str, state: State) -> None:
        extras = {name: tensor.detach().cpu().contiguous().reshape(-1) for name, tensor in state.extras.items()}
        blocks = [as_bytes(vector) for vector in state.vectors]
        vector_bytes = sum(len(block) for block in blocks)
        blocks += [as_bytes(tensor.view(torch.uint8)) for tensor in extras.values()]
        self.body = memoryview(b"".join(blocks))
        layout = Layout(
            (len(state.vectors[0]), len(state.vectors[1])),
            [Extra(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in state.extras.items()],
            state.scalars, state.optimizer, state.progress, state.number,
        )  # fmt: skip
        ranges = chunk_ranges(vector_bytes, len(self.body))
        hashes = [chunk_hash(self.body[begin:end]) for begin, end in ranges]
        self.manifest = Manifest(image_id, layout, vector_bytes, len(self.body), hashes)
        self.ranges = ranges


def read_image(layout: Layout, body: memoryview) -> State:
    """The state in a checked image. Raises ProtocolError when the layout does not fit the bytes."""
    at = 0

    def take(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        nonlocal at
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or max(shape, default=0) > len(body) or at + size > len(body):
            raise ProtocolError("the image's layout does not fit its bytes")
        data = body[at : at + size]
        at += size
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)

    vectors = tuple(take(dtype, [size]) for dtype, size in zip(WIRE_DTYPES, layout.vector_sizes, strict=True))
    extras = {}
    for extra in layout.extras:
        if extra.dtype not in DTYPES:
            raise ProtocolError(f"the image has a tensor of the unknown dtype {extra.dtype[:20]!r}")
        extras[extra.name] = take(DTYPES[extra.dtype], extra.shape)
    if at != len(body):
        raise ProtocolError("the image has more bytes than its layout names")
    return State(
        (vectors[0], vectors[1]), extras, dict(layout.scalars), layout.optimizer, layout.progress, layout.number
    )


class Donor:
    """Serves images of this peer's state to newcomers, at their request, while it trains on."""

    def __init__(self, host: Host, members: Membership, compute: Compute) -> None:
        self._host, self._members, self._compute = host, members, compute
        self.take_state: Callable[[], Awaitable[State]] | None = None
        self._images: dict[str, tuple[float, Image]] = {}
        self._newest: tuple[float, Image] | None = None
        self._taking = asyncio.Lock()
        host.serve(Hold, self._hold)
        host.serve_stream(Fetch, self._serve)

    async def _hold(self, peer_id: str, hold: Hold) -> Message:
        if self.take_state is None or self._members.me.state != TRAINING:
            raise RefusedError("this peer has no trained state yet", "empty")
        async with self._taking:  # newcomers that come together share one image
            now = self._host.clock.now()
            if self._newest is not None and now - self._newest[0] < SHARE_SECONDS:
                manifest = self._newest[1].manifest
                if manifest.layout.progress > hold.after_step:
                    return manifest
            state = await self.take_state()
            image_id = self._host.random.randbytes(16).hex()
            size = sum(vector.nbytes for vector in state.vectors) + sum(t.nbytes for t in state.extras.values())
            image = await self._compute(Image, image_id, state, cost_seconds=size * HASH_SECONDS_PER_BYTE)
            while len(self._images) >= MAX_IMAGES:
                del self._images[min(self._images, key=lambda key: self._images[key][0])]
            self._images[image_id] = self._host.clock.now(), image
            self._newest = self._host.clock.now(), image
            if len(self._images) == 1:
                self._host.spawn(self._forget_old(), "forget images")
            return image.manifest

    async def _forget_old(self) -> None:
        """A donor keeps no copy of its state for longer than newcomers need it."""
        while self._images:
            await self._host.clock.sleep(SHARE_SECONDS)
            now = self._host.clock.now()
            self._images = {key: entry for key, entry in self._images.items() if now - entry[0] < KEEP_SECONDS}
            if self._newest is not None and now - self._newest[0] >= SHARE_SECONDS:
                self._newest = None

    async def _serve(self, stream: Stream, fetch: Fetch) -> None:
        if fetch.image_id not in self._images:
            raise RefusedError("this image is not kept here any more", "gone")
        image = self._images[fetch.image_id][1]
        with contextlib.suppress(StreamEnded):
            while True:
                want, _ = await stream.receive(Want)
                if not 0 <= want.number < len(image.ranges):
                    raise ProtocolError(f"chunk {want.number} of {len(image.ranges)}")
                self._images[fetch.image_id] = self._host.clock.now(), image
                begin, end = image.ranges[want.number]
                await stream.send(Chunk(want.number), image.body[begin:end])


@dataclass
class Progress:
    """How far a download is. `kept_bytes` were checked before a donor was lost and did not have to come again."""

    fetched_bytes: int = 0
    kept_bytes: int = 0
    total_bytes: int = 0
    donors: list[str] = field(default_factory=list)
    lost_donors: list[str] = field(default_factory=list)


class Download:
    """One newcomer's download. Chunks that were checked stay, whatever happens to their donor.

    `after_step`: a state of that step is too old, and an image that was taken of it for others; -1 for none.
    """

    def __init__(self, host: Host, members: Membership, compute: Compute, shapes: Shapes, after_step: int = -1) -> None:
        self._hold = Hold(after_step)
        self._host, self._members, self._compute = host, members, compute
        self._vector_sizes = vector_sizes(shapes)
        self._checked: dict[bytes, memoryview] = {}
        self.progress = Progress()

    async def run(self) -> State:
        """A whole, checked state. Raises DownloadError when no donor is left."""
        reasons: dict[str, str] = {}
        while True:
            manifests = await self._manifests(reasons)
            if not manifests and any(peer_id not in reasons for peer_id in self._members.others(TRAINING)):
                continue
            if not manifests:
                told = "; ".join(f"{peer_id[:8]}: {reason}" for peer_id, reason in reasons.items())
                raise DownloadError(
                    f"no live peer can give the run's state ({told or 'nobody is training'}); start again once one does"
                )
            manifest = max(manifests.values(), key=lambda offered: (offered.layout.number, offered.layout.progress))
            self.progress.kept_bytes = sum(
                len(self._checked[digest]) for digest in dict.fromkeys(manifest.hashes) if digest in self._checked
            )
            self.progress.total_bytes = manifest.total_bytes
            await self._fetch_all(manifest, manifests, reasons)
            if all(digest in self._checked for digest in manifest.hashes):
                return await self._assemble(manifest)

    async def _manifests(self, reasons: dict[str, str]) -> dict[str, Manifest]:
        """What each donor offers, asked at once."""
        donors = [peer_id for peer_id in self._members.others(TRAINING) if peer_id not in reasons]
        self._host.random.shuffle(donors)  # not everybody asks the same one
        donors = donors[:MAX_DONORS]
        answers = await asyncio.gather(
            *(self._host.call(peer_id, self._hold, Manifest, timeout_seconds=HOLD_SECONDS) for peer_id in donors),
            return_exceptions=True,
        )
        manifests = {}
        for peer_id, answer in zip(donors, answers, strict=True):
            if isinstance(answer, CallTimeout):
                continue  # no safe point in all that time: a long compilation, an evaluation; it is asked again
            if isinstance(answer, RemoteError):
                reasons[peer_id] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif tuple(answer.layout.vector_sizes) != self._vector_sizes:
                reasons[peer_id] = f"its state has {answer.layout.vector_sizes} values, the model {self._vector_sizes}"
            elif not self._makes_sense(answer):
                reasons[peer_id] = "its manifest does not fit the model's size"
            else:
                manifests[peer_id] = answer
        return manifests

    def _makes_sense(self, manifest: Manifest) -> bool:
        """Whether the sizes that it announces are those of our model: checked before anything is allocated."""
        vector_bytes = sum(size * width for size, width in zip(self._vector_sizes, ITEM_BYTES, strict=True))
        extra_bytes = manifest.total_bytes - vector_bytes
        chunks = -(-vector_bytes // CHUNK_BYTES) + -(-extra_bytes // CHUNK_BYTES)
        return (
            manifest.vector_bytes == vector_bytes
            and 0 <= manifest.layout.progress <= MOST_STEPS
            and 0 <= extra_bytes <= 8 * vector_bytes + EXTRAS_BYTES
            and len(manifest.hashes) == chunks
        )

    async def _fetch_all(self, wanted: Manifest, manifests: dict[str, Manifest], reasons: dict[str, str]) -> None:
        """Fetch the chunks of one image from every donor that holds the same; returns when none has more to give."""
        missing = dict.fromkeys(digest for digest in wanted.hashes if digest not in self._checked)

        async def from_donor(peer_id: str, manifest: Manifest) -> None:
            where = {digest: number for number, digest in enumerate(manifest.hashes)}
            if not any(digest in where for digest in missing):
                return
            self.progress.donors.append(peer_id)
            try:
                async with self._host.stream(peer_id, Fetch(manifest.image_id)) as stream:
                    while digest := next((digest for digest in missing if digest in where), None):
                        del missing[digest]
                        try:
                            await self._fetch(stream, where[digest], digest)
                        except BaseException:
                            missing[digest] = None  # for another donor
                            raise
            except (RemoteError, TimeoutError) as error:
                reasons[peer_id] = str(error) or f"a chunk took longer than {CHUNK_SECONDS:g} s"
                self.progress.lost_donors.append(peer_id)
                self._host.log.add("warning", f"donor lost: {reasons[peer_id]}", peer_id)

        async with asyncio.TaskGroup() as tasks:
            for peer_id, manifest in manifests.items():
                tasks.create_task(from_donor(peer_id, manifest), name=f"donor {peer_id[:6]}")

    async def _fetch(self, stream: Stream, number: int, digest: bytes) -> None:
        async with asyncio.timeout(CHUNK_SECONDS):
            await stream.send(Want(number))
            try:
                _, data = await stream.receive(Chunk)
            except StreamEnded:
                raise PeerLost("it ended before its last chunk") from None
        if len(data) > CHUNK_BYTES or await self._hash(data) != digest:
            raise ProtocolError(f"chunk {number} is not what its hash says")
        self._checked[digest] = data
        self.progress.fetched_bytes += len(data)

    async def _hash(self, data: memoryview) -> bytes:
        return await self._compute(chunk_hash, data, cost_seconds=len(data) * HASH_SECONDS_PER_BYTE)

    async def _assemble(self, manifest: Manifest) -> State:
        body = memoryview(np.empty(manifest.total_bytes, np.uint8).data)
        for (begin, end), digest in zip(
            chunk_ranges(manifest.vector_bytes, manifest.total_bytes), manifest.hashes, strict=True
        ):
            if len(self._checked[digest]) != end - begin:
                raise DownloadError("a chunk has not the size its manifest says")
            body[begin:end] = self._checked[digest]
        try:
            state = read_image(manifest.layout, body)
        except ProtocolError as error:
            raise DownloadError(str(error)) from None
        if not all(torch.isfinite(vector).all() for vector in state.vectors):
            raise DownloadError("the state that was offered is not finite")
        return state
