"""What all channels of a transport hold unread together: bounded, fair, and never a dead-lock."""

from __future__ import annotations

import random

import pytest

from shoal.net import channel as channel_under_test
from shoal.net.channel import Intake

FRAME = 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_under_test, "UNREAD_BYTES", 100)


class Reader:
    """A channel: reads a frame whenever it may, and holds it until somebody takes it."""

    def __init__(self, intake: Intake) -> None:
        self.intake, self.held, self.reads = intake, 0, True

    def look(self) -> None:
        self.reads = self.intake.may_read(self, self.look)

    def arrive(self) -> bool:
        if not self.reads:
            return False
        self.change(FRAME)
        return True

    def change(self, grown: int) -> None:
        self.held += grown
        self.intake.hold(self, self.held)
        self.look()


def test_one_channel_takes_half_and_leaves_room_for_another() -> None:
    reader = Reader(Intake())
    while reader.arrive():
        pass
    assert reader.held == 50 + FRAME
    reader.change(-FRAME)
    assert reader.reads


def test_one_that_hoards_does_not_keep_the_others_from_reading() -> None:
    intake = Intake()
    readers = [Reader(intake) for _ in range(5)]
    for reader in readers:
        while reader.arrive():
            pass
        assert reader.held > 0
    assert readers[1].held >= 20, "there was room for one more"
    assert intake.total_bytes <= 100 + 5 * FRAME
    assert not readers[0].reads


def test_one_that_holds_nothing_always_reads_its_next_frame() -> None:
    intake = Intake()
    for _ in range(50):
        reader = Reader(intake)
        assert reader.arrive()
    assert intake.total_bytes == 50 * FRAME


def test_what_a_closed_channel_held_is_free_and_those_who_wait_read_on() -> None:
    intake = Intake()
    first, second = Reader(intake), Reader(intake)
    for reader in (first, second):
        while reader.arrive():
            pass
    assert not first.reads
    intake.forget(second)
    intake.forget(first)
    assert intake.total_bytes == 0
    assert not intake._waiting


def test_under_any_order_of_reading_and_taking_all_is_read_and_the_bound_holds() -> None:
    choose, intake = random.Random(5), Intake()
    readers = {Reader(intake): 200 for _ in range(8)}
    while any(readers.values()) or intake.total_bytes:
        reader = choose.choice(list(readers))
        if readers[reader] and choose.random() < 0.6:
            readers[reader] -= reader.arrive()
        elif reader.held:
            reader.change(-FRAME)
        assert intake.total_bytes <= 100 + len(readers) * FRAME
        assert intake.total_bytes == sum(one.held for one in readers)
        assert all(one.reads for one in readers if one.held == 0)
