"""Where a round's result comes to lie: received and reduced in place, and apart from what may still be sent."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from shoal.protocols.roll_record import Roll
from shoal.protocols.round_record import whole_group
from shoal.protocols.round_state import SETTLED, Round, held_as
from shoal.tensors.memory import Memory

MEMBERS = ["a", "b"]


def a_round(memory: Memory) -> Round:
    roll = Roll("r", "train", 0, MEMBERS, [1.0, 1.0], [None, None])
    host: Any = SimpleNamespace(peer_id="a", clock=SimpleNamespace(now=lambda: 0.0))
    values = torch.zeros(8), torch.empty(0, dtype=torch.float64)
    return Round(host, whole_group(roll, 0), values, "a", 1.0, 8, Counter(), memory)


def fill(round_: Round, index: int) -> None:
    """The mean arrives in its place, as from a reducer's stream."""
    round_.place(index).fill_(index + 1.0)
    round_.hold(index, held_as(0, 2.0, (0, 1), round_.place(index)))


def test_what_came_in_place_is_the_result_without_a_copy() -> None:
    round_ = a_round(Memory(kept=1))
    where = round_.place(0).data_ptr()
    for index in range(len(round_.parts)):
        fill(round_, index)
    result, _ = round_.settle()
    assert round_.state == SETTLED
    assert result.data_ptr() == where
    assert result.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_replaced_version_stays_as_it_is_for_those_who_are_being_sent_it() -> None:
    round_ = a_round(Memory(kept=1))
    for index in range(1, len(round_.parts)):
        fill(round_, index)
    round_.place(0).fill_(9.0)
    round_.hold(0, held_as(1, 2.0, (0, 1), round_.place(0)))
    _, being_sent = round_.mean_message(0)
    round_.hold(0, held_as(0, 2.0, (0, 1), torch.full((2,), 5.0)))
    result, _ = round_.settle()
    assert result.tolist() == [5, 5, 2, 2, 3, 3, 4, 4]
    assert torch.frombuffer(being_sent, dtype=torch.float32).tolist() == [9, 9]


def test_without_weight_a_part_keeps_the_own_values() -> None:
    round_ = a_round(Memory(kept=1))
    for index in range(1, len(round_.parts)):
        fill(round_, index)
    round_.place(0).fill_(9.0)  # what a stream left there that broke off
    round_.hold(0, held_as(0, 0.0, (), round_.place(0)))
    assert round_.settle()[0].tolist() == [0, 0, 2, 2, 3, 3, 4, 4]
