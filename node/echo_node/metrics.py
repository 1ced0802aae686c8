"""The state document as prometheus metrics, made anew at each scrape. Base units; nothing is counted here."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from echo_node.state import InferenceView, NodeState, TrainerView


class StateCollector(Collector):
    """Reads the state at each scrape. Holds nothing, so a scrape can't disagree with `/state`."""

    def __init__(self, read_state: Callable[[], NodeState]) -> None:
        self._read_state = read_state

    def describe(self) -> list[Metric]:
        """Nothing: the registry must not read the state before the node has one."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric of the node."""
        state = self._read_state()
        yield from _node_metrics(state)
        if state.trainer is not None:
            yield from _trainer_metrics(state.trainer)
        if state.inference is not None:
            yield from _inference_metrics(state.inference)


def _node_metrics(state: NodeState) -> Iterator[Metric]:
    labels = {"peer": state.peer, "role": state.role, "swarm": state.swarm, "software": state.software}
    info = GaugeMetricFamily("echo_node_info", "Always 1; the labels say who this is.", labels=list(labels))
    info.add_metric(list(labels.values()), 1.0)
    yield info
    yield _gauge("echo_start_time_seconds", "Unix time at which the node started.", state.started_at)
    yield _gauge("echo_connected", "1 while the node is connected to its swarm.", float(state.connected))
    roles: dict[str, float] = {}
    for peer in state.peers:
        roles[peer.role] = roles.get(peer.role, 0.0) + 1.0
    yield _gauges("echo_peers", "Members of the swarm that this node sees.", "role", roles)
    speeds = {peer.peer: peer.tokens_per_s for peer in state.peers if peer.role == "inference"}
    yield _gauges("echo_peer_tokens_per_second", "Speed of each inference peer, as it says itself.", "peer", speeds)
    if state.run is not None and state.run.trainer_age_s is not None:
        age_s = state.run.trainer_age_s
        yield _gauge("echo_run_trainer_age_seconds", "Age of the last that was heard of the run's trainer.", age_s)
    yield _counters("echo_refused", "Input off the network that was refused.", "reason", state.refused)


def _trainer_metrics(view: TrainerView) -> Iterator[Metric]:
    yield _gauge("echo_trainer_step", "Training steps done.", view.step)
    if view.reward_history:
        yield _gauge("echo_trainer_reward_mean", "Mean reward of the last step.", view.reward_history[-1])
    if view.release_bytes:
        yield _gauge("echo_trainer_release_bytes", "Size of the last release's patch.", view.release_bytes[-1])
    yield _gauge("echo_trainer_model_bytes", "Size of the whole policy in bf16.", view.model_bytes_bf16)
    yield _gauge("echo_trainer_step_seconds", "Mean wall time of the last 20 steps.", view.step_seconds)
    yield _gauge("echo_trainer_idle_ratio", "Share of the last 20 steps that it waited.", view.idle_share)
    yield _gauge("echo_trainer_buffer_groups", "Rollout groups that wait to be trained on.", view.buffer_groups)
    yield _gauge("echo_trainer_lag_bound", "The lag bound in force, at most the run's.", view.effective_lag)
    yield _gauge("echo_trainer_lag_max", "The largest lag that was trained on.", view.lag_max)
    lags = {str(lag): float(groups) for lag, groups in sorted(view.lag_histogram.items())}
    yield _counters("echo_trainer_groups", "Rollout groups trained on, by their lag in versions.", "lag", lags)
    peers = view.rollouts_by_peer
    yield _counters("echo_trainer_rollouts", "Rollouts trained on, by the peer that made them.", "peer", peers)
    yield _gauges("echo_trainer_figure", "Figures of the last step, by name.", "name", view.figures)


def _inference_metrics(view: InferenceView) -> Iterator[Metric]:
    yield _counter("echo_inference_groups", "Rollout groups generated.", view.groups)
    yield _counter("echo_inference_groups_resumed", "Times that a group went on in another ring.", view.resumed)
    yield _counter("echo_inference_groups_dropped", "Groups that no ring could finish in time.", view.dropped)
    yield _counter("echo_inference_tokens", "Tokens generated.", view.tokens)
    yield _counter("echo_inference_version_switches", "Switches to a newer policy version.", view.switches)
    yield _gauge("echo_inference_tokens_per_second", "Tokens generated each second, lately.", view.tokens_per_s)
    yield _gauges("echo_inference_activity", "1 for what the peer does now.", "activity", {view.activity: 1.0})


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
