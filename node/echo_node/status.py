"""A running node, seen from outside: where it listens, what it says of itself, and that as sentences and tables.

`fetch_state` is the only part that touches a network; rendering is pure. Foreign text goes through `charts.plain`.
"""

import http.client
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec
import psutil
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo_node.charts import bar, bytes_text, count_text, duration_text, moving_mean, plain, short_peer, sparkline
from echo_node.places import Places
from echo_node.state import RECENT_STEPS, InferenceView, NodeState, PeerView, RunView, TrainerView, Whereabouts
from echo_p2p.errors import ConfigError, Unreachable

WHEREABOUTS_FILE = "node.json"
STATE_MAX_BYTES = 16 * 1024 * 1024

REACH_WORDS: Final[dict[str, str]] = {
    "public": "Others dial this node directly.",
    "this machine only": "Nodes on this machine dial this node directly; others can't, or have not tried.",
    "this network only": "Nodes of this network dial this node directly; for others, forward its TCP port.",
    "relayed": "Others reach this node through a relay only; forward its TCP port on your router for direct chains.",
    "none": "Nobody can dial this node, and it has no relay: forward its TCP port, or join by a bootstrap that relays.",
    "unknown": "Whether others can dial this node is not known yet; a bootstrap or a trainer has to say.",
}
"""Each reach as a sentence."""

_PLAIN_WIDTH = 160


def read_whereabouts(home: Path) -> Whereabouts:
    """Where the node of this home listens. Raises ConfigError if none is running."""
    path = home / WHEREABOUTS_FILE
    cure = "start one with `echo-node join`, or name another home with ECHO_HOME."
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Whereabouts)
    except FileNotFoundError as error:
        raise ConfigError(f"no node is running in {home}; {cure}") from error
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; check its permissions.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it and start the node again.") from error
    if not psutil.pid_exists(found.pid):
        raise ConfigError(f"the node in {home} (process {found.pid}) has ended without a farewell; {cure}")
    return found


def fetch_state(address: str, timeout_s: float = 5.0) -> bytes:
    """The bytes of `GET /state` at `http://host:port`. Blocks at most about `timeout_s`. Raises Unreachable."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", "/state")
        response = connection.getresponse()
        content = response.read(STATE_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"the node at {address} does not answer ({error}); is it still running?") from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unreachable(f"the node at {address} answered {response.status} {response.reason} instead of its state.")
    return content


def decode_state(content: bytes) -> NodeState:
    """The state document in `content`. Raises Unreachable if another program answered."""
    try:
        return msgspec.json.decode(content, type=NodeState)
    except msgspec.DecodeError as error:
        raise Unreachable(f"what answered is not an Echo node of this version ({error}).") from error


def print_status(places: Places, *, as_json: bool) -> None:
    """`echo-node status`: the answer on stdout."""
    _print(places, render_status, as_json=as_json)


def print_peers(places: Places, *, as_json: bool) -> None:
    """`echo-node peers`: the answer on stdout."""
    _print(places, render_peers, as_json=as_json)


def _print(places: Places, render: Callable[[NodeState], RenderableType], *, as_json: bool) -> None:
    content = fetch_state(read_whereabouts(places.data).http)
    if as_json:
        click.echo(content)
        return
    # a line to copy must stay one line
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)  # into a file or a pipe, nothing is cut off
    console.print(render(decode_state(content)), soft_wrap=True)


def render_status(state: NodeState) -> RenderableType:
    """What `echo-node status` prints: sentences, then a table or two."""
    parts: list[RenderableType] = [Text(line) for line in status_lines(state)]
    if state.trainer is not None:
        parts += [Text(""), trainer_table(state.trainer)]
    if state.refused:
        parts += [Text(""), refusals_table(state.refused)]
    if state.events:
        parts += [Text(""), *(Text(_event_line(event.at, event.text, state.now)) for event in state.events[-8:])]
    return Group(*parts)


def status_lines(state: NodeState) -> Iterator[str]:
    """The node in sentences."""
    up = duration_text(state.now - state.started_at)
    yield f"{state.role.capitalize()} {state.peer} of swarm {plain(state.swarm)}, up {up} (process {state.pid})."
    others = sum(not peer.ours for peer in state.peers)
    note = f" {plain(state.network_note, 200)}" if state.network_note else ""
    yield (
        f"Connected; it sees {count_text(others, 'other peer')}.{note}" if state.connected else f"Not connected.{note}"
    )
    own = next((peer for peer in state.peers if peer.ours), None)
    if own is not None and (reach := own.reach_text or own.reach) in REACH_WORDS:
        yield REACH_WORDS[reach]
    if own is not None and own.layers_per_s > 0.0:
        yield speed_line(own)
    if state.run is not None:
        yield run_line(state.run)
        if state.run.trainer_note:
            yield plain(state.run.trainer_note, 300)
    elif state.role == "inference":
        yield f"No run yet: a trainer of swarm {plain(state.swarm)} has to begin one."
    if state.trainer is not None:
        yield from _trainer_lines(state.trainer)
    if state.inference is not None:
        yield from _inference_lines(state.inference)
    if state.join_line:
        yield f"Next machine: {plain(state.join_line, 1000)}"


def speed_line(own: PeerView) -> str:
    """How fast this device was measured to be, in one sentence."""
    head = f"; the output matrix takes as long as {own.head_layers:.1f} layers" if own.head_layers else ""
    ways = f"; the ways to {count_text(own.ways, 'other peer')} are measured" if own.ways else ""
    return (
        f"This device holds {count_text(own.max_layers, 'layer')} and computes {own.layers_per_s:,.0f} layers × tokens "
        f"a second{head}{ways}."
    )


def run_line(run: RunView) -> str:
    """The run in one sentence."""
    return (
        f"Run {plain(run.run_id, 13)}: {plain(run.model)} on {plain(run.task)} with {plain(run.algorithm)}, "
        f"{run.protocol}, lag at most {run.max_lag}, {run.groups_per_step} groups of {run.group_size} a step."
    )


def _trainer_lines(view: TrainerView) -> Iterator[str]:
    ending = " The run is complete." if view.done else ""
    yield f"Step {view.step}, policy version {plain(view.version)}.{ending}"
    if view.advice:
        yield plain(view.advice, 300)


def _inference_lines(view: InferenceView) -> Iterator[str]:
    layers = f"layers {plain(view.span)}" if view.span else "no layers yet"
    version = f", version {plain(view.version)}" if view.version else ""
    place = f", {'head' if view.head else 'stage'} of a chain of {len(view.chain)}" if view.chain else ""
    yield f"Serves {layers}{version}{place}; now {view.activity}."
    made = f"{count_text(view.groups, 'group')} ({count_text(view.tokens, 'token')})"
    yield f"Made {made}, lately {view.tokens_per_s:.0f} tokens/s."


def render_peers(state: NodeState) -> RenderableType:
    """What `echo-node peers` prints."""
    parts: list[RenderableType] = [peers_table(state.peers)] if state.peers else [Text("No peer is known yet.")]
    if state.run is not None and state.run.trainer_note:
        parts += [Text(""), Text(plain(state.run.trainer_note, 300))]
    return Group(*parts)


def peers_table(peers: tuple[PeerView, ...], names: dict[str, str] | None = None) -> Table:
    """One row a peer; `names` gives some of them a name beside their PeerID."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("peer", "role", "layers", "version"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "layers/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("device", "reach"):
        table.add_column(heading, no_wrap=True)
    table.add_column("seen", justify="right", no_wrap=True)
    order = {"bootstrap": 0, "trainer": 1, "inference": 2}
    for peer in sorted(peers, key=lambda peer: (order.get(peer.role, 3), peer.span or "", peer.peer)):
        name = (names or {}).get(peer.peer)
        label = f"{name} {short_peer(peer.peer)}" if name else plain(peer.peer)
        table.add_row(
            Text(f"{label} (this node)" if peer.ours else label),
            Text(plain(peer.role)),
            Text(plain(peer.span or "–")),
            Text(plain(peer.version or "–")),
            Text(f"{peer.tokens_per_s:,.0f}" if peer.role == "inference" else "–"),
            Text(f"{peer.layers_per_s:,.0f}" if peer.layers_per_s else "–"),
            Text(plain(peer.device or "–", 24)),
            Text(plain(peer.reach_text or peer.reach)),
            Text(f"{duration_text(peer.age_s)} ago"),
        )
    return table


def trainer_table(view: TrainerView, window: int = 5) -> Table:
    """Reward, lag, release size and idleness as short charts."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if view.reward_history:
        means = moving_mean(view.reward_history, window)
        table.add_row("reward", Text(f"{sparkline(means, 48)}  {means[-1]:.3f} (began at {means[0]:.3f})"))
    table.add_row("lag", lag_chart(view.lag_histogram))
    if view.release_bytes:
        mean = sum(view.release_bytes) / len(view.release_bytes)
        ratio = f", {view.model_bytes_bf16 / mean:.1f}× smaller than the bf16 model" if mean > 0 else ""
        whole = f" ({bytes_text(view.model_bytes_bf16)})" if ratio else ""
        table.add_row("release", Text(f"{bytes_text(view.release_bytes[-1])}, mean {bytes_text(mean)}{ratio}{whole}"))
    table.add_row(f"last {RECENT_STEPS} steps", Text(f"idle {view.idle_share:.0%}, {view.step_seconds:.2f} s a step"))
    table.add_row("buffer", Text(f"{count_text(view.buffer_groups, 'group')}, lag bound {view.effective_lag}"))
    return table


def lag_chart(histogram: dict[int, int], width: int = 24) -> Text:
    """One line a lag: how many groups were trained on at it."""
    if not histogram:
        return Text("no group trained on yet")
    total = sum(histogram.values())
    lines = [f"{lag} {bar(count / total, width)} {count:,}" for lag, count in sorted(histogram.items())]
    return Text("\n".join(lines))


def refusals_table(refused: dict[str, int]) -> Table:
    """Refused input by reason, the most frequent first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("refused")
    table.add_column("times", justify="right")
    for reason, count in sorted(refused.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(Text(plain(reason)), Text(f"{count:,}"))
    return table


def _event_line(at: float, text: str, now: float) -> str:
    return f"{duration_text(now - at)} ago: {plain(text, 200)}"
