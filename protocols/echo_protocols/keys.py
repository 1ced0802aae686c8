"""PeerIDs and Ed25519 signatures. A PeerID is its public key, so a signature can be checked with the id alone. Pure.

Source: libp2p peer-id specification; an Ed25519 PeerID is the identity multihash of the protobuf
`PublicKey{Type: Ed25519, Data: 32 bytes}` in base58btc.
"""

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])  # identity multihash of 36 bytes; Ed25519; 32 bytes


def peer_id(public_key: bytes) -> str:
    """The PeerID of a raw Ed25519 public key (32 bytes)."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    data = _PREFIX + public_key
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


@lru_cache(maxsize=4096)
def public_key(peer: str) -> bytes:
    """The raw public key inside an Ed25519 PeerID. Raises ValueError for anything else."""
    if len(peer) > 64:
        raise ValueError("not an Ed25519 PeerID: too long")
    number = 0
    for char in peer:
        digit = _ALPHABET.find(char)
        if digit < 0:
            raise ValueError(f"not a PeerID: {char!r} is no base58 digit")
        number = number * 58 + digit
    data = bytes(len(peer) - len(peer.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    if len(data) != 38 or not data.startswith(_PREFIX):
        raise ValueError(f"not an Ed25519 PeerID: {peer}")
    return data[len(_PREFIX) :]


def verify(key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` (64 bytes) over `data` was made by the holder of the raw public key `key`."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
