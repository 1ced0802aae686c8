"""How good plans are, and how long they take: `python tests/bench/chain_plan.py --json FILE`, two minutes on one core.

Small swarms against all that can be tried in the same run: every order of every set of peers, and every way to set
chains side by side. Large ones have no such reference: they are set against the greedy rule alone, and the clock.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import click

from echo_p2p.chain.balance import balance, rows_of, worths
from echo_p2p.chain.plan import plan
from echo_p2p.chain.plan import tokens_per_s as model_rate
from echo_p2p.chain.pricing import Costs, Device, Link, Links, Workload, costs_of
from echo_p2p.chain.search import Order, best_chains, total_worth
from echo_protocols.peer import Stop

Swarm = tuple[dict[str, Device], Workload, Links]

SMALL_SWARMS = 240
LARGE_SWARMS = 7
LARGE_PEERS = 256


def random_swarm(chance: random.Random, peers: int, layers: int, *, unlike_links: bool) -> Swarm:
    """Machines from an old laptop to a large GPU; homes on a map, and a few that can't reach each other."""
    rooms = [max(1, round(layers * share)) for share in (0.1, 0.15, 0.25, 0.4, 0.6, 1.0)]
    devices = {
        f"{number:03}": Device(
            max_layers=chance.choice(rooms),
            layers_per_s=chance.choice((100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)) * chance.uniform(0.7, 1.3),
        )
        for number in range(peers)
    }
    work = Workload(layers=layers, head_layers=chance.choice((0.0, 0.5, 3.0, 8.0)), rows=8, frame_bytes=8192)
    if not unlike_links:
        return devices, work, Links()
    places = {peer: complex(chance.random(), chance.random()) for peer in devices}
    known: dict[tuple[str, str], Link | None] = {}
    for one in devices:
        for other in devices:
            latency_s = 0.002 + 0.1 * abs(places[one] - places[other])
            link = Link(latency_s, chance.choice((1e6, 1e7, 1e8)))
            known[one, other] = None if chance.random() < 0.05 else link
    return devices, work, Links(known)


def exact_worth(costs: Costs) -> float:
    """The best of everything that can be tried; for few peers."""
    numbers = range(len(costs.peers))
    orders = [order for size in numbers for order in permutations(numbers, size + 1)]
    best_of: dict[int, float] = {}
    for start in range(0, len(orders), 50_000):
        some = orders[start : start + 50_000]
        for order, value in zip(some, worths(costs, rows_of(some)).tolist(), strict=True):
            mask = sum(1 << peer for peer in order)
            best_of[mask] = max(best_of.get(mask, 0.0), value)
    best = [0.0]
    for mask in range(1, 1 << len(numbers)):
        rest = mask & (mask - 1)
        lowest, found, subset = mask ^ rest, best[rest], rest
        while True:
            found = max(found, best_of[subset | lowest] + best[rest ^ subset])
            if not subset:
                break
            subset = (subset - 1) & rest
        best.append(found)
    return best[-1]


def greedy_chains(costs: Costs) -> list[Order]:
    """By room alone, as a simple planner would: the largest first, then the smallest that fills the gap."""
    room = {peer: int(costs.rooms[0, peer]) for peer in range(len(costs.peers))}
    chains: list[Order] = [(peer,) for peer in room if costs.rooms[3, peer]]
    left = sorted((peer for peer in room if not costs.rooms[3, peer]), key=lambda peer: (-room[peer], peer))
    while sum(room[peer] for peer in left) >= costs.layers:
        chain, gap = [], costs.layers
        while gap > 0:
            filling = [peer for peer in left if room[peer] >= gap]
            chain.append(filling[-1] if filling else left[0])
            left.remove(chain[-1])
            gap -= room[chain[-1]]
        chains.append(tuple(sorted(chain, key=lambda peer: (-costs.layer_s[peer], peer))))
    return chains


def tokens_per_s(costs: Costs, chains: Sequence[Order]) -> float:
    """What chains make, unweighted."""
    return float(balance(costs, rows_of(chains)).tokens_s.sum())


def small_figures(swarms: int) -> dict[str, float]:
    """Plans and the greedy rule against everything that can be tried."""
    chance, ours, greedy = random.Random(1), [], []
    while len(ours) < swarms:
        unlike = len(ours) % 2 == 1
        drawn = random_swarm(chance, chance.randint(4, 7), chance.choice((6, 12, 28)), unlike_links=unlike)
        costs = costs_of(*drawn)
        best = exact_worth(costs)
        if best > 0.0:
            ours.append(total_worth(costs, best_chains(costs, range(len(costs.peers)))) / best)
            greedy.append(total_worth(costs, greedy_chains(costs)) / best)
    return {
        "plan_over_exact_mean": statistics.mean(ours),
        "plan_over_exact_min": min(ours),
        "plan_exact_share": sum(ratio > 1.0 - 1e-6 for ratio in ours) / len(ours),
        "greedy_over_exact_mean": statistics.mean(greedy),
    }


def crowd_figures(swarms: int) -> dict[str, float]:
    """The search of crowds, let loose on swarms that are small enough to be planned exactly."""
    chance, ratios = random.Random(3), []
    for number in range(swarms):
        drawn = random_swarm(chance, 10, chance.choice((12, 28)), unlike_links=number % 2 == 1)
        costs = costs_of(*drawn)
        numbers = range(len(costs.peers))
        best = total_worth(costs, best_chains(costs, numbers))
        if best > 0.0:
            ratios.append(total_worth(costs, best_chains(costs, numbers, exact_peers=0)) / best)
    return {"search_over_exact_mean": statistics.mean(ratios), "search_over_exact_min": min(ratios)}


def large_figures(swarms: int, peers: int) -> dict[str, float]:
    """Seconds that the first plan of a crowd takes, and what it makes against the greedy rule and a longer search."""
    chance, seconds, over_greedy, over_longer = random.Random(2), [], [], []
    for number in range(swarms):
        devices, work, links = random_swarm(chance, peers, 36, unlike_links=number % 2 == 1)
        begun = time.perf_counter()
        made = plan(devices, work, None, links)
        seconds.append(time.perf_counter() - begun)
        costs = costs_of(devices, work, links)
        place = {peer: number for number, peer in enumerate(costs.peers)}
        chains = [tuple(place[stop.peer] for stop in chain) for chain in made.chains]
        over_greedy.append(tokens_per_s(costs, chains) / tokens_per_s(costs, greedy_chains(costs)))
        longer = best_chains(costs, range(len(costs.peers)), 1_000_000) if number < 2 else None
        if longer is not None:
            over_longer.append(total_worth(costs, chains) / total_worth(costs, longer))
    return {
        f"plan_seconds_{peers}": statistics.median(seconds),
        f"plan_seconds_{peers}_max": max(seconds),
        f"plan_over_greedy_{peers}": statistics.median(over_greedy),
        f"plan_over_longer_search_{peers}": statistics.mean(over_longer),
    }


def churn_figures(turns: int, peers: int) -> dict[str, float]:
    """Peers leave and others come, turn by turn: for each layer that a leaver served, those that must be loaded by
    peers that served already, and by all; and what the chains make against chains that are laid out anew."""
    chance = random.Random(4)
    devices, work, links = random_swarm(chance, peers, 36, unlike_links=False)
    made, gone, moved, loaded, over_anew, seconds = plan(devices, work, None, links), 0, 0, 0, [], []
    for turn in range(turns):
        leaver = chance.choice([stop for chain in made.chains for stop in chain])
        (comer,) = random_swarm(chance, 1, 36, unlike_links=False)[0].values()
        devices = {peer: device for peer, device in devices.items() if peer != leaver.peer} | {f"new{turn}": comer}
        before = {(stop.peer, layer) for chain in made.chains for stop in chain for layer in _layers(stop)}
        begun = time.perf_counter()
        made = plan(devices, work, made, links)
        seconds.append(time.perf_counter() - begun)
        after = {(stop.peer, layer) for chain in made.chains for stop in chain for layer in _layers(stop)}
        gone += len(leaver.span)
        served = {peer for peer, _ in before}
        loaded += len(after - before)
        moved += sum(peer in served for peer, _ in after - before)
        anew = model_rate(devices, work, plan(devices, work, None, links), links)
        over_anew.append(model_rate(devices, work, made, links) / anew)
    return {
        f"moved_over_left_{peers}": moved / gone,
        f"loaded_over_left_{peers}": loaded / gone,
        f"kept_over_anew_{peers}": statistics.mean(over_anew),
        f"replan_seconds_{peers}": statistics.median(seconds),
    }


def _layers(stop: Stop) -> range:
    return range(stop.span.start, stop.span.end)


def plan_figures(small: int = SMALL_SWARMS, large: int = LARGE_SWARMS, peers: int = LARGE_PEERS) -> dict[str, float]:
    """All figures of plans."""
    figures = small_figures(small) | crowd_figures(max(1, small // 4)) | large_figures(large, peers)
    return figures | churn_figures(20, 32) | churn_figures(5, peers)


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--small", default=SMALL_SWARMS, type=click.IntRange(1), help="Small swarms.")
@click.option("--large", default=LARGE_SWARMS, type=click.IntRange(1), help="Large swarms.")
def main(file: Path | None, small: int, large: int) -> None:
    """Measure plans."""
    text = json.dumps(plan_figures(small, large), indent=2)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
