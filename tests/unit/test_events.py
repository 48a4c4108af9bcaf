"""The event log: what strangers cause pushes nothing else out."""

from __future__ import annotations

from shoal.core.events import KEPT_REFUSALS, MAX_REASON_CHARS, REFUSALS_AT_ONCE, Event, EventLog


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_events_are_in_order_whatever_their_kind() -> None:
    log = EventLog(Time())
    for kind in ("joined", "refused", "lost", "refused", "left"):
        log.add(kind, "reason")
    assert [event.kind for event in log.recent] == ["joined", "refused", "lost", "refused", "left"]


def test_a_flood_of_refusals_is_counted_told_in_part_and_pushes_nothing_out() -> None:
    time, told = Time(), list[Event]()
    log = EventLog(time, told.append)
    log.add("lost", "its connection closed", "a peer")
    for number in range(100_000):
        time.now += 0.01
        log.add("refused", f"10.0.0.1:{number}: nonsense")
    assert log.counts == {"lost": 1, "refused": 100_000}
    assert log.recent[0].kind == "lost"
    expected = REFUSALS_AT_ONCE + 1000 * 0.2
    assert expected - 2 <= len(told) - 1 <= expected + 2
    assert len(log.recent) == 1 + KEPT_REFUSALS
    assert "(and 499 refusals before it)" in log.recent[-1].reason


def test_a_flood_of_strangers_does_not_hide_what_a_peer_was_refused_for() -> None:
    log = EventLog(Time())
    for _ in range(1000):
        log.add("refused", "10.0.0.1: nonsense")
    log.add("refused", "it sent nonsense", "a peer")
    assert log.recent[-1].peer_id == "a peer"


def test_a_reason_is_cut() -> None:
    """A peer's word is part of some: megabytes of it are kept nowhere."""
    log = EventLog(Time())
    log.add("joined", "x" * 1_000_000)
    log.add("refused", "x" * 1_000_000)
    assert all(len(event.reason) <= MAX_REASON_CHARS + 50 for event in log.recent)


def test_a_callback_that_raises_is_an_event_and_goes_no_further() -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError("of the user's")

    log = EventLog(Time(), broken)
    log.add("joined", "reason")
    assert [event.kind for event in log.recent] == ["joined", "fault"]
    assert log.counts == {"joined": 1, "fault": 1}
