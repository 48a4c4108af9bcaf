"""What a peer remembers of a run between its starts."""

from __future__ import annotations

import os
import stat

import pytest

from shoal.core.address import Address, Endpoint
from shoal.training.state_folder import MAX_REMEMBERED, Remembered, RunFolder

FIRST, SECOND, THIRD = (letter * 32 for letter in "abc")


@pytest.fixture
def folder(tmp_path):
    return RunFolder("birds", tmp_path)


def test_nothing_is_remembered_at_first(folder) -> None:
    assert folder.read() == Remembered(None, None, [])
    assert folder.addresses() == []


def test_secret_port_and_peers_are_remembered(folder) -> None:
    folder.remember("a-secret-of-mine", 4711, {FIRST: ["10.0.0.1:1", "fe80::1:2"]})
    again = RunFolder("birds", folder.path.parent)
    assert again.read() == Remembered("a-secret-of-mine", 4711, [f"shoal://{FIRST}@10.0.0.1:1,fe80::1:2"])
    assert again.addresses() == [Address(FIRST, (Endpoint("10.0.0.1", 1), Endpoint("fe80::1", 2)))]


def test_the_secret_stands_in_no_address(folder) -> None:
    folder.remember("a-secret-of-mine", 4711, {FIRST: ["h:1"]})
    assert [address.secret for address in folder.addresses()] == [None]


def test_runs_are_kept_apart(folder) -> None:
    folder.remember("a-secret-of-mine", 4711, {})
    assert RunFolder("fish", folder.path.parent).read() == Remembered()


def test_those_who_are_here_come_before_those_who_were(folder) -> None:
    folder.remember("secret-1", 1, {FIRST: ["h:1"], SECOND: ["h:2"]})
    folder.remember("secret-2", 2, {THIRD: ["h:3"], SECOND: ["moved:9"]})
    assert folder.read().secret == "secret-2"
    assert folder.read().port == 2
    places = [(address.peer_id, str(address.endpoints[0])) for address in folder.addresses()]
    assert places == [(THIRD, "h:3"), (SECOND, "moved:9"), (FIRST, "h:1")]


def test_a_peer_without_a_place_is_not_remembered(folder) -> None:
    folder.remember("a-secret-of-mine", 1, {FIRST: [], SECOND: ["h:2"]})
    assert [address.peer_id for address in folder.addresses()] == [SECOND]


def test_the_file_does_not_grow_for_ever(folder) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    for number in range(3 * MAX_REMEMBERED):
        peer_id = letters[number // 32] + letters[number % 32] + "a" * 30
        folder.remember("a-secret-of-mine", 1, {peer_id: [f"h:{number + 1}"]})
    kept = folder.addresses()
    assert len(kept) == MAX_REMEMBERED
    assert str(kept[0].endpoints[0]) == f"h:{3 * MAX_REMEMBERED}", "the newest stay"


GARBAGE = {
    "empty": b"",
    "no JSON": b"\x00\x01\x02",
    "another JSON": b"[1, 2, 3]",
    "wrong types": b'{"secret": 5, "port": "x", "peers": {}}',
    "half": b'{"secret": "a-secr',
    "no text": b'{"secret": "\xff\xfe"}',
    "nested": b"[" * 100_000,
    "nested field": b'{"more": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_file_that_is_not_shoals_counts_as_none_and_is_replaced(folder, content) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / "run.json").write_bytes(content)
    assert folder.read() == Remembered()
    assert folder.addresses() == []
    folder.remember("a-secret-of-mine", 1, {FIRST: ["h:1"]})
    assert [address.peer_id for address in folder.addresses()] == [FIRST]


def test_an_address_that_cannot_be_read_is_left_out(folder) -> None:
    folder.remember("a-secret-of-mine", 1, {FIRST: ["h:1"]})
    file = folder.path / "run.json"
    file.write_text(file.read_text().replace('"shoal://', '"nonsense", "shoal://'))
    assert [address.peer_id for address in folder.addresses()] == [FIRST]


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_only_this_user_can_read_the_file_also_when_it_was_there_before(folder) -> None:
    folder.path.mkdir(parents=True)
    file = folder.path / "run.json"
    file.write_text("{}")
    file.chmod(0o644)
    before = os.umask(0)
    try:
        folder.remember("a-secret-of-mine", 1, {FIRST: ["h:1"]})
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_draft_is_left_behind(folder) -> None:
    for number in range(3):
        folder.remember("a-secret-of-mine", number + 1, {})
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


def test_the_base_is_the_argument_then_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path / "environment"))
    assert RunFolder("birds").path == tmp_path / "environment" / "birds"
    assert RunFolder("birds", tmp_path / "mine").path == tmp_path / "mine" / "birds"
    monkeypatch.delenv("SHOAL_STATE")
    assert RunFolder("birds").path.name == "birds"
