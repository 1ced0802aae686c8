"""Chains whose stages die, stall or compute wrongly, measured: `python tests/bench/chain_failover.py --json FILE`.

A swarm on loopback: a bootstrap, three peers that hold half of the model each (a chain of two, and one that stands by)
as real processes, and here the trainer's leader with a consumer that takes groups and never trains, so that every
token can be drawn again by the whole model and compared. A stage waits a while in each step, so that the machine's
cores are not what is measured. One case after the other; what was killed is started anew and stands by before the next.

Seconds are from the fault until groups come, over two seconds, at 80 % or more of the rate that the swarm settles at
afterwards.
"""

import json
import logging
import os
import platform
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import msgspec
import numpy as np
import trio

from echo_node.board import Board
from echo_node.demo import join_address
from echo_node.fleet import Fleet, NodeProcess
from echo_node.gather import check_group
from echo_node.herald import Herald
from echo_node.leader import lead
from echo_node.logs import Journal
from echo_node.produce import group_request
from echo_node.prompts import load_prompts
from echo_node.standing import Standing
from echo_node.trainer import make_manifest, serve_store
from echo_p2p.chain.driver import open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.memory_stage import MemoryWeights
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.sampler import audit
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.config import load_config
from echo_p2p.identity import generate
from echo_p2p.models import resolve_model
from echo_p2p.net.ping import ping
from echo_p2p.presence import Presence, open_presence
from echo_p2p.swarm import Run
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols import names
from echo_protocols.envelope import Opened
from echo_protocols.peer import Plan, RoleRecord, Stop
from echo_protocols.rollout import RolloutGroup, Sample
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion, Span

WINDOW_S = 2.0
SHARE = 0.8
WARM_S = 8.0
SETTLE_S = 15.0
PATIENCE_S = 120.0
PING_PATIENCE_S = 10.0
_AUDIT_LANE = 2**20
EDGE = 1e-4
"""A draw this near to the edge of its token's interval may fall on either side: other batches round differently."""

CORRUPTIBLE = (sys.executable, str(Path(__file__).with_name("corruptible_node.py")))
ZERO = PolicyVersion(epoch=0, step=0)


@dataclass
class Taken:
    """A group that arrived, and when, in seconds of this process."""

    at: float
    worker: str
    group: RolloutGroup


@dataclass
class Scene:
    """The swarm, as its leader and consumer sees it."""

    fleet: Fleet
    presence: Presence
    run: Run
    flags: list[str]
    nodes: dict[str, NodeProcess] = field(default_factory=dict)  # by PeerID
    taken: list[Taken] = field(default_factory=list)
    stricken: set[str] = field(default_factory=set)
    pings: list[float] = field(default_factory=list)  # seconds until a healthy peer of the plan had answered
    gone: dict[str, int] = field(default_factory=lambda: {"resumed": 0, "dropped": 0})

    async def add(self, name: str, spoil: str = "noise") -> str:
        """Start a peer that holds half of the model; its PeerID."""
        os.environ["SPOIL"] = spoil
        known = set(self.nodes)
        node = self.fleet.launch(name, ["join", "--role", "inference", "--max-layers", "2", *self.flags])
        await eventually(lambda: (node.home / "node.json").exists())
        peer = str(json.loads((node.home / "node.json").read_text())["peer"])
        assert peer not in known or self.nodes[peer].ended is not None
        self.nodes[peer] = node
        return peer

    def state(self, peer: str) -> dict[str, Any]:
        """What a peer says of itself."""
        where = json.loads((self.nodes[peer].home / "node.json").read_text())["http"]
        try:
            with urlopen(f"{where}/state", timeout=3) as reply:
                found: dict[str, Any] = json.load(reply)
        except OSError:  # it is on its way down, or up
            return {"inference": {"activity": "gone"}}
        return found

    @property
    def plan(self) -> Plan:
        assert self.presence.swarm.plan is not None
        return self.presence.swarm.plan

    def ready(self) -> bool:
        """Whether a chain of two works, and a third peer stands by with its span loaded."""
        plan = self.presence.swarm.plan
        if plan is None or len(plan.chains) != 1 or len(plan.chains[0]) != 2 or len(plan.standby) != 1:
            return False
        views = [self.state(stop.peer)["inference"] or {} for stop in (*plan.chains[0], *plan.standby)]
        return [view.get("activity") for view in views] == ["generating", "serving", "standing by"]

    async def warm(self) -> None:
        """Until the swarm has been ready, and groups have come, for a while."""
        since = trio.current_time()
        with trio.fail_after(PATIENCE_S):
            while trio.current_time() - since < WARM_S:
                await trio.sleep(0.5)
                now = trio.current_time()
                if not await trio.to_thread.run_sync(self.ready) or not self.rate(now - WINDOW_S, now):
                    since = now

    def rate(self, since: float, until: float) -> float:
        """Groups a second that came within some time."""
        return sum(since <= each.at < until for each in self.taken) / max(1e-9, until - since)

    def signal(self, peer: str, number: signal.Signals) -> None:
        """Send a signal to a peer's node."""
        os.kill(self.nodes[peer].process.pid, number)

    def count(self) -> dict[str, int]:
        """Groups that were resumed and dropped, over all that live."""
        living = [peer for peer, node in self.nodes.items() if node.ended is None]
        views = [self.state(peer)["inference"] or {} for peer in living]
        return {name: sum(int(view.get(name, 0)) for view in views) for name in self.gone}


@asynccontextmanager
async def scene(root: Path, *settings: str, command: tuple[str, ...] = CORRUPTIBLE) -> AsyncIterator[Scene]:
    """A bootstrap, and a leader that has published version 0.0; no peer yet."""
    swarm = f"failover-{secrets.token_hex(4)}"
    flags = ["--swarm", swarm, "--host", "127.0.0.1"]
    async with Fleet(root / "nodes", command=command) as fleet:
        address = await join_address(fleet.launch("bootstrap", ["bootstrap", *flags]))
        flags += ["--peer", address, *(part for setting in settings for part in ("--set", setting))]
        identity = generate()
        given = {
            "swarm": swarm, "role": "trainer", "network.peers": (address,), "network.host": "127.0.0.1",
            "run.group_size": 4, "run.sampling.max_new_tokens": 48, "run.max_lag": 4,
        }  # fmt: skip
        config = load_config(None, given)
        made = await trio.to_thread.run_sync(make_manifest, config, identity.peer_id)
        run = Run(made, made.run_id(), identity.peer_id, 0.0)
        record = RoleRecord(role="trainer", software="bench", run_id=run.run_id)
        store = Store(root / "blobs", 1 << 30)
        async with (
            open_presence(identity, swarm=swarm, network=config.network, record=record) as presence,
            trio.open_nursery() as nursery,
        ):
            presence.swarm.join(run)
            publisher, whole = Publisher(store), Span(start=0, end=made.layers, layers=made.layers)
            stage = await trio.to_thread.run_sync(lambda: load_stage(resolve_model(made.model), whole))
            release = await trio.to_thread.run_sync(publisher.publish, ZERO, stage.tensors())
            herald = Herald(presence, run, store, publisher)
            await nursery.start(serve_store, Board(config, presence, Journal()), store)
            nursery.start_soon(herald.run)
            await presence.swarm.publish_run(made)
            await herald.announce(release)
            nursery.start_soon(lead, presence, run, Standing())
            found = Scene(fleet, presence, run, flags)
            nursery.start_soon(_take, found)
            nursery.start_soon(_ask, found)
            yield found
            nursery.cancel_scope.cancel()


async def _take(found: Scene) -> None:
    swarm = found.presence.swarm.name
    async with found.presence.gossip.subscribe(names.rollout_topic(swarm)) as messages:
        async for message in messages:
            opened = check_group(found.presence, found.run, message.data, once=True)
            if isinstance(opened, Opened):
                found.taken.append(Taken(trio.current_time(), opened.signer, opened.payload))


async def _ask(found: Scene) -> None:
    """How long healthy peers take to answer while they compute: what a leader may expect of them."""
    while True:
        await trio.sleep(1.0)  # a peer answers two a second at most
        plan = found.presence.swarm.plan
        for peer in {stop.peer for chain in plan.chains for stop in chain} if plan else ():
            asked_at = trio.current_time()
            answered = await ping(found.presence.hive, peer, PING_PATIENCE_S) is not None
            if peer not in found.stricken and found.nodes[peer].ended is None:
                found.pings.append(trio.current_time() - asked_at if answered else PING_PATIENCE_S)


async def eventually(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Other processes have no event to wait for: look now and then, and give up loudly."""
    with trio.fail_after(patience_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.05)


async def wrong_tokens(found: Scene) -> tuple[int, int]:
    """Of all tokens that arrived: how many the whole model would not have drawn, and how many there are."""
    made, run = found.run.manifest, found.run
    span = Span(start=0, end=made.layers, layers=made.layers)
    stage = await trio.to_thread.run_sync(lambda: load_stage(resolve_model(made.model), span))
    prompts = await trio.to_thread.run_sync(load_prompts, made)
    host = StageHost("whole" * 10, stage, MemoryWeights({}), ZERO)
    ring = Ring((Stop(peer=host.peer, span=span),), run.run_id, lanes=8, rows=16)
    wrong = tokens = 0
    limiter = trio.CapacityLimiter(16)
    other: list[tuple[GroupRequest, int, Sample]] = []

    async def compare(each: Taken) -> None:
        nonlocal wrong, tokens
        async with limiter:
            prompt = await trio.to_thread.run_sync(prompts.ids, each.group.prompt_index)
            request = group_request(made, (each.worker, each.group.counter), prompt)
            samples = await driver.generate(request)
        for number, (got, right) in enumerate(zip(each.group.samples, samples, strict=True)):
            tokens += len(got.tokens)
            if got.tokens == right.tokens:
                wrong += sum(abs(one - two) > EDGE for one, two in zip(got.logprobs, right.logprobs, strict=True))
            else:
                other.append((request, number, got))

    async with open_chain(ring, host) as driver, trio.open_nursery() as nursery:
        for each in found.taken:
            nursery.start_soon(compare, each)
    for request, number, got in other:
        wrong += await trio.to_thread.run_sync(_refused, stage, request, number, got)
    return wrong, tokens


def _refused(stage: Stage, request: GroupRequest, number: int, got: Sample) -> int:
    """Tokens of an answer that the whole model could not have drawn there, given those before them.

    What is computed together changes the last bits, so that now and then a uniform falls on the other side of an edge:
    from there on the answers differ, and both are right.
    """
    row, refused, sampling = np.zeros(1, np.int32), 0, request.sampling
    inputs, at = np.array([request.prompt], np.int32), 0
    for place, (token, logprob) in enumerate(zip(got.tokens, got.logprobs, strict=True)):
        logits = stage.forward(_AUDIT_LANE, row, np.array([at], np.int32), inputs)[0]  # (vocabulary,)
        drawn = audit(logits, token, uniform(request.run_seed, request.group_id, number, place), sampling, EDGE)
        scores = logits.astype(np.float64) / sampling.temperature
        known = scores[token] - np.logaddexp.reduce(scores)  # the run truncates nothing
        refused += not drawn or abs(known - logprob) > EDGE
        inputs, at = np.array([[token]], np.int32), at + inputs.shape[1]
    stage.close(_AUDIT_LANE)
    return refused


@dataclass(frozen=True)
class Case:
    """Something that happens to a stage of the chain, and how to mend it afterwards."""

    name: str
    place: int
    strike: Callable[[Scene, str], None]
    mend: Callable[[Scene, str], Any]


async def run_case(found: Scene, case: Case) -> dict[str, Any]:
    """Strike, and measure until the swarm is well again."""
    await found.warm()
    victim, before = found.plan.chains[0][case.place], await trio.to_thread.run_sync(found.count)
    ready = victim.span == found.plan.standby[0].span
    usual = found.rate(trio.current_time() - WARM_S, trio.current_time())
    struck_at, groups = trio.current_time(), len(found.taken)
    found.stricken.add(victim.peer)
    case.strike(found, victim.peer)
    await eventually(lambda: found.plan.span_of(victim.peer) is None)
    replanned_s = trio.current_time() - struck_at
    await eventually(lambda: found.rate(trio.current_time() - WINDOW_S, trio.current_time()) > SHARE * usual / 2)
    await trio.sleep(SETTLE_S)
    settled = found.rate(trio.current_time() - SETTLE_S + WINDOW_S, trio.current_time())
    starts = [each.at for each in found.taken[groups:]]
    back = next((at for at in starts if at > struck_at and found.rate(at, at + WINDOW_S) >= SHARE * settled), None)
    gap = max((later - sooner for sooner, later in zip([struck_at, *starts], starts, strict=False)), default=0.0)
    after = await trio.to_thread.run_sync(found.count)
    await case.mend(found, victim.peer)
    found.stricken.discard(victim.peer)
    return {
        "failover_seconds": round(_back_after(found, struck_at, settled, back, gap), 2),
        "replanned_seconds": round(replanned_s, 2),
        "longest_gap_seconds": round(gap, 2),
        "standby_held_the_span": ready,
        "groups_per_s_before": round(usual, 2),
        "groups_per_s_after": round(settled, 2),
        "groups_completed": len(found.taken) - groups,
        "groups_resumed": max(0, after["resumed"] - before["resumed"]),
        "groups_dropped": max(0, after["dropped"] - before["dropped"]),
    }


def _back_after(found: Scene, struck_at: float, settled: float, back: float | None, gap: float) -> float:
    """Seconds until the rate is back for good: after the longest gap that followed the fault."""
    arrivals = [each.at for each in found.taken if each.at >= struck_at]
    edges = [struck_at, *arrivals]
    lengths = [later - sooner for sooner, later in zip(edges, arrivals, strict=False)]
    if not lengths or back is None:
        return float("inf")
    after_gap = arrivals[lengths.index(max(lengths))] if gap > 0.0 else struck_at
    found_at = next(
        (at for at in arrivals if at >= after_gap and found.rate(at, at + WINDOW_S) >= SHARE * settled), None
    )
    return float("inf") if found_at is None else found_at - struck_at


async def start_again(found: Scene, peer: str) -> None:
    """A peer that died comes back with its key."""
    node = found.nodes[peer]
    node.process.kill()
    await eventually(lambda: node.ended is not None)
    await found.add(node.name)


async def wake(found: Scene, peer: str) -> None:
    """A peer that was stopped goes on."""
    found.signal(peer, signal.SIGCONT)


def kill(found: Scene, peer: str) -> None:
    found.signal(peer, signal.SIGKILL)


def stop(found: Scene, peer: str) -> None:
    found.signal(peer, signal.SIGSTOP)


def spoil(found: Scene, peer: str) -> None:
    found.signal(peer, signal.SIGUSR1)


CASES = (
    Case("killed_first", 0, kill, start_again),
    Case("killed_second", 1, kill, start_again),
    Case("stalled", 1, stop, wake),
    Case("stalled_first", 0, stop, wake),
    Case("corrupt", 1, spoil, start_again),
)


async def measure(root: Path, cases: tuple[Case, ...]) -> dict[str, Any]:
    """All cases in one swarm, and then every token against the whole model."""
    figures: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    async with scene(root, "inference.slowdown_s=0.004") as found:
        for name in ("one", "two", "three"):
            await found.add(name)
        for case in cases:
            click.echo(f"{case.name} …", err=True)
            result = await run_case(found, case)
            figures[f"failover_seconds_{case.name}"] = result.pop("failover_seconds")
            figures[case.name] = result
            click.echo(f"{case.name}: {figures[f'failover_seconds_{case.name}']} s, {result}", err=True)
        groups = len(found.taken)
        counters = {(each.worker, each.group.counter) for each in found.taken}
        last = {worker: max(number for other, number in counters if other == worker) for worker, _ in counters}
        wrong, tokens = await wrong_tokens(found)
        slowest = sorted(found.pings)
    return figures | {
        "pings": len(slowest), "ping_seconds_p50": round(slowest[len(slowest) // 2], 3),
        "ping_seconds_p99": round(slowest[len(slowest) * 99 // 100], 3), "ping_seconds_max": round(slowest[-1], 3),
        "wrong_tokens": wrong, "tokens": tokens, "groups": groups, "groups_twice": groups - len(counters),
        "groups_lost_with_their_head": sum(number + 1 for number in last.values()) - len(counters),
    }  # fmt: skip


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--only", multiple=True, type=click.Choice([case.name for case in CASES]), help="These cases (repeat).")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the nodes' homes and logs.")
def main(file: Path | None, only: tuple[str, ...], keep: Path | None) -> None:
    """Measure failover."""
    logging.basicConfig(level=logging.ERROR)
    started = time.monotonic()
    cases = tuple(case for case in CASES if not only or case.name in only)
    with tempfile.TemporaryDirectory() as root:
        figures = trio.run(partial(measure, keep or Path(root), cases))
    figures["bench_seconds"] = round(time.monotonic() - started)
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2).decode()
    for case in cases:
        result = figures[case.name]
        click.echo(
            f"{case.name:14} {figures[f'failover_seconds_{case.name}']:6.2f} s until back, planned anew after"
            f" {result['replanned_seconds']:5.2f} s, standby {'' if result['standby_held_the_span'] else 'not '}ready,"
            f" {result['groups_completed']} groups, {result['groups_resumed']} resumed,"
            f" {result['groups_dropped']} dropped"
        )
    click.echo(f"{figures['wrong_tokens']} wrong tokens of {figures['tokens']}")
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    main()
