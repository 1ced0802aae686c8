"""A policy on its way through restarts and crashes: no version ever names two policies, and nothing is lost unseen."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from echo_node.learner import Learner
from echo_node.learning import Graded, RunLog
from echo_p2p.config import TrainerConfig
from echo_p2p.errors import TrainerError, WeightsError
from echo_p2p.rl.algorithms import StepSize
from echo_p2p.rl.trainer import StepReport
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.rollout import RolloutGroup, Sample, Segment
from echo_protocols.sync import lag_fault
from echo_protocols.values import PolicyVersion


class CountingEngine:
    """An engine whose one weight counts its steps."""

    def __init__(self) -> None:
        self.count = 0
        self.fails = False

    def step(self, rows: tuple[object, ...]) -> StepReport:
        self.count += 1
        self.rows = len(rows)
        if self.fails:
            raise TrainerError("the engine broke in the middle of a step")
        return StepReport(updated=True, figures={"loss": 0.5, "k3_kl": float("nan"), "ess": float("inf")})

    def weights(self) -> Mapping[str, np.ndarray]:
        return {"model.embed_tokens.weight": np.array([self.count], np.uint16)}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "count").write_text(str(self.count))

    def load(self, folder: Path) -> None:
        try:
            self.count = int((folder / "count").read_text())
        except OSError as error:
            raise TrainerError(f"{folder} holds no checkpoint") from error


def learner_in(
    folder: Path, engine: CountingEngine | None = None, size: StepSize | None = None, **config: object
) -> Learner:
    store = Store(folder / "blobs", 1 << 20)
    publisher = Publisher(store)
    learner = Learner(
        folder,
        engine=engine or CountingEngine(),  # type: ignore[arg-type]
        publisher=publisher,
        prompts=SimpleNamespace(ids=lambda index: (1, 2)),  # type: ignore[arg-type]
        config=TrainerConfig(**config),
        size=size,
    )
    publisher_sealed(learner, store, publisher, learner.first_release())
    learner.seal_in = (store, publisher)  # type: ignore[attr-defined]
    return learner


def publisher_sealed(learner: Learner, store: Store, publisher: Publisher, release: object) -> None:
    publisher.sealed(store.put(msgspec.msgpack.encode(release)))


def group(version: PolicyVersion, counter: int = 0) -> RolloutGroup:
    segments = (Segment(start=0, version=version),)
    samples = tuple(Sample(tokens=(1,), logprobs=(-1.0,), finish="stop", segments=segments) for _ in range(2))
    return RolloutGroup(counter=counter, prompt_index=1, samples=samples, sampling_hash=bytes(32), engine="test")


def learn(learner: Learner) -> None:
    _, release = learner.publish(learner.learn([Graded("w", group(learner.version), (0.0, 1.0))], 0.1))
    publisher_sealed(learner, *learner.seal_in, release)  # type: ignore[attr-defined]


def save(learner: Learner) -> int:
    learner.save()
    return learner.keep()


def version(text: str) -> PolicyVersion:
    epoch, step = text.split(".")
    return PolicyVersion(epoch=int(epoch), step=int(step))


def test_a_process_that_died_before_its_first_checkpoint_is_followed_by_a_new_epoch(tmp_path: Path) -> None:
    first = learner_in(tmp_path)
    learn(first)
    learn(first)
    assert str(first.version) == "0.2"  # and peers have that

    second = learner_in(tmp_path)
    assert second.resumed
    assert str(second.version) == "1.0"
    assert second.continues == version("0.0")
    assert second.version > first.version  # so that peers that are ahead follow
    assert lag_fault(group(version("0.0")), second.lineage, second.version, 4) is None
    assert lag_fault(group(version("0.1")), second.lineage, second.version, 4) == "abandoned-branch"


def test_a_process_that_resumed_and_died_at_once_loses_no_rollout_of_its_epoch(tmp_path: Path) -> None:
    first = learner_in(tmp_path)
    learn(first)
    save(first)
    second = learner_in(tmp_path)
    assert str(second.version) == "1.1"
    learn(second)
    third = learner_in(tmp_path)
    assert str(third.version) == "2.1"
    faults = {
        text: lag_fault(group(version(text)), third.lineage, third.version, 4)
        for text in ("0.0", "0.1", "0.2", "1.1", "1.2", "2.1", "2.2", "3.1")
    }
    assert {text for text, fault in faults.items() if fault is None} == {"0.0", "0.1", "1.1", "2.1"}
    assert third._engine.count == 1  # type: ignore[attr-defined]


def test_a_step_that_failed_is_never_saved(tmp_path: Path) -> None:
    engine = CountingEngine()
    learner = learner_in(tmp_path, engine)
    learn(learner)
    assert save(learner) == 1
    engine.fails = True
    with pytest.raises(TrainerError):
        learn(learner)
    assert save(learner) == 1
    again = learner_in(tmp_path)
    assert again._engine.count == 1  # type: ignore[attr-defined]
    assert again.continues == version("0.1")


def test_a_release_that_found_no_room_leaves_the_last_checkpoint_the_newest(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    learn(learner)
    learn(learner)
    save(learner)
    learner._publisher._recent[-1].sealed = None  # the next release can't be published
    with pytest.raises(WeightsError):
        learn(learner)
    assert str(learner.version) == "0.3"
    assert save(learner) == 2
    assert learner_in(tmp_path)._engine.count == 2  # type: ignore[attr-defined]


def test_the_next_step_is_learned_while_a_release_is_made_and_neither_sees_the_other(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    batch = [Graded("w", group(learner.version), (0.0, 1.0))]
    first = learner.learn(batch, 0.1)
    learner.save()  # of step 1, while its release is still to come: no restart may resume from it yet
    assert str(learner_in(tmp_path).continues) == "0.0"
    second = learner.learn(batch, 0.1)
    store, publisher = learner.seal_in  # type: ignore[attr-defined]
    for step, learned in enumerate((first, second), start=1):
        record, release = learner.publish(learned)
        publisher_sealed(learner, store, publisher, release)
        assert (record.step, record.version, str(release.version)) == (step, f"0.{step - 1}", f"0.{step}")
        assert list(learned.weights["model.embed_tokens.weight"]) == [step]
    assert learner.keep() == 1
    resumed = learner_in(tmp_path)
    assert str(resumed.continues) == "0.1"
    assert resumed._engine.count == 1  # type: ignore[attr-defined]


def test_the_newest_checkpoint_stays_when_the_clock_goes_back(tmp_path: Path) -> None:
    import os

    learner = learner_in(tmp_path)
    for _ in range(3):
        learn(learner)
        save(learner)
        for path in (tmp_path / "checkpoints").iterdir():
            os.utime(path, (2e9, 2e9))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert learner_in(tmp_path)._engine.count == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version":[1,2],"checkpoint":"x","epochs":{"1":[3,0]}}'])
def test_damaged_progress_is_said_not_started_over(tmp_path: Path, content: bytes) -> None:
    learner_in(tmp_path)
    (tmp_path / "progress.json").write_bytes(content)
    with pytest.raises(TrainerError, match=r"progress\.json is damaged"):
        learner_in(tmp_path)


def test_what_was_passed_over_is_not_trained_on_and_counts_in_the_mean_reward(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, size=StepSize(2, 8))
    rewards = [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0)]
    batch = [Graded("w", group(learner.version, counter), each) for counter, each in enumerate(rewards)]
    record, _ = learner.publish(learner.learn(batch, 0.1))
    assert [trained.counter for trained in record.groups] == [1, 3]
    assert learner._engine.rows == 4  # type: ignore[attr-defined]
    assert (record.reward_mean, record.passed_over) == (0.75, 2)


def test_a_line_of_the_log_that_was_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    learn(learner)
    learn(learner)
    path = tmp_path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    after = learner_in(tmp_path)
    learn(after)
    assert [record.step for record in RunLog(tmp_path).read()] == [1, 1]


def test_figures_that_are_no_numbers_do_not_make_the_log_unreadable(tmp_path: Path) -> None:
    learn(learner_in(tmp_path))
    (record,) = RunLog(tmp_path).read()
    assert record.figures == {"loss": 0.5}
