"""How many mean gradients a peer keeps for those who missed their steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.overlay.member_record import CATCHING_UP, TRAINING
from shoal.protocols import mean_gradients
from shoal.protocols.mean_gradients import KEPT_FOR_NEWCOMERS, KEPT_STEPS, MeanGradients


def kept(state: str, steps: int, floats: int = 10) -> list[int]:
    host: Any = SimpleNamespace(serve_stream=lambda kind, handler: None)
    members: Any = SimpleNamespace(members={"another": SimpleNamespace(state=state)})
    gradients = MeanGradients(host, members)
    for step in range(1, steps + 1):
        gradients.keep(step, (torch.zeros(floats), torch.zeros(0, dtype=torch.float64)))
    return list(gradients._kept)


def test_two_are_kept_for_a_peer_that_missed_a_step() -> None:
    assert kept(TRAINING, 5) == [4, 5]
    assert KEPT_STEPS == 2


def test_more_are_kept_while_somebody_downloads_a_state() -> None:
    assert kept(CATCHING_UP, 50) == list(range(51 - KEPT_FOR_NEWCOMERS, 51))


@pytest.mark.parametrize(("floats", "count"), [(100, 10), (1000, 2)])
def test_but_not_more_than_their_bytes_allow(monkeypatch: pytest.MonkeyPatch, floats: int, count: int) -> None:
    monkeypatch.setattr(mean_gradients, "KEPT_BYTES", 4000)
    assert len(kept(CATCHING_UP, 50, floats)) == count
