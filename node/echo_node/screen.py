"""The demo's live screen: one picture of all nodes, made from their states. Pure; knows no process and no clock."""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo_node.charts import bytes_text, count_text, duration_text, plain, short_peer
from echo_node.state import NodeState, PeerView
from echo_node.status import run_line, trainer_table


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of the demo. `state` is the last it served; `ended` its exit status, with its `last_line` of output."""

    name: str
    state: NodeState | None = None
    ended: int | None = None
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class DemoView:
    """Everything the screen shows. `limit_s` is when the demo ends by itself."""

    nodes: tuple[NodeStatus, ...]
    elapsed_s: float
    limit_s: float
    stopping: bool = False

    @property
    def states(self) -> tuple[NodeState, ...]:
        """Of the nodes that have served one."""
        return tuple(node.state for node in self.nodes if node.state is not None)

    @property
    def trainer(self) -> NodeState | None:
        """The trainer's state, once it serves one."""
        return next((state for state in self.states if state.role == "trainer"), None)

    @property
    def names(self) -> dict[str, str]:
        """PeerID → name of the node."""
        return {node.state.peer: node.name for node in self.nodes if node.state is not None}


def phase_text(view: DemoView) -> str:
    """What the demo waits for or does now, as one sentence without its full stop."""
    if view.stopping:
        return "letting every node finish and leave"
    trainer = view.trainer
    if not view.states:
        return "starting the first node (importing the network stacks takes some seconds)"
    if trainer is None:
        return "starting the trainer (importing torch and verl takes some seconds)"
    if trainer.trainer is None:
        return "waiting for the trainer to publish version 0"
    if trainer.trainer.done:
        return "the trainer has done all its steps"
    if trainer.trainer.step > 0:
        return "learning"
    workers = [state for state in view.states if state.role == "inference"]
    if not workers:
        return "waiting for the first inference peer" if len(view.nodes) > 1 else "making the first rollouts"
    if not any(state.inference is not None and state.inference.span for state in workers):
        return "dividing the layers among the inference peers"
    return "making the first rollouts"


def progress_line(view: DemoView) -> str:
    """The whole picture in one line, for a log."""
    parts = [f"{view.elapsed_s:.0f} s", phase_text(view)]
    state = view.trainer
    if state is not None and (work := state.trainer) is not None and work.step > 0:
        recent = work.reward_history[-10:]
        reward = f", reward {sum(recent) / len(recent):.3f}" if recent else ""
        parts.append(f"step {work.step}{reward}, lag mean {work.lag_mean:.2f} largest {work.lag_max}")
        if work.release_bytes:
            parts.append(f"release {bytes_text(work.release_bytes[-1])}")
    speed = sum(state.inference.tokens_per_s for state in view.states if state.inference is not None)
    parts.append(f"{len(view.states)} of {count_text(len(view.nodes), 'node')} up, {speed:,.0f} tokens/s")
    refused = sum(sum(state.refused.values()) for state in view.states)
    if refused:
        parts.append(f"{refused:,} refused")
    return "; ".join(parts)


def render(view: DemoView) -> RenderableType:
    """The live screen."""
    parts: list[RenderableType] = [_headline(view)]
    trainer = view.trainer
    if trainer is not None and trainer.run is not None:
        parts.append(Text(run_line(trainer.run), style="dim"))
    parts += [Text(""), _node_table(view)]
    if trainer is not None and (work := trainer.trainer) is not None and work.step > 0:
        parts += [Text(""), trainer_table(work)]
        if work.advice:
            parts.append(Text(plain(work.advice, 200), style="dim"))
    if refused := _refused(view):
        parts += [Text(""), refused]
    parts += [Text(line, style="red") for line in death_lines(view)]
    if trainer is not None and trainer.events and not view.stopping:
        parts.append(Text(plain(trainer.events[-1].text, 160), style="dim"))
    return Panel(Group(*parts), title="Echo: a swarm that learns", title_align="left", padding=(1, 2))


def death_lines(view: DemoView) -> list[str]:
    """A sentence for each node that ended before it was asked to."""
    if view.stopping:
        return []
    dead = [node for node in view.nodes if node.ended is not None and node.ended != 0]
    return [f"{node.name} ended ({_ending(node.ended)}): {node.last_line or 'it said nothing'}" for node in dead]


def _ending(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"


def _headline(view: DemoView) -> Table:
    table = Table.grid(expand=True)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    trainer = view.trainer.trainer if view.trainer is not None else None
    step = f", step {trainer.step}" if trainer is not None and trainer.step else ""
    phase = phase_text(view)
    table.add_row(
        Text(f"{phase[0].upper()}{phase[1:]}{step} …", style="bold"),
        Text(f"{duration_text(view.elapsed_s)} of {duration_text(view.limit_s)}", style="dim"),
    )
    return table


def _node_table(view: DemoView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("node", "peer", "role", "layers", "version"):
        table.add_column(heading, no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("groups", justify="right", no_wrap=True)
    table.add_column("now", no_wrap=True)
    for node in view.nodes:
        table.add_row(*(Text(cell) for cell in _node_cells(node, view)), style="dim" if node.ended is not None else "")
    return table


def _node_cells(node: NodeStatus, view: DemoView) -> tuple[str, ...]:
    state = node.state
    if state is None:
        return (node.name, "", "", "", "", "", "", "ended" if node.ended is not None else "starting")
    work, training = state.inference, state.trainer
    seen = _as_others_see(state.peer, view)
    trained = view.trainer.trainer.lag_histogram if view.trainer is not None and view.trainer.trainer else {}
    version = work.version if work else training.version if training else seen.version if seen else None
    return (
        node.name,
        short_peer(state.peer),
        state.role,
        plain((work.span if work else None) or ""),
        plain(version or ""),
        f"{work.tokens_per_s:,.0f}" if work else "",
        f"{work.groups:,}" if work and (work.head or work.groups) else f"{sum(trained.values()):,}" if training else "",
        "ended" if node.ended is not None else _activity(state, view),
    )


def _activity(state: NodeState, view: DemoView) -> str:
    if state.inference is not None:
        chain = [view.names.get(peer, short_peer(peer)) for peer in state.inference.chain]
        place = f" ({' → '.join(chain)})" if len(chain) > 1 else ""
        return f"{state.inference.activity}{place}"
    if state.trainer is not None:
        return f"trains, {state.trainer.buffer_groups} groups buffered"
    return plain(state.network_note, 40) or "connected"


def _as_others_see(peer: str, view: DemoView) -> PeerView | None:
    return next((seen for state in view.states for seen in state.peers if seen.peer == peer), None)


def _refused(view: DemoView) -> Text | None:
    reasons: dict[str, int] = {}
    for state in view.states:
        for reason, count in state.refused.items():
            reasons[reason] = reasons.get(reason, 0) + count
    if not reasons:
        return None
    worst = sorted(reasons.items(), key=lambda item: -item[1])
    return Text("refused: " + ", ".join(f"{plain(reason)} {count:,}" for reason, count in worst[:6]), style="yellow")
