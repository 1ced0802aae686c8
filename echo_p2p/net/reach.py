"""Whether others can dial this node: it asks peers that dial it back, and they say what came of it.

A peer that is asked dials the asker's own address, as it sees it on the connection between them, at the ports that the
asker names, over new TCP connections, and has to find the asker there: behind one router others may answer. Nobody can
have a stranger dialled. Knows neither daemon nor record.
"""

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import trio
from msgspec import Meta, Struct
from trio import TaskStatus

from echo_p2p.errors import FrameTooLarge, NetError, Unreachable
from echo_p2p.net.base import Stream, Streams
from echo_p2p.net.dialing import PROBE_TIMEOUT_S, tcp_endpoint
from echo_p2p.net.noise import answers_as
from echo_protocols import names
from echo_protocols.values import Time

logger = logging.getLogger(__name__)

Reach = Literal["public", "relayed", "none", "unknown"]
Refusal = Literal["busy", "malformed", "relayed"]

PORTS_MAX = 4
WITNESSES_MAX = 3
AGAIN_S = 300.0
AGAIN_UNANSWERED_S = 15.0

_HOSTS_MAX = 2
_DIALS_AT_ONCE = 8
_FRAME_MAX_BYTES = 512
_ASK_TIMEOUT_S = 10.0

SeenAt = Callable[[str], Awaitable[Sequence[str]]]  # the remote addresses of our connections with a peer


class DialBackRequest(Struct, frozen=True, array_like=True):
    """TCP ports of the asker that shall be dialled."""

    ports: Annotated[tuple[Annotated[int, Meta(ge=1, le=65535)], ...], Meta(min_length=1, max_length=PORTS_MAX)]


class DialBackAnswer(Struct, frozen=True, array_like=True):
    """Where the asker could be dialled (`/ip4/…/tcp/…`), nil if nowhere; and the time here, in Unix seconds."""

    now: Time
    reached: Annotated[str, Meta(max_length=128)] | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What several answers amount to. `addresses` are those that got through, `witnesses` how many could say."""

    reach: Reach = "unknown"
    addresses: tuple[str, ...] = ()
    witnesses: int = 0


def conclude(answers: Iterable[DialBackAnswer], *, relayed: bool) -> Finding:
    """Public if most of those that could say got through; else as good as our relays."""
    said = [answer for answer in answers if answer.refusal is None]
    through = [answer.reached for answer in said if answer.reached is not None]
    if 2 * len(through) > len(said):
        return Finding("public", tuple(dict.fromkeys(through)), len(said))
    if relayed:
        return Finding("relayed", (), len(said))
    return Finding("none" if said else "unknown", (), len(said))


def said_reach(reach: str, addresses: Iterable[str]) -> str:
    """A reach in words that promise no more than its addresses do: dialled at 127.0.0.1, it is this machine's alone."""
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    if reach != "public" or not direct or not all(address.startswith(("/ip4/", "/ip6/")) for address in direct):
        return reach
    try:
        found = [ipaddress.ip_address(address.split("/")[2]) for address in direct]
    except ValueError:
        return reach
    if all(each.is_loopback for each in found):
        return "this machine only"
    return reach if any(each.is_global for each in found) else "this network only"


def hosts_of(addresses: Iterable[str]) -> tuple[str, ...]:
    """The IP addresses that a peer's direct connections come from, as `ip4/…` or `ip6/…`; a relay's is not its own."""
    hosts = []
    for address in addresses:
        parts = address.split("/")
        if "p2p-circuit" in parts or len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
            continue
        try:
            ipaddress.ip_address(parts[2])
        except ValueError:
            continue
        hosts.append(f"{parts[1]}/{parts[2]}")
    return tuple(dict.fromkeys(hosts))


def ports_of(addresses: Iterable[str]) -> tuple[int, ...]:
    """The TCP ports of our own direct addresses."""
    endpoints = (tcp_endpoint(address) for address in addresses if "/p2p-circuit" not in address)
    ports = dict.fromkeys(endpoint[1] for endpoint in endpoints if endpoint and 0 < endpoint[1] < 65536)
    return tuple(ports)[:PORTS_MAX]


class Allowance:
    """At most `times` a minute for each key. The key that was used longest ago is forgotten beyond `keys_max`."""

    def __init__(self, times: int = 30, *, keys_max: int = 4096) -> None:
        self._times = times
        self._keys_max = keys_max
        self._used: OrderedDict[str, list[float]] = OrderedDict()

    def take(self, key: str, now: float) -> bool:
        """Whether `key` may, at `now` in seconds; if so, it has."""
        recent = [at for at in self._used.get(key, ()) if now - at < 60.0]
        allowed = len(recent) < self._times
        self._used[key] = [*recent, now] if allowed else recent
        self._used.move_to_end(key)
        if len(self._used) > self._keys_max:
            self._used.popitem(last=False)
        return allowed


async def serve_dial_back(
    streams: Streams, seen_at: SeenAt, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Dial back whoever asks, until cancelled."""
    dialler = _Dialler()

    async def handle(stream: Stream) -> None:
        answer = DialBackAnswer(time.time(), None, "malformed")
        try:
            with trio.fail_after(_ASK_TIMEOUT_S):
                request = msgspec.msgpack.decode(await stream.receive(), type=DialBackRequest)
                hosts = hosts_of(await seen_at(stream.peer))
                answer = await dialler.dial_back(stream.peer, hosts, request.ports)
        except (msgspec.DecodeError, FrameTooLarge, trio.TooSlowError) as error:
            logger.debug("what peer %s asked for is no dial-back: %s", stream.peer, error)
        with trio.move_on_after(_ASK_TIMEOUT_S):
            await stream.send(msgspec.msgpack.encode(answer))

    await streams.serve(
        names.DIAL_BACK, handle, max_frame_bytes=_FRAME_MAX_BYTES, max_streams=32, task_status=task_status
    )


class _Dialler:
    """Dials few at a time, and each network seldom."""

    def __init__(self) -> None:
        self._allowance = Allowance()
        self._limiter = trio.CapacityLimiter(_DIALS_AT_ONCE)

    async def dial_back(self, peer: str, hosts: Sequence[str], ports: Sequence[int]) -> DialBackAnswer:
        if not hosts:
            return DialBackAnswer(time.time(), None, "relayed")
        now = trio.current_time()
        allowed = [host for host in hosts[:_HOSTS_MAX] if self._allowance.take(_neighbourhood(host), now)]
        if not allowed or self._limiter.available_tokens < 1:
            return DialBackAnswer(time.time(), None, "busy")
        async with self._limiter:
            addresses = [f"/{host}/tcp/{port}" for host in allowed for port in dict.fromkeys(ports)]
            reached = await first_reached(peer, addresses)
        return DialBackAnswer(time.time(), reached)


def _neighbourhood(host: str) -> str:
    """What is dialled for whom is counted by: who has one IPv6 address has 2^64."""
    kind, address = host.split("/")
    return host if kind == "ip4" else str(ipaddress.ip_network((address, 64), strict=False))


async def first_reached(peer: str, addresses: Sequence[str], timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """The first of `addresses` where `peer` answers, all dialled at once; None if it does at none in time."""
    found: list[str] = []
    async with trio.open_nursery() as nursery:

        async def dial(address: str) -> None:
            if await answers_as(peer, address, timeout_s):
                found.append(address)
                nursery.cancel_scope.cancel()

        for address in addresses:
            nursery.start_soon(dial, address)
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer, and how far the witness's clock is ahead of ours, in seconds, give or take half of `round_trip_s`."""

    answer: DialBackAnswer
    clock_ahead_s: float
    round_trip_s: float


async def ask_dial_back(streams: Streams, witness: str, ports: Sequence[int]) -> Heard:
    """Have `witness` dial us back. Raises Unreachable, also for an answer that is none."""
    request = msgspec.msgpack.encode(DialBackRequest(tuple(ports)[:PORTS_MAX]))
    try:
        with trio.fail_after(_ASK_TIMEOUT_S):
            async with streams.open(witness, names.DIAL_BACK, timeout_s=_ASK_TIMEOUT_S / 2) as stream:
                asked_at, began_at = time.time(), trio.current_time()
                await stream.send(request)
                answer = msgspec.msgpack.decode(await stream.receive(), type=DialBackAnswer)
                took_s = trio.current_time() - began_at
    except (trio.TooSlowError, msgspec.DecodeError, FrameTooLarge) as error:
        raise Unreachable(f"peer {witness} did not say whether it can dial us: {error!r}") from error
    endpoint = tcp_endpoint(answer.reached) if answer.reached is not None else None
    if answer.reached is not None and (endpoint is None or endpoint[1] not in ports or not hosts_of([answer.reached])):
        raise Unreachable(f"peer {witness} says that it reached us at {answer.reached!r}, where we did not ask it to")
    # it looks at its clock when it has dialled, at the end
    return Heard(answer, answer.now - (asked_at + took_s), took_s)


class Lookout:
    """How reachable this node is. Each witness is asked again every `AGAIN_S`, and all of them when we have moved.

    Keeps what the present witnesses said, and nothing of others.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._addresses: frozenset[str] = frozenset()
        self._answers: dict[str, DialBackAnswer] = {}
        self._again_at: dict[str, float] = {}

    async def look(self, addresses: Iterable[str], witnesses: Sequence[str]) -> Finding:
        """The finding now, for a node that listens at `addresses`: from answers that still hold, or from new ones."""
        ours = tuple(addresses)
        if (direct := self._unproved(ours)) != self._addresses:
            self._addresses, self._again_at = direct, {}
        now, asked = trio.current_time(), tuple(witnesses)[:WITNESSES_MAX]
        self._again_at = {witness: at for witness, at in self._again_at.items() if witness in asked}
        due = [witness for witness in asked if now >= self._again_at.get(witness, 0.0)]
        self._answers = {witness: answer for witness, answer in self._answers.items() if witness in self._again_at}
        if ports := ports_of(ours):
            await self._ask(due, ports)
        return conclude(self._answers.values(), relayed=any("/p2p-circuit" in address for address in ours))

    def _unproved(self, addresses: Sequence[str]) -> frozenset[str]:
        """Our direct addresses, but for those that only witnesses have told us."""
        told = {f"{answer.reached}/p2p/" for answer in self._answers.values()}
        return frozenset(
            address
            for address in addresses
            if "/p2p-circuit" not in address and not any(address.startswith(each) for each in told)
        )

    async def _ask(self, witnesses: Sequence[str], ports: Sequence[int]) -> None:
        async def ask(witness: str) -> None:
            self._answers.pop(witness, None)
            try:
                self._answers[witness] = (await ask_dial_back(self._streams, witness, ports)).answer
            except NetError as error:
                logger.debug("%s", error)
            said = witness in self._answers and self._answers[witness].refusal is None
            self._again_at[witness] = trio.current_time() + (AGAIN_S if said else AGAIN_UNANSWERED_S)

        async with trio.open_nursery() as nursery:
            for witness in witnesses:
                nursery.start_soon(ask, witness)
