"""Where join's settings come from: argument over environment over default, and what a bad one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.address import Address, Endpoint
from shoal.core.errors import AddressError, OptionError
from shoal.training.settings import FIRST_PORT, PORTS, PORTS_TO_TRY, Settings, default_port, read_settings

ID = "abcdefghijklmnopqrstuvwxyz234567"
MADE = "abcdefghijklmnopqrstuvwxyz-birds"
PLAIN, WITH_SECRET = f"shoal://{ID}@10.0.0.1:4711", f"shoal://{ID}@10.0.0.2:4712/{MADE}"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("RUN", "JOIN", "SECRET", "LISTEN", "IDENTITY", "JOIN_TIMEOUT_SECONDS"):
        monkeypatch.delenv(f"SHOAL_{name}", raising=False)


def read(run="birds", peers=(), secret=None, listen=None, identity=None, join_timeout_seconds=None) -> Settings:
    return read_settings(run, peers, secret, listen, identity, join_timeout_seconds)


def test_the_defaults() -> None:
    assert read() == Settings("birds", (), None, False, "0.0.0.0", None, None, 10.0)


ENVIRONMENT = {
    "SHOAL_RUN": "fish",
    "SHOAL_JOIN": f"{PLAIN} {WITH_SECRET}",
    "SHOAL_SECRET": "secret-of-the-environment",
    "SHOAL_LISTEN": "127.0.0.1:0",
    "SHOAL_IDENTITY": "/somewhere/key",
    "SHOAL_JOIN_TIMEOUT_SECONDS": "2.5",
}


def test_the_environment_is_read_where_no_argument_is_given(monkeypatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    addresses = (
        Address(ID, (Endpoint("10.0.0.1", 4711),)),
        Address(ID, (Endpoint("10.0.0.2", 4712),), MADE),
    )
    assert read(run=None) == Settings(
        "fish", addresses, "secret-of-the-environment", True, "127.0.0.1", 0, Path("/somewhere/key"), 2.5
    )


def test_arguments_win(monkeypatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    mine = read("birds", [PLAIN], "secret-of-mine", "localhost:99", "mine.key", 7)
    assert mine == Settings(
        "birds", (Address(ID, (Endpoint("10.0.0.1", 4711),)),), "secret-of-mine", True,
        "localhost", 99, Path("mine.key"), 7,
    )  # fmt: skip


def test_empty_variables_are_as_good_as_none(monkeypatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
    assert read() == Settings("birds", (), None, False, "0.0.0.0", None, None, 10.0)


def test_the_secret_of_an_address_is_used_but_was_not_given() -> None:
    settings = read(peers=[PLAIN, WITH_SECRET])
    assert (settings.secret, settings.secret_was_given) == (MADE, False)
    settings = read(peers=[WITH_SECRET], secret="secret-of-mine")
    assert (settings.secret, settings.secret_was_given) == ("secret-of-mine", True)


def test_an_address_tells_the_runs_name() -> None:
    assert read(run=None, peers=[PLAIN, WITH_SECRET]).run == "birds"
    with pytest.raises(OptionError, match=r"run = None is not allowed: it must be given: shoal.join\('a-name'\)"):
        read(run=None, peers=[PLAIN])


def test_addresses_of_two_runs_are_refused_without_their_secrets() -> None:
    with pytest.raises(OptionError) as error:
        read(peers=[WITH_SECRET, f"shoal://{ID}@h:1/another-secret"])
    assert "another-secret" not in str(error.value)
    assert MADE not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "field", "bounds"),
    [
        ({"run": "no name"}, "run", "1 to 64 characters"),
        ({"run": None}, "run", "SHOAL_RUN in the environment"),
        ({"peers": PLAIN}, "peers", "a list of addresses, also for one"),
        (
            {"peers": [WITH_SECRET, f"shoal://{ID}@h:1/another-secret"]},
            "peers",
            "addresses of one run: these have different secrets",
        ),
        ({"secret": "short"}, "secret", "8 to 200 printable characters"),
        ({"secret": ""}, "secret", "8 to 200 printable characters"),
        ({"listen": "4711"}, "listen", "HOST:PORT, with port 0 for any free one"),
        ({"listen": ""}, "listen", "HOST:PORT, with port 0 for any free one"),
        ({"listen": "h:65536"}, "listen", "the port must be a number from 0 to 65535"),
        ({"join_timeout_seconds": -1}, "join_timeout_seconds", "above 0, up to 3600"),
        ({"join_timeout_seconds": 0}, "join_timeout_seconds", "above 0, up to 3600"),
        ({"join_timeout_seconds": 3601}, "join_timeout_seconds", "above 0, up to 3600"),
        ({"join_timeout_seconds": float("nan")}, "join_timeout_seconds", "above 0, up to 3600"),
        ({"join_timeout_seconds": float("inf")}, "join_timeout_seconds", "above 0, up to 3600"),
        ({"join_timeout_seconds": "soon"}, "join_timeout_seconds", "above 0, up to 3600"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(arguments, field, bounds) -> None:
    with pytest.raises(OptionError) as error:
        read(**arguments)
    assert error.value.field == field
    assert bounds in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("RUN", "no name", OptionError),
        ("JOIN", "nonsense", AddressError),
        ("SECRET", "short", OptionError),
        ("LISTEN", "nonsense", OptionError),
        ("JOIN_TIMEOUT_SECONDS", "-3", OptionError),
        ("JOIN_TIMEOUT_SECONDS", "soon", OptionError),
    ],
)
def test_a_bad_variable_is_refused_as_an_argument_is(monkeypatch, name, value, kind) -> None:
    monkeypatch.setenv(f"SHOAL_{name}", value)
    with pytest.raises(kind):
        read(run=None if name == "RUN" else "birds")


def test_a_bad_address_is_shown() -> None:
    with pytest.raises(AddressError, match="'nonsense' is not a shoal address"):
        read(peers=[PLAIN, "nonsense"])


# ---------------------------------------------------------------- where to listen


def test_a_runs_port_is_stable_and_in_range() -> None:
    assert default_port("birds") == default_port("birds")
    ports = {default_port(f"run-{number}") for number in range(500)}
    assert len(ports) > 450
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + PORTS
    assert max(ports) + PORTS_TO_TRY < 32768, "systems give those above to outgoing connections"


def test_without_a_port_the_remembered_one_comes_first_then_the_runs_own_and_the_next() -> None:
    first = default_port("birds")
    own = [Endpoint("0.0.0.0", first + offset) for offset in range(PORTS_TO_TRY)]
    assert read().listen_candidates(None) == own
    assert read().listen_candidates(12345) == [Endpoint("0.0.0.0", 12345), *own]


def test_any_free_port_is_at_best_the_one_of_the_last_time() -> None:
    assert read(listen="127.0.0.1:0").listen_candidates(None) == [Endpoint("127.0.0.1", 0)]
    assert read(listen="127.0.0.1:0").listen_candidates(12345) == [
        Endpoint("127.0.0.1", 12345),
        Endpoint("127.0.0.1", 0),
    ]


def test_a_given_port_is_the_only_one() -> None:
    assert read(listen="127.0.0.1:99").listen_candidates(12345) == [Endpoint("127.0.0.1", 99)]
    assert read(listen="::1:99").listen_candidates(None) == [Endpoint("::1", 99)]
