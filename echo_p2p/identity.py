"""A node's Ed25519 key: its file, its PeerID, its signatures. Knows no network stack.

The file holds libp2p's protobuf `PrivateKey(key_type=Ed25519, data=seed || public key)`, which both stacks accept.
What a PeerID is, and what a signature is worth, is said in `echo_protocols.keys`.
"""

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo_p2p import protobuf
from echo_p2p.errors import IdentityError
from echo_protocols import keys
from echo_protocols.keys import base58_decode as base58_decode  # for the network code, which spells PeerIDs
from echo_protocols.keys import base58_encode as base58_encode

SEED_BYTES = 32
SIGNATURE_BYTES = 64

_ED25519 = 1  # libp2p's KeyType


@dataclass(frozen=True, slots=True)
class Identity:
    """One key pair. `seed` is the secret; `peer_id` is base58."""

    seed: bytes = field(repr=False)
    public_key: bytes
    peer_id: str

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `data`."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(data)


def generate() -> Identity:
    """A new random identity."""
    return from_seed(secrets.token_bytes(SEED_BYTES))


def from_seed(seed: bytes) -> Identity:
    """The identity of a 32-byte seed."""
    public_key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    return Identity(seed, public_key, keys.peer_id(public_key))


def public_key_of(peer_id: str) -> bytes:
    """The public key inside an Ed25519 PeerID. Raises IdentityError if it is none."""
    try:
        return keys.public_key(peer_id)
    except ValueError as error:
        raise IdentityError(str(error)) from None


def peer_id_bytes(peer_id: str) -> bytes:
    """The bytes behind a base58 PeerID. Raises IdentityError if it is not base58."""
    try:
        return base58_decode(peer_id)
    except ValueError as error:
        raise IdentityError(str(error)) from None


def verify(signer: bytes | str, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` is by `signer`: a public key or a PeerID. Never raises on hostile input."""
    try:
        return keys.verify(keys.public_key(signer) if isinstance(signer, str) else signer, signature, data)
    except ValueError:
        return False


def load_or_create(path: Path) -> Identity:
    """Read the key file at `path`, or make one (mode 0600). Raises IdentityError."""
    try:
        if not path.exists():
            _write_new(path, generate())
        return _load(path)
    except OSError as error:
        raise IdentityError(f"the identity file {path} can't be used: {error.strerror}; check its folder") from error


def to_file_bytes(identity: Identity) -> bytes:
    """The content of a key file."""
    return protobuf.encode((1, _ED25519), (2, identity.seed + identity.public_key))


def from_file_bytes(content: bytes) -> Identity:
    """The identity in a key file. Raises ValueError if it is not a whole Ed25519 key."""
    if protobuf.int_field(content, 1) != _ED25519:
        raise ValueError("its key is not Ed25519")
    data = protobuf.bytes_field(content, 2)
    if len(data) != 2 * SEED_BYTES:
        raise ValueError(f"its key has {len(data)} bytes instead of {2 * SEED_BYTES}")
    identity = from_seed(data[:SEED_BYTES])
    if data[SEED_BYTES:] != identity.public_key:
        raise ValueError("its public key does not belong to its seed")
    return identity


def _load(path: Path) -> Identity:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise IdentityError(f"the identity file {path} is open to others (mode {mode:04o}); run: chmod 600 {path}")
    try:
        return from_file_bytes(path.read_bytes())
    except ValueError as error:
        raise IdentityError(
            f"the identity file {path} is damaged ({error}); restore it, or move it away to get a new PeerID"
        ) from error


def _write_new(path: Path, identity: Identity) -> None:
    """All or nothing: a half-written key would be a lost PeerID. If another process was first, its key stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(to_file_bytes(identity))
            file.flush()
            os.fsync(file.fileno())
        if not path.exists():
            os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink(missing_ok=True)
