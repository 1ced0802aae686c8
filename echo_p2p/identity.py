"""A node's Ed25519 key: its file, its PeerID, its signatures. Knows no network stack.

The file holds libp2p's protobuf `PrivateKey(key_type=Ed25519, data=seed || public key)`, which both stacks accept;
the PeerID is the identity multihash of the protobuf `PublicKey`, so a PeerID alone verifies a signature.
"""

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo_p2p import protobuf
from echo_p2p.errors import IdentityError

SEED_BYTES = 32
SIGNATURE_BYTES = 64

_ED25519 = 1  # libp2p's KeyType
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# Identity multihash (code 0, 36 bytes) of PublicKey(key_type=Ed25519, data=32 bytes).
_PEER_PREFIX = bytes([0, 36]) + protobuf.encode((1, _ED25519)) + bytes([0x12, 32])
_PEER_CHARACTERS_MAX = 64


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
    return Identity(seed, public_key, peer_id_of(public_key))


def peer_id_of(public_key: bytes) -> str:
    """The PeerID of a 32-byte Ed25519 public key."""
    return base58_encode(_PEER_PREFIX + public_key)


def public_key_of(peer_id: str) -> bytes:
    """The public key inside an Ed25519 PeerID. Raises IdentityError if it is none."""
    raw = peer_id_bytes(peer_id)
    if len(raw) != len(_PEER_PREFIX) + 32 or not raw.startswith(_PEER_PREFIX):
        raise IdentityError(f"{peer_id!r} is not an Ed25519 PeerID; it must look like 12D3Koo…")
    return raw[len(_PEER_PREFIX) :]


def peer_id_bytes(peer_id: str) -> bytes:
    """The bytes behind a base58 PeerID. Raises IdentityError if it is not base58."""
    if len(peer_id) > _PEER_CHARACTERS_MAX:
        raise IdentityError(f"a PeerID of {len(peer_id)} characters is too long; it must look like 12D3Koo…")
    return base58_decode(peer_id)


def verify(signer: bytes | str, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` is by `signer`: a public key or a PeerID. Never raises on hostile input."""
    try:
        public_key = public_key_of(signer) if isinstance(signer, str) else signer
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, IdentityError, ValueError):
        return False
    return True


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


def base58_encode(data: bytes) -> str:
    """Base58 of the Bitcoin alphabet, the text form of PeerIDs."""
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """The inverse. Raises IdentityError on a character outside the alphabet."""
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            raise IdentityError(f"{text!r} is not base58: {character!r} is not in its alphabet")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
