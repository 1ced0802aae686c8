"""Who may write a record: the rule that the DHT asks for each record it stores, sends or receives. Knows no DHT.

The subkey is the owner's PeerID, and the value ends with the owner's Ed25519 signature over key, subkey, value and
expiry. Anything else is refused: unsigned, foreign, oversized, or with an expiry too far away. Duck-typed to hivemind's
`RecordValidatorBase`; key, subkey and value arrive as msgpack, the key hashed (so an owner can't be named in the key).
"""

import struct
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from echo_p2p.identity import SIGNATURE_BYTES, Identity, verify
from echo_p2p.net.base import RECORD_MAX_BYTES

TTL_MAX_S = 24 * 3600.0
"""A record that outlives this would occupy its holders for nothing."""

CLOCK_SKEW_S = 60.0

_DOMAIN = b"echo-record/1\n"
_MSGPACK_OVERHEAD_BYTES = 8


class SignedRecord(Protocol):
    """What we read of a DHT's record."""

    @property
    def key(self) -> bytes: ...
    @property
    def subkey(self) -> bytes: ...
    @property
    def value(self) -> bytes: ...
    @property
    def expiration_time(self) -> float: ...


class OwnedRecords:
    """The validator of one node. `now` gives Unix seconds."""

    priority = 10

    def __init__(self, identity: Identity, now: Callable[[], float] = time.time) -> None:
        self._identity = identity
        self._now = now

    def sign_value(self, record: SignedRecord) -> bytes:
        """The value with our signature; useless under another owner's subkey, where everybody refuses it."""
        return record.value + self._identity.sign(_signed_bytes(record, record.value))

    def strip_value(self, record: SignedRecord) -> bytes:
        """The value without its signature; only called on records that were found valid."""
        return record.value[:-SIGNATURE_BYTES]

    def validate(self, record: SignedRecord) -> bool:
        """Whether the owner wrote this record. Never raises, whatever a peer sent."""
        if len(record.value) > RECORD_MAX_BYTES + _MSGPACK_OVERHEAD_BYTES + SIGNATURE_BYTES:
            return False
        if not record.expiration_time <= self._now() + TTL_MAX_S + CLOCK_SKEW_S:  # so NaN is refused too
            return False
        try:
            owner = msgspec.msgpack.decode(record.subkey, type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        value, signature = record.value[:-SIGNATURE_BYTES], record.value[-SIGNATURE_BYTES:]
        return verify(owner, signature, _signed_bytes(record, value))

    def merge_with(self, other: object) -> bool:
        """One rule is enough: a second of the same kind adds nothing."""
        return isinstance(other, OwnedRecords)


def _signed_bytes(record: SignedRecord, value: bytes) -> bytes:
    head = struct.pack(">IIId", len(record.key), len(record.subkey), len(value), record.expiration_time)
    return _DOMAIN + head + record.key + record.subkey + value
