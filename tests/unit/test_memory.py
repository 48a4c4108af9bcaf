"""Memory of flat vectors: used again when nobody looks at it any more, and never before."""

from __future__ import annotations

import torch

from shoal.tensors.flat import as_bytes, pack
from shoal.tensors.memory import Memory

SIZE = 1000


def test_memory_is_used_again_when_the_vector_is_gone() -> None:
    memory = Memory(kept=1)
    vector = memory.vector(SIZE, torch.float32)
    place = vector.data_ptr()
    other = memory.vector(SIZE, torch.float32)
    assert other.data_ptr() != place
    del vector
    assert memory.vector(SIZE, torch.float32).data_ptr() == place


def test_a_view_of_any_kind_keeps_the_memory() -> None:
    """A part that is still being sent must not be written over."""
    for look in (as_bytes, lambda vector: vector[5:7], lambda vector: vector.numpy()):
        memory = Memory(kept=1)
        vector = memory.vector(SIZE, torch.float64)
        place, view = vector.data_ptr(), look(vector)
        del vector
        assert memory.vector(SIZE, torch.float64).data_ptr() != place
        del view
        assert memory.vector(SIZE, torch.float64).data_ptr() == place


def test_another_size_or_type_gets_other_memory() -> None:
    memory = Memory(kept=2)
    memory.vector(SIZE, torch.float32)  # and it comes back at once
    assert len(memory.vector(SIZE + 1, torch.float32)) == SIZE + 1
    assert memory.vector(SIZE, torch.float64).dtype == torch.float64
    assert len(memory.vector(0, torch.float64)) == 0


def test_no_more_than_so_many_are_kept() -> None:
    memory = Memory(kept=2)
    vectors = [memory.vector(SIZE, torch.float32) for _ in range(5)]
    places = [vector.data_ptr() for vector in vectors]
    del vectors
    again = [memory.vector(SIZE, torch.float32) for _ in range(2)]
    assert len({vector.data_ptr() for vector in again} & set(places)) == 2
    assert not memory._free


def test_vectors_outlive_the_memory_that_gave_them() -> None:
    memory = Memory(kept=1)
    first, second = pack([torch.ones(SIZE)], memory)
    del memory
    assert first.sum() == SIZE
    assert len(second) == 0
