"""The one envelope that everything durable or gossiped travels in, and the border that opens it.

Behind the border code handles typed values only. The border never raises for what a peer sent: it counts a reason
and returns a Refusal. It reads no clock (`now` is passed in) and knows no run rules.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from echo_protocols import keys
from echo_protocols.names import PROTOCOL_VERSION
from echo_protocols.peer import Complaint, Plan, RoleRecord
from echo_protocols.release import Release
from echo_protocols.rollout import LargeRollout, RolloutGroup
from echo_protocols.run import RunManifest
from echo_protocols.sync import LatestRelease, PullRequest
from echo_protocols.values import Count, Hash, Name, Signature, Time, canonical, decode, encode

T = TypeVar("T")

NO_RUN = bytes(32)
"""The run id of what belongs to no run: role records, and the manifest itself."""

MAX_CLOCK_SKEW_S = 60.0
_DOMAIN = b"echo/envelope/1\x00"
_OVERHEAD_BYTES = 512
_Part = Annotated[int, Meta(ge=0, le=65535)]


class Envelope(Struct, frozen=True, kw_only=True, array_like=True):
    """What is signed, and the signature. `signer` is a raw Ed25519 public key; `issued_at` is in Unix seconds.

    Its fields are fixed for a major version: only payloads may gain some. There is one encoding of an envelope, and no
    other is accepted, so that nobody can give a sealed value another hash.
    """

    version: tuple[_Part, _Part]
    kind: Name
    run_id: Hash
    signer: Hash
    sequence: Count
    issued_at: Time
    payload: bytes
    signature: Signature


class _VersionOnly(Struct, array_like=True):
    """The first field of an envelope of any major version."""

    version: tuple[_Part, _Part]


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of payload: its name on the wire, its type and the most bytes it may have.

    An `exact` payload has one encoding and no unknown fields: it is known by its hash, or must be understood whole.
    """

    name: str
    type: type[T]
    max_bytes: int
    exact: bool = False


ROLE = Kind("role", RoleRecord, 8 << 10)
RUN = Kind("run", RunManifest, 15 << 10, exact=True)
PLAN = Kind("plan", Plan, 15 << 10)
RELEASE = Kind("release", Release, 1 << 20)
LATEST = Kind("latest", LatestRelease, 1 << 10)
ROLLOUT = Kind("rollout", RolloutGroup, 16 << 20)
LARGE_ROLLOUT = Kind("large-rollout", LargeRollout, 1 << 10)
PULL = Kind("pull", PullRequest, 64 << 10)
COMPLAINT = Kind("complaint", Complaint, 1 << 10)


@dataclass(frozen=True, slots=True)
class Opened(Generic[T]):
    """A checked envelope: who says what, and when."""

    signer: str
    sequence: int
    issued_at: float
    payload: T


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something was dropped: a reason to count, and a sentence."""

    reason: str
    detail: str = ""


class Sealer:
    """Signs what one peer says. Its sequence numbers grow over restarts when `first_sequence` comes from a clock."""

    def __init__(self, public_key: bytes, sign: Callable[[bytes], bytes], first_sequence: int) -> None:
        self._public_key = public_key
        self._sign = sign
        self._sequence = first_sequence

    def seal(self, kind: Kind[T], run_id: bytes, payload: T, now: float) -> bytes:
        """The bytes of a signed envelope. Raises ValueError when the payload is over its kind's bound."""
        body = canonical(payload) if kind.exact else encode(payload)
        if len(body) > kind.max_bytes:
            raise ValueError(f"a {kind.name} of {len(body)} bytes is over the bound of {kind.max_bytes}")
        self._sequence += 1
        draft = Envelope(
            version=PROTOCOL_VERSION,
            kind=kind.name,
            run_id=run_id,
            signer=self._public_key,
            sequence=self._sequence,
            issued_at=float(now),
            payload=body,
            signature=bytes(64),
        )
        return encode(msgspec.structs.replace(draft, signature=self._sign(signed_bytes(draft))))


def signed_bytes(envelope: Envelope) -> bytes:
    """What the signature covers: every field but itself, behind a domain prefix."""
    fields = msgspec.structs.astuple(envelope)[:-1]
    return _DOMAIN + encode(fields)


class Border:
    """Opens envelopes, refuses bad ones and counts why.

    Replays are found with a window of the last `replay_window` sequence numbers of each (signer, kind); `max_windows`
    of them are kept, the least recently heard is evicted. It is a first line: who keeps what it admits also knows it
    by what is in it.
    """

    def __init__(self, *, replay_window: int = 4096, max_windows: int = 4096) -> None:
        self.refused: Counter[str] = Counter()
        self._replay_window = replay_window
        self._max_windows = max_windows
        self._windows: OrderedDict[tuple[str, str], _ReplayWindow] = OrderedDict()

    def open(self, data: bytes, kind: Kind[T], run_id: bytes, now: float, *, once: bool = False) -> Opened[T] | Refusal:
        """Check everything that needs no state of the run. `once` also refuses what was opened before."""
        opened = _open(data, kind, run_id, now)
        if isinstance(opened, Refusal):
            return self.refuse(opened.reason, opened.detail)
        if once and not self._first_time(opened.signer, kind.name, opened.sequence):
            return self.refuse("replayed", f"{kind.name} {opened.sequence} of {opened.signer}")
        return opened

    def refuse(self, reason: str, detail: str = "") -> Refusal:
        """Count a refusal; rules behind the border report theirs here too, so that one table shows them all."""
        self.refused[reason] += 1
        return Refusal(reason, detail)

    def _first_time(self, signer: str, kind: str, sequence: int) -> bool:
        window = self._windows.pop((signer, kind), None) or _ReplayWindow(self._replay_window)
        self._windows[signer, kind] = window
        while len(self._windows) > self._max_windows:
            self._windows.popitem(last=False)
        return window.first_time(sequence)


def reopen(data: bytes, kind: Kind[T]) -> Opened[T]:
    """Read an envelope of our own disk, which was checked before it was written. Raises msgspec.DecodeError."""
    envelope = decode(data, Envelope)
    payload = decode(envelope.payload, kind.type)
    return Opened(keys.peer_id(envelope.signer), envelope.sequence, envelope.issued_at, payload)


class _ReplayWindow:
    """Sequence numbers seen, as a bit field below the highest; older ones than the window count as seen."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._highest = -1
        self._bits = 0

    def first_time(self, sequence: int) -> bool:
        if sequence > self._highest:
            shift = min(sequence - self._highest, self._size)
            self._bits = ((self._bits << shift) | 1) & ((1 << self._size) - 1)
            self._highest = sequence
            return True
        bit = 1 << (self._highest - sequence) if self._highest - sequence < self._size else 0
        if not bit or self._bits & bit:
            return False
        self._bits |= bit
        return True


def _open(data: bytes, kind: Kind[T], run_id: bytes, now: float) -> Opened[T] | Refusal:
    if len(data) > kind.max_bytes + _OVERHEAD_BYTES:
        return Refusal("oversized", f"{len(data)} bytes for a {kind.name}")
    try:
        version = decode(data, _VersionOnly).version
        if version[0] != PROTOCOL_VERSION[0]:  # what follows may be laid out in another way
            return Refusal("protocol-version", f"{version[0]}.{version[1]}")
        envelope = decode(data, Envelope)
    except msgspec.DecodeError as error:
        return Refusal("malformed", str(error))
    if encode(envelope) != data:
        return Refusal("malformed", "not the one encoding of its envelope")
    if envelope.kind != kind.name:
        return Refusal("unknown-kind", envelope.kind)
    if envelope.run_id != run_id:
        return Refusal("wrong-run", envelope.run_id.hex()[:16])
    if envelope.issued_at > now + MAX_CLOCK_SKEW_S:
        return Refusal("clock", f"issued {envelope.issued_at - now:.0f} s ahead")
    if not keys.verify(envelope.signer, envelope.signature, signed_bytes(envelope)):
        return Refusal("bad-signature", keys.peer_id(envelope.signer))
    try:
        payload = decode(envelope.payload, kind.type)
    except msgspec.DecodeError as error:
        return Refusal("malformed", f"{kind.name}: {error}")
    if kind.exact and encode(payload) != envelope.payload:
        return Refusal("not-exact", f"a {kind.name} with fields that this version doesn't know")
    return Opened(keys.peer_id(envelope.signer), envelope.sequence, envelope.issued_at, payload)
