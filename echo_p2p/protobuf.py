"""Protobuf messages as lists of (field number, value): enough for keys and for the p2p daemon's control protocol.

Knows no schema: varint fields are `int`, length-delimited ones are `bytes`. Generated code would pull in a vendor.
"""

from collections.abc import Iterator

Field = tuple[int, int | bytes]

VARINT_MAX_BYTES = 10
_VARINT = 0
_BYTES = 2


def encode_varint(value: int) -> bytes:
    """Little-endian base 128, as protobuf, multiformats and libp2p's length prefixes use it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """The value at `offset` and the offset behind it. Raises ValueError if it is cut off or too long."""
    value = 0
    for index in range(VARINT_MAX_BYTES):
        if offset + index >= len(data):
            break
        byte = data[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value, offset + index + 1
    raise ValueError("a protobuf varint is cut off or too long")


def encode(*fields: Field) -> bytes:
    """One message from its fields, in order."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += encode_varint(number << 3 | _VARINT) + encode_varint(value)
        else:
            out += encode_varint(number << 3 | _BYTES) + encode_varint(len(value)) + value
    return bytes(out)


def decode(data: bytes) -> Iterator[Field]:
    """The fields of one message, in order. Raises ValueError on anything malformed."""
    offset = 0
    while offset < len(data):
        tag, offset = decode_varint(data, offset)
        number, wire_type = tag >> 3, tag & 7
        value, offset = decode_varint(data, offset)
        if wire_type == _VARINT:
            yield number, value
        elif wire_type == _BYTES and offset + value <= len(data):
            yield number, data[offset : offset + value]
            offset += value
        else:
            raise ValueError(f"field {number} of a protobuf message has wire type {wire_type} or is cut off")


def bytes_field(data: bytes, number: int) -> bytes:
    """The last length-delimited field `number` (protobuf's rule for duplicates). Raises ValueError if there is none."""
    found = bytes_fields(data, number)
    if not found:
        raise ValueError(f"a protobuf message lacks field {number}")
    return found[-1]


def bytes_fields(data: bytes, number: int) -> list[bytes]:
    """All length-delimited fields `number`, in order."""
    return [value for found, value in decode(data) if found == number and isinstance(value, bytes)]


def int_field(data: bytes, number: int) -> int:
    """The last varint field `number`. Raises ValueError if there is none."""
    found = [value for key, value in decode(data) if key == number and isinstance(value, int)]
    if not found:
        raise ValueError(f"a protobuf message lacks field {number}")
    return found[-1]
