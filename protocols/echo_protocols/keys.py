"""PeerIDs and Ed25519 signatures. A PeerID is its public key, so a signature can be checked with the id alone. Pure.

Source: libp2p peer-id specification; an Ed25519 PeerID is the identity multihash of the protobuf
`PublicKey{Type: Ed25519, Data: 32 bytes}` in base58btc.
"""

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])  # identity multihash of 36 bytes; Ed25519; 32 bytes
_MAX_CHARACTERS = 64

_PRIME = 2**255 - 19
_Y_OF_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
# Points of order 1, 2, 4 and 8: under such a key one signature may hold for any data, by anybody.
_WEAK_Y = frozenset({0, 1, _PRIME - 1, _Y_OF_ORDER_8, _PRIME - _Y_OF_ORDER_8})


def peer_id(public_key: bytes) -> str:
    """The PeerID of a raw Ed25519 public key (32 bytes)."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return base58_encode(_PREFIX + public_key)


@lru_cache(maxsize=4096)
def public_key(peer: str) -> bytes:
    """The raw public key inside an Ed25519 PeerID. Raises ValueError for anything else."""
    data = base58_decode(peer)
    if len(data) != len(_PREFIX) + 32 or not data.startswith(_PREFIX):
        raise ValueError(f"{peer!r} is not an Ed25519 PeerID; it must look like 12D3Koo…")
    return data[len(_PREFIX) :]


def verify(key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` (64 bytes) over `data` was made by the holder of the raw public key `key`. Never raises."""
    if (int.from_bytes(key, "little") & (2**255 - 1)) % _PRIME in _WEAK_Y:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def base58_encode(data: bytes) -> str:
    """Base58 of the Bitcoin alphabet, the text form of PeerIDs."""
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """The inverse, of at most 64 characters. Raises ValueError for anything else."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a PeerID of {len(text)} characters is too long; it must look like 12D3Koo…")
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise ValueError(f"{text!r} is not base58: {character!r} is not in its alphabet")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
