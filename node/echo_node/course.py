"""The steps of one run on this trainer: gather, learn, release, log; and what the state document says of them.

Knows neither how a batch is gathered nor how a policy learns.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import trio

from echo_node.board import Board
from echo_node.buffer_gather import BufferGather
from echo_node.gather import Gather
from echo_node.herald import Herald
from echo_node.learner import Learned, Learner
from echo_node.learning import StepRecord, idle_share
from echo_node.standing import Standing
from echo_node.state import RECENT_STEPS, TrainerView
from echo_p2p.rl.buffer import ReplayBuffer
from echo_p2p.rl.drift import DriftReport, advice, effective_lag, said_idle
from echo_p2p.swarm import Run

log = logging.getLogger(__name__)

_HISTORY = 1000
_BUSY_IDLE_SHARE = 0.05
_DRIFT_FIGURES = ("k3_kl", "ess", "clip_fraction", "logprob_gap", "logprob_gap_max")


class Course:
    """The steps of one run on this trainer, and what the state document says of them."""

    gather: Gather

    def __init__(self, board: Board, run: Run, learner: Learner, herald: Herald) -> None:
        self.herald = herald
        self.standing = Standing()
        self.lacking: Callable[[], str] = str
        """What is missing for a chain, in words; set by whoever knows the plan."""
        self._board = board
        self._run = run
        self._learner = learner
        self._buffer: ReplayBuffer | None = None
        self._past = learner.log.read()[-_HISTORY:]
        self._lags: Counter[int] = Counter()
        self._rollouts: Counter[str] = Counter()
        self._lag_bound = run.manifest.max_lag
        self._version = learner.version
        self._policy_hash = ""
        self._model_bytes = 0
        self._done = False
        self._published = trio.Event()  # whether the newest step is
        self._published.set()
        for record in self._past:
            self._count(record)

    def use_buffer(self, buffer: ReplayBuffer) -> None:
        """Learn asynchronously from a durable buffer; what a lost step had taken waits there again."""
        learner = self._learner
        returned = buffer.rewind(learner.version.step)
        if learner.resumed:
            log.info("resumed as version %s; %d rollouts of lost steps wait again", learner.version, returned)
        self._buffer = buffer
        self.gather = BufferGather(self._board.presence, self._run, learner, buffer)

    async def run(self, nursery: trio.Nursery) -> None:
        """Release the first version, then learn step by step."""
        learner, steps = self._learner, self._board.config.trainer.steps
        release = await trio.to_thread.run_sync(learner.first_release)
        self._policy_hash, self._model_bytes = release.policy_hash.hex(), release.model_bytes
        nursery.start_soon(self.gather.run)  # who hears of the release sends what it kept for us
        await self.herald.announce(release)
        self._board.presence.figures = lambda: {"version": self._version}
        log.info("policy version %s is out; waiting for rollouts", learner.version)
        async with trio.open_nursery() as publishing:
            while steps is None or learner.version.step < steps:
                await self._step(publishing)
        self._done = True
        log.info("%d steps are done", learner.version.step)

    async def _step(self, publishing: trio.Nursery) -> None:
        """Gather and learn; the release is made while the next step goes on."""
        if self._buffer is None:
            await self._published.wait()  # who is asked for rollouts of a version must be able to get it
        started = trio.current_time()
        batch = await self.gather.next_batch()
        waited_s = trio.current_time() - started
        with trio.CancelScope(shield=True):  # a step that was learned is released and logged
            learned = await trio.to_thread.run_sync(self._learner.learn, batch, waited_s)
            await self._published.wait()  # one release at a time: each holds a copy of the weights
            self._published = trio.Event()
            publishing.start_soon(self._publish, learned, self._published)
        if self._learner.checkpoint_due:
            await self.checkpoint()

    async def _publish(self, learned: Learned, published: trio.Event) -> None:
        try:
            with trio.CancelScope(shield=True):
                record, release = await trio.to_thread.run_sync(self._learner.publish, learned)
            await self.herald.announce(release)
        finally:
            published.set()
        self._version = release.version
        self._past = [*self._past[1 - _HISTORY :], record]
        self._policy_hash = record.policy_hash
        self._count(record)
        self._coordinate(record)
        log.info(
            "step %d: reward %.3f, lag up to %d, release %d bytes, waited %.1f s",
            record.step, record.reward_mean, max(group.lag for group in record.groups), record.release_bytes,
            record.waited_s,
        )  # fmt: skip

    async def checkpoint(self) -> None:
        """Make everything up to the last step durable; only then is what it was trained on forgotten."""
        await trio.to_thread.run_sync(self._learner.save)
        await self._published.wait()
        step = await trio.to_thread.run_sync(self._learner.keep)
        if self._buffer is not None:
            await trio.to_thread.run_sync(self._buffer.commit, step)

    def _coordinate(self, record: StepRecord) -> None:
        """Tighten or loosen the effective lag bound by the step's drift; never below one step, never over the run's."""
        if not isinstance(self.gather, BufferGather) or not record.updated:
            return
        max_lag = self._run.manifest.max_lag
        drift = {name: record.figures.get(name) for name in _DRIFT_FIGURES}
        if any(figure is None for figure in drift.values()):  # it was not finite: no drift is higher
            bound = self._lag_bound - 1
        else:
            bound = effective_lag(msgspec.convert(drift, DriftReport), self._lag_bound, max_lag)
        self._lag_bound = self.gather.lag_bound = max(min(1, max_lag), bound)

    def _count(self, record: StepRecord) -> None:
        self._lags.update(group.lag for group in record.groups)
        for group in record.groups:
            self._rollouts[group.worker] += self._run.manifest.group_size

    def refused(self) -> Mapping[str, int]:
        """What was admitted but never trained on, by reason."""
        return self.gather.refused()

    def view(self) -> TrainerView:
        """What the state document says of the training."""
        past = self._past
        trained = sum(self._lags.values())
        return TrainerView(
            step=self._version.step,
            version=str(self._version),
            reward_history=tuple(record.reward_mean for record in past),
            lag_histogram=dict(sorted(self._lags.items())),
            lag_mean=sum(lag * count for lag, count in self._lags.items()) / trained if trained else 0.0,
            lag_max=max(self._lags, default=0),
            release_bytes=tuple(record.release_bytes for record in past),
            model_bytes_bf16=self._model_bytes,
            step_seconds=sum(record.step_s for record in past[-RECENT_STEPS:]) / max(1, len(past[-RECENT_STEPS:])),
            idle_share=idle_share(past[-RECENT_STEPS:]),
            rollouts_by_peer=dict(self._rollouts),
            buffer_groups=self.gather.statistics.waiting_groups if isinstance(self.gather, BufferGather) else 0,
            effective_lag=self._lag_bound,
            policy_hash=self._policy_hash,
            figures=dict(past[-1].figures) if past else {},
            advice=self._advice(),
            done=self._done,
        )

    def _advice(self) -> str:
        if lacking := self.lacking():
            return lacking
        recent = self._past[-RECENT_STEPS:]
        if not recent:
            return ""
        span_s = recent[-1].at - recent[0].at
        made: Counter[str] = Counter(group.worker for record in recent[1:] for group in record.groups)
        if span_s <= 0.0 or not made:
            return ""
        idle = idle_share(recent)
        if idle <= _BUSY_IDLE_SHARE:  # what was trained on says little of what peers could make
            return "trainer busy: there are rollouts enough"
        manifest = self._run.manifest
        lacks = advice(
            rollouts_per_step=manifest.groups_per_step * manifest.group_size,
            step_s=sum(record.step_s for record in recent) / len(recent),
            broadcast_s=0.0,
            publish_interval=1,
            rates=[count * manifest.group_size / span_s for count in made.values()],
        ).lacks
        return said_idle(idle, lacks)
