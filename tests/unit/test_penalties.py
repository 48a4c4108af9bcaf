"""For how long who is refused, and that it is forgiven."""

from __future__ import annotations

import pytest

from shoal.planning import penalties
from shoal.planning.penalties import FORGIVE_SECONDS, Penalties, offences_left, refusal_seconds


@pytest.mark.parametrize(
    ("offences", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (9, 256.0), (10, 300.0), (11, 300.0), (10**9, 300.0)]
)
def test_twice_as_long_each_time_up_to_five_minutes(offences: int, seconds: float) -> None:
    assert refusal_seconds(offences) == seconds


@pytest.mark.parametrize(
    ("good_seconds", "left"), [(-5.0, 3), (0.0, 3), (59.9, 3), (60.0, 2), (120.0, 1), (180.0, 0), (1e9, 0)]
)
def test_one_offence_is_forgotten_for_each_minute_without_one(good_seconds: float, left: int) -> None:
    assert offences_left(3, good_seconds) == left


def test_who_offends_again_and_again_is_refused_for_longer_each_time() -> None:
    book, now = Penalties(), 100.0
    refused = []
    for _ in range(12):
        refused.append(book.punish("peer", now))
        assert book.left_seconds("peer", now) == refused[-1]
        now += refused[-1]
        assert book.left_seconds("peer", now) == 0.0
    assert refused == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_while_it_is_refused_nothing_is_added() -> None:
    """A group round that meets a defect breaks on all of its connections at once: that is one offence."""
    book = Penalties()
    assert book.punish("peer", 0.0) == 1.0
    assert [book.punish("peer", 0.25), book.punish("peer", 0.5)] == [0.75, 0.5]
    assert book.punish("peer", 1.0) == 2.0


def test_it_is_forgiven_and_begins_anew() -> None:
    book = Penalties()
    for moment in (0.0, 1.0, 3.0):
        book.punish("peer", moment)  # three offences, refused until 7
    assert book.punish("peer", 7.0 + 2 * FORGIVE_SECONDS) == 2.0
    assert book.punish("peer", 1e6) == 1.0


def test_another_peer_is_not_concerned() -> None:
    book = Penalties()
    book.punish("one", 0.0)
    assert book.left_seconds("other", 0.0) == 0.0
    assert book.punish("other", 0.0) == 1.0


def test_a_crowd_of_offenders_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "MAX_REMEMBERED", 3)
    book = Penalties()
    for number in range(5):
        book.punish(f"peer {number}", 0.0)
    assert [book.left_seconds(f"peer {number}", 0.0) > 0 for number in range(5)] == [False, False, True, True, True]
