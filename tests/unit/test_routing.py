"""The routing table and the bookkeeping of a look-up, without a network."""

from __future__ import annotations

import base64
import random

import pytest

from shoal.overlay.lookup import MAX_POINTS_PER_CALL, LookUp
from shoal.overlay.routing import BUCKET_SIZE, MAX_RESTING, Contact, RoutingTable
from shoal.planning.distance import POINT_BITS, point_of


def contact(number: int, places: tuple[str, ...] = ("host:1",)) -> Contact:
    text = base64.b32encode(random.Random(number).randbytes(20)).decode().lower()
    return Contact(text, places)


ME = contact(-1).peer_id
CROWD = [contact(number) for number in range(1500)]


def bucket_of(other: Contact) -> int:
    return (point_of(other.peer_id) ^ point_of(ME)).bit_length() - 1


FAR = [other for other in CROWD if bucket_of(other) == POINT_BITS - 1][:60]  # all of one bucket


class Time:
    now = 100.0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def table(time: Time) -> RoutingTable:
    return RoutingTable(ME, lambda: time.now)


def test_a_point_is_the_beginning_of_a_hash() -> None:
    assert hex(point_of("abc")) == "0xba7816bf8f01cfea414140de5dae2223b00361a3"  # FIPS 180-2, its first 20 bytes


def test_each_bucket_holds_so_many_and_the_nearest_are_found(table: RoutingTable) -> None:
    for other in CROWD:
        table.heard(other)
    per_bucket: dict[int, int] = {}
    for other in table:
        per_bucket[bucket_of(other)] = per_bucket.get(bucket_of(other), 0) + 1
    assert max(per_bucket.values()) == BUCKET_SIZE
    assert 20 * 6 < len(table) < 20 * 8, "about log2(1500 / 20) full buckets and the near ones"
    for number in range(20):
        target = point_of(f"target {number}")
        by_hand = sorted(table, key=lambda other: point_of(other.peer_id) ^ target)[:7]
        assert table.nearest(target, 7) == by_hand


def test_a_live_contact_is_not_given_up_for_a_new_one(table: RoutingTable) -> None:
    for other in FAR:
        table.heard(other)
    assert list(table) == FAR[:BUCKET_SIZE]


def test_one_that_fails_gives_its_place_to_the_spare_one_heard_last(table: RoutingTable) -> None:
    for other in FAR[:23]:
        table.heard(other)
    table.heard(FAR[20])
    table.failed(FAR[4])
    assert list(table) == [*FAR[:4], *FAR[5:20], FAR[20]]
    table.failed(FAR[22])  # a spare one
    table.forget(FAR[0].peer_id)
    assert FAR[21] in list(table)
    assert FAR[22] not in list(table)


def test_without_a_spare_one_it_stays_rests_and_gives_way_to_a_new_one(table: RoutingTable) -> None:
    for other in FAR[:BUCKET_SIZE]:
        table.heard(other)
    table.failed(FAR[3])
    assert len(table) == BUCKET_SIZE
    assert FAR[3] not in table.nearest(0, 99)
    assert table.heard(FAR[40])
    assert FAR[3] not in list(table)
    assert len(table) == BUCKET_SIZE


def test_rests_double_up_to_five_minutes_and_end_with_an_answer(table: RoutingTable, time: Time) -> None:
    other = FAR[0]
    table.heard(other)
    lengths = []
    for _ in range(9):
        table.failed(other)
        table.failed(other)  # a second call of the same moment counts once
        begun = time.now
        while table.resting(other):
            time.now += 1.0
        lengths.append(time.now - begun)
        assert table.nearest(0, 9) == [other]
        assert table.nearest(0, 9, proven=True) == [], "it is named to nobody before it answers"
    assert lengths == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    table.heard(other)
    assert table.nearest(0, 9, proven=True) == [other]
    table.failed(other)
    time.now += 5.0
    assert not table.resting(other)


def test_false_endpoints_do_not_silence_the_true_ones(table: RoutingTable) -> None:
    table.heard(FAR[0])
    lie = Contact(FAR[0].peer_id, ("elsewhere:1",))
    table.failed(lie)
    assert table.resting(lie)
    assert table.nearest(0, 9) == [FAR[0]]
    assert table.get(FAR[0].peer_id) == FAR[0]


def test_what_is_remembered_of_failures_is_bounded(table: RoutingTable) -> None:
    for number in range(2 * MAX_RESTING):
        table.failed(Contact(ME, (f"host-{number}:1",)))
    assert len(table._rests) == MAX_RESTING


def test_itself_and_who_listens_nowhere_do_not_enter(table: RoutingTable) -> None:
    assert not table.heard(Contact(ME, ("host:1",)))
    assert not table.heard(contact(5, ()))
    assert not table.heard(contact(5, ("host:1", "host:99999")))
    assert len(table) == 0


def test_each_bucket_beyond_the_nearest_neighbour_is_refreshed(table: RoutingTable) -> None:
    assert table.refresh_points(random.Random(1)) == []
    for other in CROWD:
        table.heard(other)
    lowest = min(map(bucket_of, table))
    points = table.refresh_points(random.Random(1))
    assert [(point ^ point_of(ME)).bit_length() - 1 for point in points] == list(range(lowest, POINT_BITS))


# -- the look-up


def play(search: LookUp, network: dict[str, list[Contact]]) -> list[str]:
    """Ask one after the other; who is not in the network does not answer. Returns who was asked."""
    asked = []
    while not search.done():
        due = search.due()
        assert due is not None
        other, points = due
        asked.append(other.peer_id)
        if other.peer_id in network and other.places == ("host:1",):
            search.learn(network[other.peer_id])
            search.answer(other.peer_id, points)
        else:
            search.lose(other, points)
    return asked


def test_it_ends_at_the_nearest_that_live() -> None:
    crowd, points = CROWD[:200], [point_of("one"), point_of("other")]
    network = {other.peer_id: random.Random(number).sample(crowd, 60) for number, other in enumerate(crowd)}
    dead = crowd[::3]
    for other in dead:
        del network[other.peer_id]
    search = LookUp(points, 5, False)
    search.learn(crowd[1:3])
    asked = play(search, network)
    for point in points:
        truth = sorted(
            (other for other in crowd if other.peer_id in network), key=lambda other: point_of(other.peer_id) ^ point
        )
        assert search.nearest(point) == truth[:5]
    assert len(asked) < 60


def test_it_tries_other_endpoints_of_a_peer_before_it_gives_it_up() -> None:
    search = LookUp([1], 5, False)
    search.learn([Contact(FAR[0].peer_id, ("lie:1",)), FAR[0], Contact(FAR[1].peer_id, ("lie:1",))])
    asked = play(search, {FAR[0].peer_id: [], FAR[1].peer_id: []})
    assert sorted(asked) == sorted([FAR[0].peer_id] * 2 + [FAR[1].peer_id])
    assert search.nearest(1) == [FAR[0]]


def test_one_peer_is_asked_about_all_points_that_it_is_near_to() -> None:
    search = LookUp(list(range(MAX_POINTS_PER_CALL + 3)), 5, False)
    search.learn([FAR[0]])
    assert search.due() == (FAR[0], list(range(MAX_POINTS_PER_CALL)))
    assert search.due() == (FAR[0], list(range(MAX_POINTS_PER_CALL, MAX_POINTS_PER_CALL + 3)))
    assert search.due() is None
    assert not search.done()


def test_while_the_nearest_are_silent_more_are_asked_but_they_are_still_waited_for() -> None:
    search = LookUp([0], 1, False)
    search.learn(FAR[:3])
    nearest = sorted(FAR[:3], key=lambda other: point_of(other.peer_id))
    assert search.due() == (nearest[0], [0])
    assert search.due() is None
    search.extra = 1
    assert search.due() == (nearest[1], [0])
    search.answer(nearest[1].peer_id, [0])
    assert not search.done()
    search.lose(nearest[0], [0])
    assert search.done()
    assert search.nearest(0) == [nearest[1]]


def test_nobody_to_ask_is_the_end() -> None:
    search = LookUp([1, 2], 5, True)
    assert search.due() is None
    assert search.done()
    assert search.nearest(1) == []


class Ideal(dict[str, list[Contact]]):
    """What each peer of a crowd would answer about a point, had it heard of all in some order."""

    def __init__(self, crowd: list[Contact], point: int) -> None:
        super().__init__()
        self.names, self.crowd, self.point = {other.peer_id for other in crowd}, crowd, point

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self.names

    def __missing__(self, peer_id: str) -> list[Contact]:
        table = RoutingTable(peer_id, lambda: 0.0)
        for other in random.Random(peer_id).sample(self.crowd, len(self.crowd)):
            table.heard(other)
        return table.nearest(self.point, BUCKET_SIZE)


@pytest.mark.parametrize(("count", "most"), [(100, 7), (1000, 8), (4000, 9)])
def test_calls_grow_with_the_logarithm_of_the_swarm(count: int, most: int) -> None:
    crowd = [contact(10_000 + number) for number in range(count)]
    for number in range(5):
        point = point_of(f"target {number}")
        network = Ideal(crowd, point)
        search = LookUp([point], 5, False)
        search.learn(network[crowd[number].peer_id])
        asked = play(search, network)
        assert search.nearest(point) == sorted(crowd, key=lambda other: point_of(other.peer_id) ^ point)[:5]
        assert len(asked) <= most
