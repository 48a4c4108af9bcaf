"""Which senders are predicted to end beyond 3 x the group's median (design, section 6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planning.lateness import EARLIEST_SECONDS, predicted_stragglers


@pytest.mark.parametrize(
    ("delivered", "elapsed", "late"),
    [
        ({"a": 0.9, "b": 0.9, "c": 0.1}, 9.0, ["c"]),
        ({"a": 0.9, "b": 0.9, "c": 0.31}, 9.0, []),
        ({"a": 0.9, "b": 0.9, "c": 0.29}, 9.0, ["c"]),
        ({"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.01, "e": 0.02}, 5.0, ["d", "e"]),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, 100.0, []),
        ({"a": 0.9, "b": 0.9, "c": 0.01}, EARLIEST_SECONDS - 0.01, []),
        ({"a": 0.9, "b": 0.1}, 90.0, []),
        ({"a": 0.9}, 90.0, []),
        ({}, 90.0, []),
        ({"a": 0.9, "b": 0.9, "c": 0.0}, 90.0, []),
        ({"a": 0.9, "b": 0.9, "c": 0.9, "d": 0.0}, 90.0, []),
    ],
    ids=[
        "nine times slower", "just inside", "just outside", "two of five",
        "all done", "too early", "two have no median of others", "one", "nobody", "nothing sent: judged by silence",
        "silent beside three",
    ],
)  # fmt: skip
def test_who_is_late(delivered, elapsed, late) -> None:
    assert predicted_stragglers(delivered, dict.fromkeys(delivered, elapsed), {}) == late


def test_whoever_begins_later_is_judged_by_its_own_time() -> None:
    assert predicted_stragglers({"a": 1.0, "b": 1.0, "c": 0.15}, {"a": 9.0, "b": 9.0, "c": 3.1}, {}) == []
    assert predicted_stragglers({"a": 1.0, "b": 1.0, "c": 0.01}, {"a": 9.0, "b": 9.0, "c": 2.9}, {}) == []
    assert predicted_stragglers({"a": 1.0, "b": 1.0, "c": 0.1}, {"a": 9.0, "b": 9.0, "c": 3.1}, {}) == ["c"]


def test_whoever_is_known_to_be_slow_has_longer() -> None:
    """A line a quarter as fast as the others': at the same pace one without a known rate is late."""
    delivered, elapsed = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.15}, dict.fromkeys("abcd", 5.0)
    rates = {"a": 1 / 12e6, "b": 1 / 12e6, "c": 1 / 12e6, "d": 1 / 3e6}
    assert predicted_stragglers(delivered, elapsed, {}) == ["d"]
    assert predicted_stragglers(delivered, elapsed, rates) == []
    assert predicted_stragglers(delivered | {"d": 0.05}, elapsed, rates) == ["d"]


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=9), st.floats(0, 1e4))
def test_never_a_majority_never_who_is_done_never_the_fastest(delivered, elapsed) -> None:
    late = predicted_stragglers(delivered, dict.fromkeys(delivered, elapsed), {})
    assert len(late) <= len(delivered) / 2
    assert all(delivered[who] < 1 for who in late)
    assert not late or max(delivered[who] for who in late) < max(delivered.values())


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=9), st.floats(3, 100), st.floats(3, 100))
def test_the_verdict_does_not_depend_on_how_long_the_round_takes(fractions, one, other) -> None:
    delivered = {str(number): fraction for number, fraction in enumerate(fractions)}
    verdicts = [predicted_stragglers(delivered, dict.fromkeys(delivered, elapsed), {}) for elapsed in (one, other)]
    assert verdicts[0] == verdicts[1]
