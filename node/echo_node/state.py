"""The state document: what `GET /state` serves and `status --json` prints. Values only: no process, no screen."""

from typing import Final, Literal

from msgspec import Struct

RECENT_STEPS: Final = 20
"""What a trainer's pace is of."""

Activity = Literal["starting", "waiting", "fetching", "standing by", "serving", "generating", "stalled by lag"]


class PeerView(Struct, frozen=True, kw_only=True):
    """One member of the swarm, as this node sees it.

    `layers_per_s` is layers × tokens a second, `head_layers` the output matrix's time in layers, 0.0 while unmeasured;
    `ways` are those that it has measured to others. `reach_text` is `reach` with what its addresses take from it.
    """

    peer: str
    role: str
    span: str | None = None
    version: str | None = None
    tokens_per_s: float = 0.0
    layers_per_s: float = 0.0
    head_layers: float = 0.0
    max_layers: int = 0
    ways: int = 0
    device: str = ""
    reach: str = "unknown"
    reach_text: str = ""
    age_s: float = 0.0
    ours: bool = False


class RunView(Struct, frozen=True, kw_only=True):
    """The run that the swarm works on.

    `trainer_age_s` is the age of what its trainer signed last, nil for that itself; `trainer_note` says what it means
    if that is too long ago, and is empty otherwise.
    """

    run_id: str
    model: str
    task: str
    algorithm: str
    protocol: str
    max_lag: int
    group_size: int
    groups_per_step: int
    trainer_age_s: float | None = None
    trainer_note: str = ""


class TrainerView(Struct, frozen=True, kw_only=True):
    """A trainer's progress. Histories hold the most recent 1,000 steps, oldest first.

    `step_seconds` and `idle_share`, the share of time that it waited for rollouts, are of the last 20 steps, and so is
    what `advice` says of them.
    """

    step: int
    version: str
    reward_history: tuple[float, ...] = ()
    lag_histogram: dict[int, int] = {}
    lag_mean: float = 0.0
    lag_max: int = 0
    release_bytes: tuple[int, ...] = ()
    model_bytes_bf16: int = 0
    step_seconds: float = 0.0
    idle_share: float = 0.0
    rollouts_by_peer: dict[str, int] = {}
    buffer_groups: int = 0
    effective_lag: int = 0
    policy_hash: str = ""
    figures: dict[str, float] = {}
    advice: str = ""
    done: bool = False


class InferenceView(Struct, frozen=True, kw_only=True):
    """An inference peer's work. `chain` names the peers of its chain in order; empty while it has none.

    Of its `groups`, `resumed` counts how often one went on in another ring, `dropped` those that none could finish.
    """

    span: str | None = None
    version: str | None = None
    chain: tuple[str, ...] = ()
    head: bool = False
    groups: int = 0
    resumed: int = 0
    dropped: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    switches: int = 0
    activity: Activity = "starting"


class Event(Struct, frozen=True, kw_only=True):
    """Something that a person should know of, with its Unix time in seconds."""

    at: float
    text: str


class NodeState(Struct, frozen=True, kw_only=True):
    """Everything that a node says of itself."""

    peer: str
    role: Literal["bootstrap", "trainer", "inference"]
    swarm: str
    software: str
    pid: int
    started_at: float
    now: float
    join_line: str = ""
    streams: tuple[str, ...] = ()
    gossip: tuple[str, ...] = ()
    connected: bool = False
    network_note: str = ""
    run: RunView | None = None
    peers: tuple[PeerView, ...] = ()
    trainer: TrainerView | None = None
    inference: InferenceView | None = None
    refused: dict[str, int] = {}
    events: tuple[Event, ...] = ()


class Whereabouts(Struct, frozen=True, kw_only=True):
    """`node.json` in a node's home while it runs: how `status` and the demo find its HTTP port."""

    pid: int
    peer: str
    role: str
    swarm: str
    http: str
    daemon_pid: int = 0
