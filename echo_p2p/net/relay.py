"""What a relay will carry: asks one for a reservation, and reads the limit in its answer (libp2p circuit relay v2)."""

import trio

from echo_p2p import protobuf
from echo_p2p.errors import NetError, Unreachable
from echo_p2p.net.daemon import Daemon, read_message

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
TIMEOUT_S = 5.0

_TYPE, _LIMIT, _STATUS = 1, 4, 5  # fields of HopMessage
_RESERVE, _STATUS_OK = 0, 100
_LIMIT_DATA = 2


async def relay_limit_bytes(daemon: Daemon, relay: str) -> int | None:
    """Bytes that `relay` lets through each way of one connection; None: no limit. Raises Unreachable."""
    connection = await daemon.dial(relay, HOP_PROTOCOL, TIMEOUT_S)
    request = protobuf.encode((_TYPE, _RESERVE))
    try:
        with trio.fail_after(TIMEOUT_S):
            await connection.send_all(protobuf.encode_varint(len(request)) + request)
            answer = await read_message(connection)
        return limit_in(answer)
    except (trio.TooSlowError, trio.BrokenResourceError, ValueError) as error:
        raise Unreachable(f"relay {relay} did not say its limit: {error!r}") from error
    finally:
        await trio.aclose_forcefully(connection)


def limit_in(answer: bytes) -> int | None:
    """The data limit in an answer to a reservation. Raises NetError if it was refused, ValueError if malformed."""
    status = protobuf.int_field(answer, _STATUS)
    if status != _STATUS_OK:
        raise NetError(f"the relay refused a reservation (status {status})")
    limits = protobuf.bytes_fields(answer, _LIMIT)
    data = [value for limit in limits for number, value in protobuf.decode(limit) if number == _LIMIT_DATA]
    return data[-1] if data and isinstance(data[-1], int) and data[-1] > 0 else None
