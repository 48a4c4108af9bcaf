"""The image of a state that a newcomer downloads: bytes and back, and what corrupted layouts do."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.errors import ProtocolError
from shoal.protocols.download import (
    CHUNK_BYTES,
    DTYPES,
    Extra,
    Image,
    Layout,
    Manifest,
    chunk_hash,
    chunk_ranges,
    read_image,
)
from shoal.protocols.replica import State


def some_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every dtype that an optimizer's state or a buffer may have."""
    torch.manual_seed(len(name))
    return (torch.randn(shape, dtype=torch.float64) * 50).to(DTYPES[name])


def a_state(vectors: tuple[int, int] = (1000, 10)) -> State:
    extras = {name: some_tensor(name, (3,)) for name in DTYPES}
    extras |= {
        "a scalar": torch.tensor(7.5),
        "an empty one": torch.empty(0, 4, dtype=torch.int64),
        "transposed": torch.randn(4, 3).t(),
        "strided": torch.arange(20)[::3],
        "one byte, and the next lies askew": torch.tensor([1], dtype=torch.uint8),
        "askew": torch.randn(5, dtype=torch.float64),
    }
    scalars = {"step": 12, "lr": 1e-3, "amsgrad": False, "nothing": None}
    flat = torch.randn(vectors[0]), torch.randn(vectors[1], dtype=torch.float64)
    return State(flat, extras, scalars, optimizer="SGD", progress=41, number=7)


def over_the_wire(manifest: Manifest) -> Manifest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)


def body_of(image: Image) -> memoryview:
    return memoryview(bytearray(image.body))


@pytest.mark.parametrize("vectors", [(1000, 10), (0, 0), (1, 0), (0, 3)])
def test_an_image_reads_back_as_the_state_it_was_taken_of(vectors) -> None:
    state = a_state(vectors)
    image = Image("image", state)
    back = read_image(over_the_wire(image.manifest).layout, body_of(image))
    assert [vector.dtype for vector in back.vectors] == [torch.float32, torch.float64]
    assert all(torch.equal(one, other) for one, other in zip(back.vectors, state.vectors, strict=True))
    assert list(back.extras) == list(state.extras)
    for name, tensor in state.extras.items():
        assert back.extras[name].dtype == tensor.dtype
        assert torch.equal(back.extras[name], tensor), name
    assert (back.scalars, back.optimizer, back.progress, back.number) == (state.scalars, "SGD", 41, 7)


def test_a_whole_number_among_the_scalars_stays_one() -> None:
    """An optimizer's step counter that came back as 12.0 would be another state."""
    image = Image("image", a_state())
    scalars = read_image(over_the_wire(image.manifest).layout, body_of(image)).scalars
    assert [type(scalars[name]) for name in ("step", "lr", "amsgrad", "nothing")] == [int, float, bool, type(None)]


def test_an_image_does_not_change_when_the_state_does() -> None:
    state = a_state()
    image = Image("image", state)
    before = bytes(image.body)
    state.vectors[0].zero_()
    state.extras["a scalar"].zero_()
    assert image.body == before


def test_each_hash_is_that_of_its_chunk() -> None:
    image = Image("image", a_state((CHUNK_BYTES // 4 + 5, 0)))
    assert len(image.manifest.hashes) == len(image.ranges) == 3
    for (begin, end), digest in zip(image.ranges, image.manifest.hashes, strict=True):
        assert chunk_hash(image.body[begin:end]) == digest
        assert len(digest) == 32


def test_equal_vectors_have_equal_chunks_whatever_else_their_donors_hold() -> None:
    """So that they can be fetched from several donors."""
    one, other = a_state((300_000, 4)), a_state((300_000, 4))
    other = State(one.vectors, {"other": torch.ones(99)}, {}, progress=1, number=7)
    hashes = [Image("image", state).manifest.hashes for state in (one, other)]
    vector_chunks = -(-(300_000 * 4 + 4 * 8) // CHUNK_BYTES)
    assert hashes[0][:vector_chunks] == hashes[1][:vector_chunks]
    assert hashes[0][vector_chunks:] != hashes[1][vector_chunks:]


sizes = st.one_of(st.integers(0, 5 * CHUNK_BYTES), st.integers(0, 5).map(lambda count: count * CHUNK_BYTES))


@given(sizes, sizes)
def test_chunks_of_vectors_and_of_extras_never_mix(vector_bytes, extra_bytes) -> None:
    total = vector_bytes + extra_bytes
    ranges = chunk_ranges(vector_bytes, total)
    at = 0
    for begin, end in ranges:
        assert begin == at
        assert 0 < end - begin <= CHUNK_BYTES
        assert end <= vector_bytes or begin >= vector_bytes
        at = end
    assert at == total


# ---------------------------------------------------------------- corrupted layouts

dimensions = st.one_of(st.integers(0, 5), st.sampled_from([-1, -(2**63), 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
shapes = st.lists(dimensions, max_size=5)
layouts = st.builds(
    Layout,
    st.tuples(dimensions, dimensions),
    st.lists(st.builds(Extra, st.text(max_size=2), st.sampled_from([*DTYPES, "object", ""]), shapes), max_size=4),
    st.just({}),
    st.just("SGD"),
    st.just(0),
    st.just(0),
)


@settings(max_examples=400)
@given(layouts, st.sampled_from([0, 1, 4, 8, 12, 100]))
@example(Layout((0, 0), [Extra("x", "float32", [0, 2**64 - 1])], {}, "SGD", 0, 0), 0)
@example(Layout((0, 0), [Extra("x", "float32", [0, 2**62, 2**62])], {}, "SGD", 0, 0), 0)
@example(Layout((0, 0), [Extra("x", "float32", [2**32, 2**32])], {}, "SGD", 0, 0), 0)
@example(Layout((0, 0), [Extra("x", "float32", [-1, -1])], {}, "SGD", 0, 0), 4)
@example(Layout((-1, 2), [], {}, "SGD", 0, 0), 12)
def test_a_corrupted_layout_is_a_protocol_error_or_fits(layout, body_bytes) -> None:
    try:
        state = read_image(layout, memoryview(bytearray(body_bytes)))
    except ProtocolError:
        return
    held = sum(vector.nbytes for vector in state.vectors) + sum(tensor.nbytes for tensor in state.extras.values())
    repeated = len({extra.name for extra in layout.extras}) < len(layout.extras)
    assert held == body_bytes or (repeated and held < body_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vector_sizes": (1001, 10)}, "does not fit its bytes|more bytes than its layout"),
        ({"vector_sizes": (999, 10)}, "does not fit its bytes|more bytes than its layout"),
        ({"vector_sizes": (-1, 10)}, "does not fit its bytes"),
        ({"vector_sizes": (2**62, 10)}, "does not fit its bytes"),
        ({"extras": []}, "more bytes than its layout names"),
        ({"extras": [Extra("x", "object", [1])]}, "unknown dtype 'object'"),
    ],
)
def test_the_error_says_what_is_wrong(change, message) -> None:
    image = Image("image", a_state())
    with pytest.raises(ProtocolError, match=message):
        read_image(msgspec.structs.replace(image.manifest.layout, **change), body_of(image))


@pytest.mark.parametrize("lost", [1, 100])
def test_a_body_that_is_too_short_is_a_protocol_error(lost) -> None:
    image = Image("image", a_state())
    with pytest.raises(ProtocolError):
        read_image(image.manifest.layout, body_of(image)[:-lost])
