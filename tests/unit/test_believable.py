"""No number of an averaging is so high that none could follow it."""

from __future__ import annotations

import math

import pytest

from shoal.planning.collector import believable

NOW = 1_750_000_000.0


@pytest.mark.parametrize(
    ("number", "wall", "is_believed"),
    [
        (1, NOW, True), (10**9, NOW, True), (1_750_000_000_000, NOW, True), (1_750_000_000_001, NOW, False),
        (2**53, NOW, False), (0, NOW, False), (-1, NOW, False), (2**40, 0.0, True), (2**40 + 1, 0.0, False),
        (2**40, math.nan, True), (2**53, math.nan, False),
    ],
)  # fmt: skip
def test_as_many_as_there_were_milliseconds(number: int, wall: float, is_believed: bool) -> None:
    assert believable(number, wall) is is_believed
