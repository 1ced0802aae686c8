"""What a run asks of its stages, what peers and links give, and both as the costs that planning computes with.

All times are seconds a token, at the run's rows a lane. Figures that peers give of themselves are clamped here, so that
whatever they say, a plan is made of them in bounded time. Knows no chain and no search.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LANES: Final = 4
"""Lanes that every stage keeps memory for; few chains need more to keep all stages busy."""

SPARE_SHARE: Final = 0.1
"""Of a device's memory: activations and the process itself."""

_SPEED_SPREAD = 1e3  # a peer counts as at most so many times faster or slower than the usual one
_USUAL_RANGE = (1e-3, 1e9)  # layers a second
_HOP_MAX_S = 3600.0
_BYTES_S_MIN = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run's model and lanes, as figures. Sizes are in values; a device knows how many bytes a value takes.

    `head_layers` is the time of the output matrix, in layers. `kv_values` is of one layer, for one token.
    `positions` bounds a sequence, prompt included; `frame_bytes` is what one token's states take on the wire.
    """

    layers: int
    layer_values: int = 0
    embedding_values: int = 0
    head_values: int = 0
    tied: bool = False
    head_layers: float = 0.0
    kv_values: int = 0
    positions: int = 0
    rows: int = 1
    lanes: int = LANES
    frame_bytes: int = 0

    @property
    def cache_values(self) -> int:
        """Keys and values of one layer, of all lanes."""
        return self.kv_values * self.positions * self.rows * self.lanes

    def room(self, device: "Device", *, first: bool, last: bool) -> int:
        """Layers that fit on a device, with what the ends of the model take there."""
        if device.memory_bytes == 0:  # not said
            return min(device.max_layers, self.layers)
        ends = self.embedding_values if first or (last and self.tied) else 0
        ends += self.head_values if last else 0
        values = int(device.memory_bytes * (1.0 - SPARE_SHARE)) // max(1, device.value_bytes) - ends
        return max(0, min(device.max_layers, self.layers, values // max(1, self.layer_values + self.cache_values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a peer says that it gives. 0 stands for what it doesn't say, except that `max_layers` 0 is none."""

    max_layers: int
    layers_per_s: float = 0.0
    head_layers: float = 0.0
    memory_bytes: int = 0
    value_bytes: int = 4


@dataclass(frozen=True, slots=True)
class Link:
    """From one peer to another: seconds one way, and bytes a second."""

    latency_s: float
    bytes_s: float


USUAL_LINK: Final = Link(latency_s=0.03, bytes_s=2e6)
"""Between two homes of one continent."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a swarm, by sender and receiver. One that isn't named is `usual`; None: can't be reached."""

    known: Mapping[tuple[str, str], Link | None] = field(default_factory=dict)
    usual: Link = USUAL_LINK


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The figures of peers and links by number, in the order of `peers`; `inf` where no link is.

    `hop_s` is the time of a token's states on a link, `busy_s` the share of it in which no other token can use it, and
    `back_s` the time of a drawn token from the last stage to the first.
    """

    peers: tuple[str, ...]
    layers: int
    lanes: int
    layer_s: Floats  # (peers,)
    head_layers: Floats  # (peers,)
    rooms: Ints  # (4, peers): layers as a middle stage, as the first, as the last, and alone
    hop_s: Floats  # (peers, peers)
    back_s: Floats  # (peers, peers)
    busy_s: Floats  # (peers, peers)
    alike: bool
    """All links are the usual one: the order of those in the middle doesn't matter."""


def costs_of(devices: Mapping[str, Device], work: Workload, links: Links) -> Costs:
    """Costs of the peers that can hold a layer. The same whatever the order of `devices`."""
    peers = tuple(sorted(peer for peer, device in devices.items() if min(device.max_layers, work.layers) > 0))
    usual = _usual_speed(devices)
    speeds = [devices[peer].layers_per_s or usual for peer in peers]
    number = {peer: place for place, peer in enumerate(peers)}
    known = [(number[a], number[b], link) for (a, b), link in links.known.items() if a in number and b in number]
    hops = np.empty((3, len(peers), len(peers)))
    hops[:] = np.array(_hop(links.usual, work)).reshape(3, 1, 1)
    for sender, receiver, link in known:
        hops[:, sender, receiver] = _hop(link, work)
    return Costs(
        peers=peers,
        layers=work.layers,
        lanes=work.lanes,
        layer_s=1.0 / np.clip(np.array(speeds, dtype=np.float64), usual / _SPEED_SPREAD, usual * _SPEED_SPREAD),
        head_layers=np.array([devices[peer].head_layers or work.head_layers for peer in peers], dtype=np.float64),
        rooms=np.array([_rooms(devices[peer], work) for peer in peers], dtype=np.int64).reshape(-1, 4).T.copy(),
        hop_s=hops[0],
        back_s=hops[1],
        busy_s=hops[2],
        alike=not known,
    )


def _usual_speed(devices: Mapping[str, Device]) -> float:
    """What to assume of a peer that has not measured itself."""
    measured = [device.layers_per_s for device in devices.values() if device.layers_per_s > 0.0]
    return _clamped(median(measured or [1.0]), *_USUAL_RANGE)


def _rooms(device: Device, work: Workload) -> tuple[int, int, int, int]:
    ends = ((False, False), (True, False), (False, True), (True, True))
    middle, first, last, alone = (work.room(device, first=first, last=last) for first, last in ends)
    return middle, first, last, alone if alone >= work.layers else 0


def _hop(link: Link | None, work: Workload) -> tuple[float, float, float]:
    """A link's `hop_s`, `back_s` and `busy_s`."""
    if link is None:
        return inf, inf, inf
    latency_s = _clamped(link.latency_s, 0.0, _HOP_MAX_S) / work.rows
    busy_s = work.frame_bytes / max(link.bytes_s, _BYTES_S_MIN)
    return latency_s + busy_s, latency_s, busy_s


def _clamped(value: float, least: float, most: float) -> float:
    return min(most, max(least, value))
