"""The key file, the PeerID and signatures, against libp2p as an oracle."""

import os
import threading

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.pb import crypto_pb2
from libp2p.peer.id import ID

from echo_p2p import identity
from echo_p2p.errors import IdentityError


def test_peer_id_equals_that_of_libp2p():
    for number in range(20):
        seed = bytes([number]) * 32
        assert identity.from_seed(seed).peer_id == str(ID.from_pubkey(create_new_key_pair(seed).public_key))


def test_key_file_is_private_and_in_the_form_of_libp2p(tmp_path):
    path = tmp_path / "data" / "identity.key"
    made = identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]
    message = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    assert message.key_type == crypto_pb2.KeyType.Ed25519
    assert message.data == made.seed + made.public_key
    assert identity.load_or_create(path) == made


def test_racing_starts_agree_on_one_key(tmp_path):
    path, found = tmp_path / "identity.key", []
    threads = [threading.Thread(target=lambda: found.append(identity.load_or_create(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.peer_id for one in found}) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_key_file_open_to_others_is_refused_with_the_cure(tmp_path):
    path = tmp_path / "identity.key"
    identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match=r"0644.*chmod 600"):
        identity.load_or_create(path)


def test_damaged_key_file_is_refused_and_kept(tmp_path):
    path = tmp_path / "identity.key"
    identity.load_or_create(path)
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (b"", whole[:1], whole[:20], whole[:-1], whole + b"\xff", b"\x08\x00" + whole[2:], flipped):
        path.write_bytes(damaged)
        with pytest.raises(IdentityError, match="damaged"):
            identity.load_or_create(path)
        assert path.read_bytes() == damaged


def test_unusable_folder_is_an_identity_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="can't be used"):
        identity.load_or_create(tmp_path / "file" / "identity.key")


def test_signature_verifies_by_key_and_by_peer_id_only_for_its_signer():
    ours, other = identity.generate(), identity.generate()
    signature = ours.sign(b"data")
    assert len(signature) == identity.SIGNATURE_BYTES
    assert identity.verify(ours.public_key, signature, b"data")
    assert identity.verify(ours.peer_id, signature, b"data")
    assert not identity.verify(ours.peer_id, signature, b"date")
    assert not identity.verify(other.peer_id, signature, b"data")
    for hostile in ("", "0OIl", "1" * 10_000, "12D3KooW", b"", os.urandom(31)):
        assert not identity.verify(hostile, signature, b"data")
    assert not identity.verify(ours.peer_id, b"", b"data")


def test_peer_id_survives_base58_and_rsa_ids_are_refused():
    ours = identity.generate()
    assert identity.public_key_of(ours.peer_id) == ours.public_key
    assert identity.base58_decode(identity.base58_encode(b"\0\0abc")) == b"\0\0abc"
    with pytest.raises(IdentityError, match="not an Ed25519 PeerID"):
        identity.public_key_of("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")


def test_seed_is_not_shown():
    assert "seed" not in repr(identity.generate())
