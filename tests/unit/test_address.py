"""The address grammar: what is accepted, the round trip, and what the errors say."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.address import (
    FORM,
    MAX_ENDPOINTS,
    Address,
    Endpoint,
    check_run,
    check_secret,
    make_secret,
    parse_address,
    parse_endpoint,
    run_in_secret,
)
from shoal.core.errors import AddressError, OptionError

ID = "abcdefghijklmnopqrstuvwxyz234567"
WORD = string.ascii_letters + string.digits + "._-"

peer_ids = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=32, max_size=32)
names = st.text(WORD, min_size=1, max_size=60)
ipv6 = st.ip_addresses(v=6).map(str)
hosts = st.one_of(names, st.ip_addresses(v=4).map(str), ipv6)
endpoints = st.builds(Endpoint, hosts, st.integers(1, 65535))
secrets = st.text(WORD, min_size=8, max_size=100)
runs = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
addresses = st.builds(
    Address,
    peer_ids,
    st.lists(endpoints, min_size=1, max_size=MAX_ENDPOINTS).map(tuple),
    st.one_of(st.none(), secrets),
)


@given(addresses)
def test_an_address_reads_back_as_it_was_written(address) -> None:
    assert parse_address(str(address)) == address


@given(addresses)
def test_an_address_has_only_characters_that_no_shell_eats(address) -> None:
    assert re.fullmatch(r"[A-Za-z0-9@:,./_-]+", str(address))


@given(endpoints)
def test_an_endpoint_reads_back_as_it_was_written(endpoint) -> None:
    assert parse_endpoint(str(endpoint)) == endpoint


@given(st.text(max_size=80))
def test_any_other_text_is_an_address_error_that_shows_the_form(text) -> None:
    try:
        parse_address(text)
    except AddressError as error:
        assert str(error).startswith(f"{text!r} is not a shoal address: ")
        assert str(error).endswith(f"Expected {FORM}")
    else:
        assert text.strip().startswith("shoal://")


@given(addresses, st.text(string.printable, min_size=1, max_size=3), st.data())
def test_an_address_with_foreign_text_in_it_is_read_right_or_refused(address, foreign, data) -> None:
    text = str(address)
    at = data.draw(st.integers(0, len(text)))
    try:
        read = parse_address(text[:at] + foreign + text[at:])
    except AddressError:
        return
    assert parse_address(str(read)) == read


def test_white_space_around_an_address_is_ignored() -> None:
    assert parse_address(f"  shoal://{ID}@h:1\n") == Address(ID, (Endpoint("h", 1),))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it does not start with shoal://"),
        ("http://x@h:1", "it does not start with shoal://"),
        ("SHOAL://x@h:1", "it does not start with shoal://"),
        ("shoal://h:1", "there is no @ between peer id and host"),
        ("shoal://abc@h:1", "the peer id must be 32 characters of a-z and 2-7, got 3: 'abc'"),
        (f"shoal://{ID.upper()}@h:1", "the peer id must be 32 characters of a-z and 2-7, got 32"),
        (f"shoal://{ID[:-1]}1@h:1", "the peer id must be 32 characters of a-z and 2-7, got 32"),
        (f"shoal://{ID}@h", "'h' is not HOST:PORT (for example 192.168.1.20:4711)"),
        (f"shoal://{ID}@:1", "':1' is not HOST:PORT"),
        (f"shoal://{ID}@", "'' is not HOST:PORT"),
        (f"shoal://{ID}@h:1,", "'' is not HOST:PORT"),
        (f"shoal://{ID}@h h:1", "'h h:1' is not HOST:PORT"),
        (f"shoal://{ID}@h:", "'h:': the port must be a number from 1 to 65535, got ''"),
        (f"shoal://{ID}@h:0", "the port must be a number from 1 to 65535, got '0'"),
        (f"shoal://{ID}@h:65536", "the port must be a number from 1 to 65535, got '65536'"),
        (f"shoal://{ID}@h:-1", "the port must be a number from 1 to 65535, got '-1'"),
        (f"shoal://{ID}@h:٣", "the port must be a number from 1 to 65535"),
        (f"shoal://{ID}@h:1/", "the secret must be 8 to 100 characters of A-Za-z0-9._-"),
        (f"shoal://{ID}@h:1/short", "the secret must be 8 to 100 characters of A-Za-z0-9._-"),
        (f"shoal://{ID}@h:1/{'s' * 101}", "the secret must be 8 to 100 characters of A-Za-z0-9._-"),
        (f"shoal://{ID}@h:1/a/secret/x", "the secret must be 8 to 100 characters of A-Za-z0-9._-"),
        (f"shoal://{ID}@" + ",".join(["h:1"] * 17), "it has 17 endpoints, at most 16 are allowed"),
    ],
)
def test_the_error_says_what_was_wrong(text, problem) -> None:
    with pytest.raises(AddressError) as error:
        parse_address(text)
    assert problem in str(error.value)


@pytest.mark.parametrize("digits", [6, 5000])
def test_a_port_of_many_digits_is_an_address_error(digits) -> None:
    """A peer sends such texts too, and Python itself refuses to read more than 4300 digits."""
    with pytest.raises(AddressError):
        parse_endpoint("h:" + "9" * digits)


def test_port_0_is_allowed_only_where_one_listens() -> None:
    assert parse_endpoint("127.0.0.1:0", lowest_port=0) == Endpoint("127.0.0.1", 0)
    with pytest.raises(AddressError, match="from 1 to 65535"):
        parse_endpoint("127.0.0.1:0")


def test_an_ipv6_host_stands_without_brackets() -> None:
    assert parse_endpoint("fe80::1:4711") == Endpoint("fe80::1", 4711)


@given(runs)
def test_a_good_name_of_a_run(run) -> None:
    assert check_run(run) == run


@pytest.mark.parametrize("run", ["", "-x", ".x", "a b", "a/b", "a\n", "ä", "x" * 65, None, 7])
def test_a_bad_name_of_a_run(run) -> None:
    with pytest.raises(OptionError, match=r"run = .* 1 to 64 characters of A-Za-z0-9\._- that start with a letter"):
        check_run(run)


@pytest.mark.parametrize("secret", ["", "short", "s" * 201, "12345678\n", None, 12345678])
def test_a_bad_secret_is_refused_and_not_repeated(secret) -> None:
    with pytest.raises(OptionError, match=r"8 to 200 printable characters") as error:
        check_secret(secret)
    assert error.value.field == "secret"
    assert not secret or str(secret) not in str(error.value)


@given(st.binary(min_size=16, max_size=16), runs)
def test_a_made_secret_is_a_good_one_and_tells_the_run(random_bytes, run) -> None:
    secret = make_secret(random_bytes, run)
    assert check_secret(secret) == secret
    assert run_in_secret(secret) == run
    assert parse_address(f"shoal://{ID}@h:1/{secret}").secret == secret


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), runs)
def test_all_128_bits_are_in_a_made_secret(one, other, run) -> None:
    assert (make_secret(one, run) == make_secret(other, run)) == (one == other)


@pytest.mark.parametrize("secret", [None, "", "a-secret-of-mine", "correct-horse-battery"])
def test_a_chosen_secret_tells_no_run(secret) -> None:
    assert run_in_secret(secret) is None
