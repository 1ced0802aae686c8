"""Whether a run's model fits, on one machine and on those that are here; if not, what would. Pure; all in words."""

from collections.abc import Mapping
from math import ceil
from statistics import median

from echo_p2p.chain.pricing import SPARE_SHARE, Device, Workload

_SHARE_MAX = 0.95
_SHARE_STEPS = 20


def layers_on(device: Device, work: Workload) -> int:
    """Layers that fit on a device together with their keys and values, away from the ends of the model or with both."""
    alone = work.room(device, first=True, last=True)
    return alone if alone >= work.layers else work.room(device, first=False, last=False)


def memory_for(work: Workload, layers: int, value_bytes: int, *, ends: bool) -> int:
    """Memory that a device must offer for so many layers, without or with both ends of the model."""
    values = layers * (work.layer_values + work.cache_values)
    values += (work.embedding_values + work.head_values) if ends else 0
    return ceil(values * value_bytes / (1.0 - SPARE_SHARE))


def refusal(work: Workload, model: str, *, free_bytes: int, share: float, value_bytes: int) -> str:
    """Why not one layer fits into a share of the free memory, and what would help: one sentence."""
    offered = int(free_bytes * share)
    needed = memory_for(work, 1, value_bytes, ends=False)
    cache_bytes = work.cache_values * value_bytes
    cures = [f"free {size_text(ceil(needed / share) - free_bytes)}"]
    raised = ceil(needed / max(1, free_bytes) * _SHARE_STEPS) / _SHARE_STEPS
    if raised <= _SHARE_MAX:
        cures.append(f"raise inference.memory_share to {raised:g}")
    largest = _parameters_that_fit(work, offered, value_bytes)
    if largest:
        cures.append(f"join a run of a model of up to about {_count_text(largest)} parameters")
    whole = memory_for(work, work.layers, value_bytes, ends=True)
    return (
        f"one layer of {model} needs {size_text(needed)}, {size_text(cache_bytes)} of it for keys and values of "
        f"{work.rows * work.lanes} answers, and this machine offers {size_text(offered)} (memory_share {share:g} of "
        f"{size_text(free_bytes)} free): {', or '.join(cures)} (its embedding takes "
        f"{size_text(work.embedding_values * value_bytes)}, its output matrix "
        f"{size_text(work.head_values * value_bytes)}, all {work.layers} layers and both {size_text(whole)})."
    )


def shortfall(devices: Mapping[str, Device], work: Workload) -> str:
    """How far the peers here are from holding the model together, and about how many more would do."""
    rooms = [work.room(device, first=False, last=False) for device in devices.values()]
    usual = median([room for room in rooms if room > 0] or [0])
    if not usual:
        value_bytes = min((device.value_bytes for device in devices.values()), default=4)
        whole = memory_for(work, work.layers, value_bytes, ends=True)
        nobody = "no peer here has room for a layer" if devices else "no peer serves this run yet"
        return f"{nobody}: its {work.layers} layers need {size_text(whole)} of memory, on one peer or several"
    covered = _covered(list(devices.values()), work, rooms)
    if covered >= work.layers:
        return f"the peers here have room for all {work.layers} layers, but can't reach each other"
    more = ceil((work.layers - covered) / usual)
    peers = "1 more peer" if more == 1 else f"{more} more peers"
    return f"the peers here can hold {covered} of {work.layers} layers: about {peers} like the median would do"


def _covered(devices: list[Device], work: Workload, rooms: list[int]) -> int:
    """Layers of the longest chain of all peers, what the ends of the model take counted where it costs least."""
    firsts = [room - work.room(device, first=True, last=False) for device, room in zip(devices, rooms, strict=True)]
    lasts = [room - work.room(device, first=False, last=True) for device, room in zip(devices, rooms, strict=True)]
    both = [room - work.room(device, first=True, last=True) for device, room in zip(devices, rooms, strict=True)]
    places = range(len(devices))
    cost = min([both[0], *both] + [firsts[i] + lasts[j] for i in places for j in places if i != j])
    return min(sum(rooms) - cost, work.layers)


def _parameters_that_fit(work: Workload, offered_bytes: int, value_bytes: int) -> int:
    """Parameters of the largest model of as many layers, shaped alike and with such answers, that has a layer here."""
    layer_values = int(offered_bytes * (1.0 - SPARE_SHARE)) // value_bytes - work.cache_values
    whole = work.layers * work.layer_values + work.embedding_values + work.head_values
    return max(0, layer_values) * whole // max(1, work.layer_values)


def size_text(size_bytes: float) -> str:
    """Binary units, as memory is counted: `7 MiB`, `1.2 GiB`."""
    if size_bytes < 2**20:
        return f"{max(1, ceil(size_bytes / 2**10))} KiB"
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{ceil(size_bytes / 2**20)} MiB"


def _count_text(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
