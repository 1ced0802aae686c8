"""Who answers at a TCP address: the first half of libp2p's Noise handshake, in which the other side proves its PeerID.

Noise_XX_25519_ChaChaPoly_SHA256 after multistream-select, as in the libp2p specifications (noise, connections). We
hang up after the second message: nothing follows the handshake, and we stay unnamed.
"""

import hashlib
import hmac

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from echo_p2p import protobuf
from echo_p2p.identity import verify
from echo_p2p.net.dialing import PROBE_TIMEOUT_S, tcp_endpoint

_MULTISTREAM = b"\x13/multistream/1.0.0\n"
_NOISE = b"\x07/noise\n"
_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"  # 32 bytes, so it is its own first hash
_SIGNED_PREFIX = b"noise-libp2p-static-key:"
_IDENTITY_SIGNATURE = 2  # field of NoiseHandshakePayload
_KEY_BYTES, _TAG_BYTES = 32, 16
_NO_NONCE = bytes(12)  # each key here encrypts one message


async def answers_as(peer: str, address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether the Ed25519 peer `peer` answers at `address` (`/ip4/…/tcp/…`), over a new TCP connection."""
    endpoint = tcp_endpoint(address)
    if endpoint is None:
        return False
    with trio.move_on_after(timeout_s):
        try:
            connection = await trio.open_tcp_stream(*endpoint)
        except OSError:
            return False
        try:
            return await _proves(connection, peer)
        except (EOFError, ValueError, InvalidTag, trio.BrokenResourceError):
            return False
        finally:
            await trio.aclose_forcefully(connection)
    return False


async def _proves(connection: trio.SocketStream, peer: str) -> bool:
    ours = X25519PrivateKey.generate()
    public = ours.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    await connection.send_all(_MULTISTREAM + _NOISE)
    for expected in (_MULTISTREAM, _NOISE):
        if await _read(connection, len(expected)) != expected:
            return False
    await connection.send_all(len(public).to_bytes(2, "big") + public)
    size = int.from_bytes(await _read(connection, 2), "big")
    return _is_by(peer, await _read(connection, size), ours, public)


def _is_by(peer: str, answer: bytes, ours: X25519PrivateKey, public: bytes) -> bool:
    """Whether the handshake's second message is an answer of `peer` to our first. Raises ValueError, InvalidTag."""
    ephemeral, sealed = answer[:_KEY_BYTES], answer[_KEY_BYTES:]
    sealed_static, sealed_payload = sealed[: _KEY_BYTES + _TAG_BYTES], sealed[_KEY_BYTES + _TAG_BYTES :]
    state = _NAME
    for mixed in (b"", public, b"", ephemeral):  # no prologue; our message has no payload
        state = hashlib.sha256(state + mixed).digest()
    chaining, key = _mix(_NAME, ours.exchange(X25519PublicKey.from_public_bytes(ephemeral)))
    static = ChaCha20Poly1305(key).decrypt(_NO_NONCE, sealed_static, state)
    state = hashlib.sha256(state + sealed_static).digest()
    _, key = _mix(chaining, ours.exchange(X25519PublicKey.from_public_bytes(static)))
    payload = ChaCha20Poly1305(key).decrypt(_NO_NONCE, sealed_payload, state)
    return verify(peer, protobuf.bytes_field(payload, _IDENTITY_SIGNATURE), _SIGNED_PREFIX + static)


def _mix(chaining: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Noise's HKDF: the next chaining key, and a key."""
    extracted = hmac.digest(chaining, secret, "sha256")
    first = hmac.digest(extracted, b"\1", "sha256")
    return first, hmac.digest(extracted, first + b"\2", "sha256")


async def _read(connection: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := await connection.receive_some(size - len(data))):
            raise EOFError
        data += more
    return data
