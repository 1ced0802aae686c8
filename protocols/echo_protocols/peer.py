"""Role records and the plan: who is in the swarm, what each can hold, and which layers each serves."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from echo_protocols.values import Count, Hash, Name, PeerId, PolicyVersion, Rate, Span, Time

Role = Literal["bootstrap", "trainer", "inference"]
Address = Name


class Way(Struct, frozen=True, kw_only=True, array_like=True):
    """What a peer measured of the way from it to another: seconds, one way, and bytes a second (0.0: unmeasured).

    `latency_s` nil means that the other can't be reached from here.
    """

    peer: PeerId
    latency_s: Annotated[float, Meta(ge=0.0, le=3600.0)] | None
    bytes_s: Rate = 0.0


class Capacity(Struct, frozen=True, kw_only=True):
    """What a device can give: layers that fit in its memory, and how fast it computes them.

    `max_layers` 0 means none. `layers_per_s` is layers × tokens a second at the run's batch, 0.0 while unmeasured;
    `head_layers` is the time of the output matrix in layers, 0.0 while unmeasured. A weight takes `value_bytes`.
    """

    max_layers: Annotated[int, Meta(ge=0, le=65536)]
    layers_per_s: Rate = 0.0
    head_layers: Annotated[float, Meta(ge=0.0, le=65536.0)] = 0.0
    memory_bytes: Count = 0
    value_bytes: Annotated[int, Meta(ge=1, le=8)] = 4
    device: Name = "cpu"
    ways: Annotated[tuple[Way, ...], Meta(max_length=32)] = ()


class RoleRecord(Struct, frozen=True, kw_only=True):
    """What a peer says of itself, renewed while it lives.

    `span` is what it holds, at `version`; `prepared`, what it has loaded beside that because the plan says what comes.
    """

    role: Role
    software: Name
    run_id: Hash | None = None
    streams: Annotated[tuple[Address, ...], Meta(max_length=16)] = ()
    gossip: Annotated[tuple[Address, ...], Meta(max_length=16)] = ()
    reach: Literal["public", "relayed", "none", "unknown"] = "unknown"
    capacity: Capacity | None = None
    span: Span | None = None
    version: PolicyVersion | None = None
    tokens_per_s: Rate = 0.0
    started_at: Time = 0.0
    leaving: bool = False
    prepared: Span | UnsetType = UNSET


class Stop(Struct, frozen=True, kw_only=True, array_like=True):
    """One stage of a chain: a peer and its span."""

    peer: PeerId
    span: Span


Chain = Annotated[tuple[Stop, ...], Meta(min_length=1, max_length=256)]


class Plan(Struct, frozen=True, kw_only=True):
    """Chains that together are the swarm; each covers all layers, in order. `number` grows with each change.

    A peer of `standby` serves no chain, and holds its span ready for whoever is lost. One of `upcoming` serves in a
    chain, and loads that span beside its own: a chain with it will take over.
    """

    number: Count
    layers: Annotated[int, Meta(ge=1, le=65536)]
    chains: Annotated[tuple[Chain, ...], Meta(max_length=4096)] = ()
    standby: Annotated[tuple[Stop, ...], Meta(max_length=4096)] = ()
    upcoming: Annotated[tuple[Stop, ...], Meta(max_length=4096)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for chain in self.chains:
            edges = [0, *(stop.span.end for stop in chain)]
            starts = [stop.span.start for stop in chain]
            models = {stop.span.layers for stop in chain}
            if starts != edges[:-1] or edges[-1] != self.layers or models != {self.layers}:
                raise ValueError("a chain must cover the layers in order")
            peers = {stop.peer for stop in chain}
            if len(peers) != len(chain) or peers & seen:
                raise ValueError("a peer serves one span of one chain")
            seen |= peers
        for stop in self.standby:
            if stop.peer in seen or stop.span.layers != self.layers:
                raise ValueError("a peer stands by for one span of the model, and serves no chain meanwhile")
            seen.add(stop.peer)
        coming = self.upcoming or ()
        if len({stop.peer for stop in coming}) != len(coming) or {stop.span.layers for stop in coming} - {self.layers}:
            raise ValueError("a peer prepares for one span of the model")

    def chain_of(self, peer: str) -> tuple[Stop, ...] | None:
        """The chain that a peer serves in, if any."""
        return next((chain for chain in self.chains if any(stop.peer == peer for stop in chain)), None)

    def span_of(self, peer: str) -> Span | None:
        """The span that a peer is to hold, in a chain or ready for one, if any."""
        stops = (*(self.chain_of(peer) or ()), *self.standby)
        return next((stop.span for stop in stops if stop.peer == peer), None)

    def upcoming_of(self, peer: str) -> Span | None:
        """The span that a peer is to have loaded beside the one it holds, if any."""
        return next((stop.span for stop in self.upcoming or () if stop.peer == peer), None)


class Complaint(Struct, frozen=True, kw_only=True):
    """What a stop of a chain of plan `plan` tells the plan's leader of another stop of that chain."""

    plan: Count
    accused: PeerId
    reason: Name
