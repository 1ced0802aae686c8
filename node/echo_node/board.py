"""Puts the state document together from what the network and the role say of themselves. Changes nothing."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from echo_node.chat_desk import Desk, elsewhere
from echo_node.logs import Journal
from echo_node.silence import silence_note
from echo_node.state import InferenceView, NodeState, PeerView, RunView, TrainerView
from echo_p2p.config import NodeConfig
from echo_p2p.net.reach import said_reach
from echo_p2p.presence import Presence
from echo_p2p.swarm import Member

SOFTWARE = f"echo-p2p {version('echo-p2p')}"


@dataclass(slots=True)
class Board:
    """Where a role hangs up its view; `state` reads everything at the moment it is asked."""

    config: NodeConfig
    presence: Presence
    journal: Journal
    trainer: Callable[[], TrainerView] | None = None
    inference: Callable[[], InferenceView] | None = None
    refused: Callable[[], Mapping[str, int]] | None = None
    desk: Desk = field(init=False)

    def __post_init__(self) -> None:
        presence = self.presence
        self.desk = Desk(lambda: elsewhere(presence.swarm.plan, presence.identity.peer_id))

    def state(self) -> NodeState:
        """The state document of this node, now."""
        presence = self.presence
        now = time.time()
        return NodeState(
            peer=presence.identity.peer_id,
            role=self.config.role,
            swarm=presence.swarm.name,
            software=SOFTWARE,
            pid=os.getpid(),
            started_at=presence.started_at,
            now=now,
            join_line=join_line(presence, self.config.inference.owner),
            streams=presence.stream_addresses,
            gossip=presence.gossip_addresses,
            connected=presence.connected,
            network_note="" if presence.connected else "no bootstrap reachable; trying again",
            run=run_view(presence, now) if presence.swarm.joined else None,
            peers=tuple(_peer_view(member, presence.identity.peer_id, now) for member in _by_role(presence)),
            trainer=self.trainer() if self.trainer else None,
            inference=self.inference() if self.inference else None,
            refused=self._refused(),
            events=self.journal.events,
        )

    def _refused(self) -> dict[str, int]:
        """By reason, from wherever something is refused; the same reason at two places is added up."""
        role = self.refused() if self.refused else {}
        total: Counter[str] = Counter()
        presence = self.presence
        for refused in (presence.border.refused, presence.gossip.dropped, presence.hive.refused, role):
            total.update(refused)
        return dict(sorted(total.items()))


def join_line(presence: Presence, owner: str = "") -> str:
    """The command that brings the next machine in: by the bootstraps that we were told of, else by ourselves.

    It names the owner of the run that we serve, or the `owner` that we are to serve.
    """
    addresses = presence.network.peers or sorted(presence.stream_addresses, key=_outside_first)[:1]
    if not addresses:
        return ""
    swarm = "" if presence.swarm.name == "echo" else f" --swarm {presence.swarm.name}"
    if presence.swarm.joined:
        owner = presence.swarm.joined.owner
    if presence.record.role == "trainer":
        owner = presence.identity.peer_id
    of_owner = f" --owner {owner}" if owner else ""
    return f"echo-node join --role inference{swarm}{of_owner} " + " ".join(f"--peer {each}" for each in addresses)


def _outside_first(address: str) -> tuple[bool, bool]:
    return ("/p2p-circuit" in address, address.startswith(("/ip4/127.", "/ip6/::1/")))


def _by_role(presence: Presence) -> list[Member]:
    order = ("bootstrap", "trainer", "inference")
    return sorted(presence.swarm.members.values(), key=lambda member: (order.index(member.record.role), member.peer))


def _peer_view(member: Member, ours: str, now: float) -> PeerView:
    record, capacity = member.record, member.record.capacity
    return PeerView(
        peer=member.peer,
        role=record.role,
        span=str(record.span) if record.span else None,
        version=str(record.version) if record.version else None,
        tokens_per_s=record.tokens_per_s,
        layers_per_s=capacity.layers_per_s if capacity else 0.0,
        head_layers=capacity.head_layers if capacity else 0.0,
        max_layers=capacity.max_layers if capacity else 0,
        ways=len(capacity.ways) if capacity else 0,
        device=capacity.device if capacity else "",
        reach=record.reach,
        reach_text=said_reach(record.reach, record.streams),
        age_s=max(0.0, now - member.heard_at),
        ours=member.peer == ours,
    )


def run_view(presence: Presence, now: float) -> RunView:
    """The run that was joined, at `now` in Unix seconds."""
    run, word = presence.swarm.joined, presence.swarm.trainers_word
    assert run is not None
    manifest = run.manifest
    ours = presence.record.role == "trainer"
    age_s = max(0.0, now - word.at)
    return RunView(
        run_id=run.run_id.hex(),
        model=manifest.model,
        task=manifest.task.name,
        algorithm=manifest.algorithm.name,
        protocol=manifest.protocol,
        max_lag=manifest.max_lag,
        group_size=manifest.group_size,
        groups_per_step=manifest.groups_per_step,
        trainer_age_s=None if ours else age_s,
        trainer_note="" if ours else silence_note(age_s, left=word.left),
    )
