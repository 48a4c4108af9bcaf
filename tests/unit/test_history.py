"""What a peer's history makes of averagings that fail."""

from __future__ import annotations

from shoal.core.errors import NobodyThere, RoundError
from shoal.core.events import EventLog
from shoal.protocols.history import GlobalStep, History

SLOW = RoundError("not done within the 5.0 s that timeout_seconds left it", 7, ("a", "b"))


def advice(log: EventLog) -> list[str]:
    return [event.reason for event in log.recent if event.kind == "advice"]


def test_a_time_limit_that_is_too_short_is_told_once() -> None:
    log = EventLog(lambda: 0.0)
    history = History(log)
    for _ in range(10):
        history.failed(SLOW)
    assert advice(log) == [
        "three averagings in a row: not done within the 5.0 s that timeout_seconds left it. Make timeout_seconds longer"
    ]


def test_failures_of_other_kinds_and_successes_begin_anew() -> None:
    log = EventLog(lambda: 0.0)
    history = History(log)
    for between in (
        lambda: history.failed(NobodyThere("nobody else called in time")),
        lambda: history.stepped(GlobalStep(1, 0.0, {}, "target", True, 1.0, 0.1)),
    ):
        history.failed(SLOW)
        history.failed(SLOW)
        between()
    assert advice(log) == []
    assert len(history.failures) == 5
