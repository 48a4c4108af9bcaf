"""Records and the shelf: signatures, sequences, expiry, and counts that add up."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from shoal.net.envelope import decode_body, raw
from shoal.net.identity import Identity
from shoal.overlay.records import (
    MAX_TTL_SECONDS,
    MAX_VALUE_BYTES,
    SKEW_SECONDS,
    SWEEP_SECONDS,
    Shelf,
    SignedRecord,
    merge,
    sign,
)

OWNERS = [Identity(number.to_bytes(32, "big")) for number in range(5)]


class Wall:
    now = 1_750_000_000.0


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def shelf(wall: Wall) -> Shelf:
    return Shelf(lambda: wall.now)


def made(sequence: int, until: float, owner: int = 0, value: bytes = b"value") -> SignedRecord:
    return sign(OWNERS[owner], "key", value, sequence, until)


def test_a_record_survives_the_wire_and_is_genuine() -> None:
    record = made(7, 1.75e9)
    assert decode_body(raw(record), SignedRecord) == record
    assert record.genuine()
    assert record.owner == OWNERS[0].peer_id


def test_no_single_bit_of_it_can_be_changed() -> None:
    record = made(7, 1.75e9)
    for field in ("public_key", "value", "signature"):
        content = bytearray(getattr(record, field))
        for bit in range(8 * len(content)):
            content[bit // 8] ^= 1 << bit % 8
            assert not msgspec.structs.replace(record, **{field: bytes(content)}).genuine()
            content[bit // 8] ^= 1 << bit % 8
    assert not msgspec.structs.replace(record, sequence=8).genuine()
    assert not msgspec.structs.replace(record, expires_at=math.nextafter(1.75e9, math.inf)).genuine()
    assert record.genuine()


def test_it_is_valid_from_now_to_the_longest_life_of_a_fast_clock() -> None:
    for until, valid in [
        (100.0, False), (100.1, True), (100 + MAX_TTL_SECONDS + SKEW_SECONDS, True),
        (100.1 + MAX_TTL_SECONDS + SKEW_SECONDS, False), (math.nan, False), (math.inf, False), (-math.inf, False),
    ]:  # fmt: skip
        assert made(1, until).valid_at(100.0) is valid


def test_merging_keeps_the_newest_of_each_owner() -> None:
    newest: dict[str, SignedRecord] = {}
    records = [made(sequence, 1.75e9, owner) for owner in range(3) for sequence in range(4)]
    random.Random(1).shuffle(records)
    for record in records:
        merge(newest, record)
    assert {owner: record.sequence for owner, record in newest.items()} == {o.peer_id: 3 for o in OWNERS[:3]}


def test_what_came_last_is_first(shelf: Shelf, wall: Wall) -> None:
    for owner, sequence in [*enumerate([3, 1, 5, 2, 4]), (1, 6)]:
        assert shelf.put(1, made(sequence, wall.now + 60, owner))
    assert [record.sequence for record in shelf.under(1)] == [6, 4, 2, 5, 3]
    assert shelf.under(2) == []
    assert shelf.points() == [1]


def test_what_fits_leaves_out_what_is_known(shelf: Shelf, wall: Wall) -> None:
    records = [made(1, wall.now + 60, owner) for owner in range(5)]
    for record in records:
        assert shelf.put(1, record)
    last = records[::-1]
    assert shelf.fitting(1, {last[0].mark, last[2].mark}, 9, 10**6) == [last[1], last[3], last[4]]
    assert shelf.fitting(1, set(), 2, 10**6) == last[:2]
    assert shelf.fitting(1, set(), 9, 3 * last[0].size_bytes + 1) == last[:3]


def test_what_has_expired_is_swept_and_the_counts_add_up(shelf: Shelf, wall: Wall) -> None:
    choose = random.Random(2)
    for number in range(300):
        owner, point = choose.randrange(5), choose.randrange(10)
        value = b"v" * choose.randrange(MAX_VALUE_BYTES)
        shelf.put(point, made(number, wall.now + choose.uniform(1, 100), owner, value))
        wall.now += choose.uniform(0, 3)
        held = [held.record for owners in shelf._held.values() for held in owners.values()]
        assert len(shelf) == len(held)
        assert shelf._bytes == sum(record.size_bytes for record in held)
        assert shelf._keys_of.total() == len(held)
    wall.now += 200
    assert shelf.under(1) == []
    assert (len(shelf), shelf._bytes, shelf._held, dict(shelf._keys_of)) == (0, 0, {}, {})


def test_a_wall_clock_that_jumps_back_does_not_stop_the_sweep(shelf: Shelf, wall: Wall) -> None:
    wall.now -= 1e6
    assert shelf.put(1, made(1, wall.now + 5))
    wall.now += 5 + SWEEP_SECONDS
    assert shelf.under(1) == []
    assert len(shelf) == 0


def test_a_newer_record_that_lives_shorter_bars_the_older_one(shelf: Shelf, wall: Wall) -> None:
    older, newer = made(1, wall.now + 100), made(2, wall.now + 10)
    assert shelf.put(1, older)
    assert shelf.put(1, newer)
    wall.now += 50
    assert not shelf.put(1, older)
    assert shelf.under(1) == []
    wall.now += 60
    assert shelf.under(1) == []
    assert len(shelf) == 0
