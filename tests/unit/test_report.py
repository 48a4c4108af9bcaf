"""The text of a report."""

from __future__ import annotations

import dataclasses

from shoal.training.report import Report


def report(**given: object) -> Report:
    empty = {field.name: () if "tuple" in str(field.type) else 0 for field in dataclasses.fields(Report)}
    return Report(**{**empty, "event_counts": {}, "dropped": {}, "peer_id": "abcdefghij", **given})


def test_messages_that_changed_nothing_are_told_with_their_number() -> None:
    text = str(report(dropped={"a duplicate part": 3}))
    assert "dropped      a duplicate part, 3 times" in text


def test_without_any_nothing_is_told_of_them() -> None:
    assert "dropped" not in str(report())
