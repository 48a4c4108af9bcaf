"""A charter's strategy as an object: also one of another version of shoal."""

from __future__ import annotations

import pytest

from shoal.core.errors import MismatchError
from shoal.strategies import AllReduce, Moshpit, build_strategy
from shoal.strategies.options import options_of


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(),
        Moshpit(group_size=5, every_steps=3),
        AllReduce(average="gradients", target_batch=64, max_grad_norm=1.0),
    ],
)
def test_a_strategy_comes_back_from_its_charter(strategy: AllReduce | Moshpit) -> None:
    assert build_strategy(options_of(strategy)) == strategy


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": "Telepathy"}, "this run's strategy is Telepathy, and this version of shoal has AllReduce, Moshpit"),
        ({"name": "AllReduce", "colour": 3}, "does not understand its options"),
        ({"name": "Moshpit", "group_size": -1}, "group_size = -1 is not allowed"),
        ({}, "this run's strategy is None"),
    ],
)
def test_what_this_version_does_not_have_is_told(options: dict, told: str) -> None:
    with pytest.raises(MismatchError, match="install the version that the run has") as refused:
        build_strategy(options)
    assert told in str(refused.value)
