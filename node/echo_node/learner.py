"""A policy on its way: the engine, its versions, its checkpoints and its log. Synchronous; knows no network.

Both the swarm's trainer and the co-located baseline drive one of these from a worker thread.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from echo_node.learning import Graded, RunLog, StepRecord, TrainedGroup, record_step, trained_groups, update
from echo_node.places import write_whole
from echo_node.prompts import Prompts
from echo_p2p.config import TrainerConfig
from echo_p2p.errors import TrainerError
from echo_p2p.rl.algorithms import StepSize, chosen
from echo_p2p.rl.trainer import StepReport, Trainer
from echo_p2p.tensors import Bits
from echo_p2p.weights.publish import Publisher
from echo_protocols.release import Release
from echo_protocols.sync import Lineage
from echo_protocols.values import PolicyVersion

_CHECKPOINTS_KEPT = 2


class _Progress(Struct, frozen=True, kw_only=True):
    """`progress.json`: the version that the checkpoint holds, in the newest epoch, and the epochs that led there.

    `checkpoint` names a folder; empty: the model that the run began with.
    """

    version: PolicyVersion
    checkpoint: str
    epochs: dict[int, PolicyVersion]


@dataclass(frozen=True, slots=True)
class Learned:
    """A step that is done and still has to be published."""

    before: PolicyVersion
    after: PolicyVersion
    groups: tuple[TrainedGroup, ...]
    sampled_rewards: tuple[float, ...]
    report: StepReport
    weights: Mapping[str, Bits]
    waited_s: float
    step_s: float
    idle_share: float


class Learner:
    """One run's policy. Every new process of a run opens a new epoch, even if the last one saved nothing.

    So no version ever names two policies, and what peers have of a lost step is told from what will replace it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engine: Trainer,
        publisher: Publisher,
        prompts: Prompts,
        config: TrainerConfig,
        size: StepSize | None = None,
    ) -> None:
        """Resumes if `folder` holds a run. Raises TrainerError if its checkpoint is damaged.

        A step trains on no more groups of a batch than `size` says: on those whose rewards differ first.
        """
        self.log = RunLog(folder)
        self.lineage = Lineage()
        self.version = PolicyVersion(epoch=0, step=0)
        self.continues: PolicyVersion | None = None
        self.prompts = prompts
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._engine = engine
        self._publisher = publisher
        self._config = config
        self._size = size
        self._busy_s = self._waited_s = 0.0
        self._learned = 0
        self._saved = -1
        self._unkept: PolicyVersion | None = None
        self._sound = True
        self._resume()
        self._published = self.version.step  # and in the log

    @property
    def resumed(self) -> bool:
        """Whether this process goes on from a checkpoint."""
        return self.continues is not None

    @property
    def idle_share(self) -> float:
        """Share of the time since the first batch in which there was nothing to train on."""
        total = self._busy_s + self._waited_s
        return self._waited_s / total if total else 0.0

    def first_release(self) -> Release:
        """The release that this process begins with: a snapshot."""
        return self._publisher.publish(self.version, self._engine.weights(), continues=self.continues)

    def weights(self) -> Mapping[str, Bits]:
        """The policy as bf16 bits."""
        return self._engine.weights()

    def learn(self, batch: Sequence[Graded], waited_s: float) -> Learned:
        """One step: the engine's update, and a copy of the weights that it led to. Raises TrainerError.

        With dynamic sampling, the batch is all that was looked at; what to train on is chosen here.
        """
        before, self._sound = self.version, False  # whatever fails now may leave the engine ahead of the version
        sampled = tuple(graded.reward for graded in batch)
        if self._size is not None:
            batch = [batch[place] for place in chosen([graded.varies for graded in batch], self._size)]
        groups = trained_groups(batch, self.lineage, before)
        report, step_s = update(self._engine, self.prompts, batch)
        weights = self._engine.weights()
        self.version = PolicyVersion(epoch=before.epoch, step=before.step + 1)
        self._busy_s += step_s
        if self._learned:  # the wait for the first batch is the swarm starting up
            self._waited_s += waited_s
        self._learned += 1
        self._sound = True
        return Learned(before, self.version, groups, sampled, report, weights, waited_s, step_s, self.idle_share)

    def publish(self, learned: Learned) -> tuple[StepRecord, Release]:
        """Release a step (still to be sealed) and log it; the next one may be learned meanwhile.

        Raises WeightsError, and TrainerError if the step before was not published.
        """
        if learned.before.step != self._published:
            raise TrainerError(f"step {learned.after.step} can't be released: {self._published} is the last that was")
        given = learned.report.figures
        figures = {name: float(given[name]) for name in ("loss", "k3_kl", "ess") if name in given}
        release = self._publisher.publish(learned.after, learned.weights, figures=figures)
        record = record_step(
            self.log,
            version=learned.before,
            groups=learned.groups,
            sampled_rewards=learned.sampled_rewards,
            report=learned.report,
            release=release,
            waited_s=learned.waited_s,
            step_s=learned.step_s,
            idle_share=learned.idle_share,
        )
        self._published = learned.after.step
        return record, release

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough steps have gone since the last checkpoint."""
        return self.version.step - max(self._saved, 0) >= self._config.checkpoint_every

    def save(self) -> None:
        """Write a checkpoint, which a restart resumes from only after `keep`. None after a step that failed."""
        if self._saved != self.version.step and self._unkept != self.version and self._sound:
            self._engine.save(self._checkpoints / str(self.version))
            self._unkept = self.version

    def keep(self) -> int:
        """Make the checkpoint that was saved last the newest, durable on return; the step of the newest.

        No restart resumes from a step that was not published: until it is, the one before stays.
        """
        if self._unkept is None or self._unkept.step > self._published:
            return self._saved
        name = str(self._unkept)
        self._note_progress(self._unkept, name)
        self._saved, self._unkept = self._unkept.step, None
        others = [path for path in self._checkpoints.iterdir() if path.name != name]
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[: 1 - _CHECKPOINTS_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
        return self._saved

    def _note_progress(self, version: PolicyVersion, checkpoint: str) -> None:
        progress = _Progress(version=version, checkpoint=checkpoint, epochs=dict(self.lineage.epochs))
        write_whole(self._folder / "progress.json", msgspec.json.encode(progress))

    def _resume(self) -> None:
        path = self._folder / "progress.json"
        if not path.exists():
            self._note_progress(self.version, "")
            return
        try:
            progress = msgspec.json.decode(path.read_bytes(), type=_Progress)
            self.lineage = Lineage(progress.epochs)
        except (msgspec.DecodeError, ValueError) as error:
            raise TrainerError(f"{path} is damaged ({error}); move the run's folder away to start anew.") from error
        if progress.checkpoint:
            self._engine.load(self._checkpoints / progress.checkpoint)
        self.continues = progress.version
        self.version = PolicyVersion(epoch=progress.version.epoch + 1, step=progress.version.step)
        self.lineage.open_epoch(self.version.epoch, progress.version)
        self._note_progress(self.version, progress.checkpoint)  # before anybody hears of the new epoch
        self._saved = progress.version.step
