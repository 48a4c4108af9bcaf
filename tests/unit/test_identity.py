"""Who a peer is: stable ids, signatures, and the locked file."""

from __future__ import annotations

import os
import re
import ssl
import stat

import pytest
from cryptography import x509

from shoal.core.errors import IdentityInUse, OptionError
from shoal.net.identity import KEY_BYTES, Identity, identity_file, peer_id_of, verify, write_private


def test_an_id_follows_from_the_key_alone_and_never_changes() -> None:
    """It is in people's addresses and folders: another version of shoal must find the same."""
    assert Identity(bytes(32)).peer_id == peer_id_of(Identity(bytes(32)).public_key)
    assert Identity(bytes(32)).peer_id == "trpijfjody3vtlb4uazslogmhbkvkzpj"
    assert re.fullmatch("[a-z2-7]{32}", Identity(os.urandom(32)).peer_id)


def test_different_keys_have_different_ids() -> None:
    assert len({Identity(number.to_bytes(32, "big")).peer_id for number in range(100)}) == 100


def test_a_signature_is_worth_something_for_one_key_and_one_message_only() -> None:
    me, other = Identity(bytes(32)), Identity(b"x" * 32)
    signature = me.sign(b"message")
    assert verify(me.public_key, signature, b"message")
    assert not verify(me.public_key, signature, b"massage")
    assert not verify(other.public_key, signature, b"message")
    assert not verify(me.public_key, signature[:-1] + b"\x00", b"message")


@pytest.mark.parametrize(
    ("key", "signature"), [(b"", b""), (b"k" * 31, b"s" * 64), (b"k" * 33, b"s"), (b"\xff" * 32, b"")]
)
def test_malformed_keys_and_signatures_prove_nothing(key, signature) -> None:
    assert not verify(key, signature, b"message")


def test_the_certificate_holds_the_public_key_and_a_server_can_use_it(tmp_path) -> None:
    me = Identity(bytes(32))
    pem = me.certificate_pem()
    certificate = x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERTIFICATE") :])
    assert certificate.public_key().public_bytes_raw() == me.public_key
    (tmp_path / "peer.pem").write_bytes(pem)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "peer.pem")


# ---------------------------------------------------------------- the file


def test_the_file_is_made_once_and_keeps_the_id(tmp_path) -> None:
    path = tmp_path / "new" / "folder" / "peer.key"
    with identity_file(path) as first:
        assert len(path.read_bytes()) == KEY_BYTES
    with identity_file(path) as second:
        assert second.peer_id == first.peer_id
    with identity_file(tmp_path / "other.key") as other:
        assert other.peer_id != first.peer_id


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_only_this_user_can_read_the_file(tmp_path) -> None:
    before = os.umask(0)
    try:
        with identity_file(tmp_path / "peer.key"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "peer.key").stat().st_mode) == 0o600


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path) -> None:
    path = tmp_path / "peer.key"
    with identity_file(path) as first:
        refused = pytest.raises(IdentityInUse, match=r"the identity .*peer\.key is in use by another peer")
        with refused, identity_file(path):
            pass
        assert path.read_bytes()
    with identity_file(path) as second:
        assert second.peer_id == first.peer_id


def test_the_lock_is_let_go_when_the_holder_fails(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), identity_file(tmp_path / "peer.key"):
        raise ZeroDivisionError
    with identity_file(tmp_path / "peer.key"):
        pass


@pytest.mark.parametrize("size", [0, 1, KEY_BYTES - 1, KEY_BYTES + 1, 4000])
def test_a_file_of_another_size_is_refused_and_left_alone(tmp_path, size) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(b"k" * size)
    for _ in range(2):  # the lock was let go
        refused = pytest.raises(OptionError, match="a file of exactly 32 bytes that shoal itself wrote")
        with refused, identity_file(path):
            pass
    assert path.read_bytes() == b"k" * size


def test_a_private_file_is_replaced_whole(tmp_path) -> None:
    path = tmp_path / "folder" / "file"
    write_private(path, b"long content")
    write_private(path, b"short")
    assert path.read_bytes() == b"short"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
