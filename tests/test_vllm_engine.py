"""vLLM as an engine, for real: `make test-vllm`. Tokens as torch draws them, patches in place."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import trio
from transformers import AutoConfig, AutoModelForCausalLM

from echo_p2p.chain.answerer import GroupBounds
from echo_p2p.chain.driver import open_chain
from echo_p2p.chain.group import AnswerSoFar, GroupRequest, SoFar
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.ring import Ring
from echo_p2p.chain.sampler import audit, draw
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.chain.vllm_engine import VllmEngine
from echo_p2p.chain.vllm_process import _SETTINGS, open_process
from echo_p2p.chain.vllm_wire import Load
from echo_p2p.errors import ChainError, ModelError
from echo_p2p.tensors import Bits, TensorUpdate
from echo_p2p.weights.codec import content_hash
from echo_protocols.peer import Stop
from echo_protocols.rollout import Sample
from echo_protocols.run import Sampling
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion, Span

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vllm is not installed here: make test-vllm runs these in an environment of its own")

LAYERS, VOCABULARY = 2, 1000  # a vocabulary that vllm pads
WHOLE = Span(start=0, end=LAYERS, layers=LAYERS)
V0, V1, V2 = (PolicyVersion(epoch=0, step=step) for step in range(3))
FAMILIES = {"llama-tied": ("llama", True), "qwen2": ("qwen2", False), "qwen3-tied": ("qwen3", True)}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp(request.param), *FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("llama"), "llama", True)


def model(folder: Path, family: str, tied: bool) -> Path:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # a fresh model is nearly uniform, and its biases are 0: no test of anything
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def request(number: int = 0, *, samples: int = 4, length: int = 24, **sampling: float) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple((31 * i + 17 * number) % VOCABULARY for i in range(4 + 5 * number)),
        samples=samples,
        sampling=Sampling(max_new_tokens=length, **sampling),  # type: ignore[arg-type]
        stop_tokens=frozenset(range(0, VOCABULARY, 20)),
    )


REQUESTS = [
    request(0),
    request(1, temperature=0.7),
    request(2, top_k=12),
    request(3, top_p=0.6, temperature=1.3),
    request(4),
]


class Table:
    """Releases from a table of updates."""

    def __init__(self, updates: dict[PolicyVersion, dict[str, TensorUpdate]]) -> None:
        self._updates = {V0: {}} | updates

    async def prepare(self, version: PolicyVersion) -> None:
        """They are here."""

    def switch(self, version, stage) -> None:  # type: ignore[no-untyped-def]
        stage.apply(self._updates[version])


@asynccontextmanager
async def engine(folder: Path, table: Table | None = None, rows: int = 16) -> AsyncIterator[VllmEngine]:
    load = Load(model=str(folder), device="cpu", rows=rows, positions=256, kv_bytes=64 << 20, memory_share=0.5)
    with trio.fail_after(240):
        async with open_process(load) as process:
            answerer = VllmEngine(process, table or Table({}), GroupBounds(samples=rows, positions=256))
            await answerer.begin(V0)
            yield answerer


async def by_torch(folder: Path, requests: list[GroupRequest]) -> list[tuple[Sample, ...]]:
    stage = load_stage(folder, WHOLE, device="cpu")
    host = StageHost("A" * 44, stage, Table({}), V0)  # type: ignore[arg-type]
    async with open_chain(Ring((Stop(peer="A" * 44, span=WHOLE),), bytes(32), lanes=2, rows=8), host) as driver:
        return await all_of(driver, requests)


async def all_of(answerer, requests: list[GroupRequest]) -> list[tuple[Sample, ...]]:  # type: ignore[no-untyped-def]
    answers: dict[int, tuple[Sample, ...]] = {}

    async def ask(number: int) -> None:
        answers[number] = await answerer.generate(requests[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(requests)):
            nursery.start_soon(ask, number)
    return [answers[number] for number in range(len(requests))]


def changes(tensors: dict[str, Bits], share: float) -> dict[str, TensorUpdate]:
    """New values for a share of every tensor; for all of it with 1."""
    draws, updates = np.random.default_rng(1), {}
    for name, bits in tensors.items():
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        values = values + 0.3 * draws.standard_normal(values.shape, np.float32)
        new: Bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        index = np.unique(draws.integers(0, bits.size, max(1, int(bits.size * share))))
        updates[name] = TensorUpdate(None, new) if share == 1 else TensorUpdate(index, new.reshape(-1)[index])
    return updates


def test_tokens_are_those_of_a_torch_chain_and_log_probabilities_those_of_transformers(folder: Path) -> None:
    async def main() -> None:
        async with engine(folder) as answerer:
            assert answerer.engine == "vllm-0.32.0-cpu-float32"
            answers = await all_of(answerer, REQUESTS)
        expected = await by_torch(folder, REQUESTS)
        pairs = [pair for groups in zip(answers, expected, strict=True) for pair in zip(*groups, strict=True)]
        same = [(a, b) for a, b in pairs if a.tokens == b.tokens]
        assert len(same) >= len(pairs) - 1  # a uniform may lie on an edge between two tokens
        apart = [abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)]
        assert max(apart) < 1e-3
        assert {sample.finish for group in answers for sample in group} == {"stop", "length"}
        reference, gaps, refused = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [], 0
        for asked, group in zip(REQUESTS, answers, strict=True):
            for number, sample in enumerate(group):
                with torch.inference_mode():
                    outputs = reference(torch.tensor([[*asked.prompt, *sample.tokens]]))
                logits = outputs.logits[0, len(asked.prompt) - 1 :].numpy()  # (tokens + 1, vocabulary)
                for position, token in enumerate(sample.tokens):
                    chance = uniform(asked.run_seed, asked.group_id, number, position)
                    refused += not audit(logits[position], token, chance, asked.sampling, 1e-4)
                    if asked.sampling == Sampling(max_new_tokens=24):
                        wide = logits[position].astype(np.float64)
                        gaps.append(abs(wide[token] - np.logaddexp.reduce(wide) - sample.logprobs[position]))
        assert refused <= 1  # two tokens may tie at the edge of a truncation
        assert np.mean(gaps) < 1e-4
        assert max(gaps) < 1e-3

    trio.run(main)


def test_draws_are_those_of_the_reference_whatever_samplings_are_in_a_batch() -> None:
    from echo_p2p.chain.vllm_sampler import Chance, PublicSampler

    draws = np.random.default_rng(0)
    for trial in range(200):
        rows, vocabulary = int(draws.integers(1, 9)), int(draws.integers(2, 2000))
        logits = (draws.standard_normal((rows, vocabulary)) * draws.uniform(0.1, 6)).astype(np.float32)
        logits = np.round(logits, 1) if trial % 3 == 0 else logits  # with ties
        samplings = [
            Sampling(
                temperature=float(draws.uniform(0.3, 2)),
                top_k=int(draws.choice([0, 1, 5, vocabulary, vocabulary + 3])),
                top_p=float(draws.choice([1.0, 0.9, 0.5, 0.01])),
            )
            for _ in range(rows)
        ]
        uniforms = [*draws.random(rows - 1), 1.0 - 2.0**-53]
        chances = [Chance(chance, sampling) for chance, sampling in zip(uniforms, samplings, strict=True)]
        tokens, logprobs = PublicSampler(lambda _: []).draw(torch.from_numpy(logits), chances)
        for row, (chance, sampling) in enumerate(chances):
            (token,), (logprob,) = draw(logits[row : row + 1], np.array([chance]), sampling)
            assert token == tokens[row]
            assert logprob == pytest.approx(float(logprobs[row]), abs=1e-6)
    with pytest.raises(ChainError, match="NaN"):
        PublicSampler(lambda _: []).draw(torch.tensor([[0.0, torch.nan]]), chances[:1])


@pytest.mark.parametrize("fault", ["draws the likeliest", "draws by its own chance", "says raw log-probabilities"])
def test_a_sampler_that_is_not_ours_is_refused_at_the_start(llama: Path, fault: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FAULTY, str(llama), fault], capture_output=True, text=True, timeout=240,
        env=os.environ | _SETTINGS | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    words = "log-probabilities are" if fault.startswith("says") else "does not draw by public uniforms"
    assert words in result.stdout
    assert "choose --engine torch" in result.stdout


FAULTY = """
import sys
import torch
from echo_p2p.chain.vllm_core import load_core
from echo_p2p.chain.vllm_sampler import PublicSampler
from echo_p2p.chain.vllm_wire import Load
from echo_p2p.errors import ModelError

class Faulty(PublicSampler):
    def draw(self, logits, chances):
        tokens, logprobs = super().draw(logits, chances)
        if "likeliest" in sys.argv[2]:
            return logits.argmax(1), logprobs
        if "own chance" in sys.argv[2]:
            return torch.multinomial(logits.softmax(1), 1)[:, 0], logprobs
        return tokens, logprobs - 0.01

load = Load(model=sys.argv[1], device="cpu", rows=8, positions=256, kv_bytes=64 << 20, memory_share=0.5)
try:
    load_core(load, Faulty)
except ModelError as error:
    sys.stdout.write(str(error))
"""


def test_a_model_that_vllm_keeps_otherwise_is_refused_with_the_cure(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ModelError, match="choose --engine torch"):
            async with engine(model(tmp_path, "mixtral", False)):
                raise AssertionError("experts lie in stacks, which we do not know to patch")

    trio.run(main)


def test_patched_in_place_it_is_the_engine_that_the_new_weights_would_have_loaded(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        stage = load_stage(folder, WHOLE, device="cpu")
        sparse = changes(dict(stage.tensors()), 0.01)
        stage.apply(sparse)
        dense = changes(dict(stage.tensors()), 1)
        hashes = [content_hash(dict(stage.tensors()))]
        stage.apply(dense)
        hashes.append(content_hash(dict(stage.tensors())))
        table = Table({V1: sparse, V2: dense})
        async with engine(folder, table) as answerer:
            before = await answerer.generate(REQUESTS[0])
            for version, promised in zip((V1, V2), hashes, strict=True):
                await answerer.switch(version, 30.0)
                process = answerer._process
                assert content_hash(dict(await trio.to_thread.run_sync(process.tensors))) == promised
            after = await all_of(answerer, REQUESTS)
            assert after[0] != before  # nor is a prompt's cache of old weights taken up
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(torch.from_numpy(stage.tensors()[name].view(np.int16)).view(torch.bfloat16))
        reference.save_pretrained(tmp_path)
        async with engine(tmp_path) as answerer:
            fresh = await all_of(answerer, REQUESTS)
        for ours, theirs in zip(after, fresh, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.tokens == b.tokens
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)  # sums are in another order in other batches

    trio.run(main)


def test_a_switch_in_mid_answer_is_between_two_tokens_and_the_kv_stays(llama: Path) -> None:
    async def main() -> None:
        patch = changes(dict(load_stage(llama, WHOLE, device="cpu").tensors()), 0.2)
        asked = replace(request(1, samples=8, length=200), stop_tokens=frozenset())
        begun = trio.Event()

        def on_token(sample: int, token: int, version: PolicyVersion) -> None:
            begun.set()

        async with engine(llama, Table({V1: patch})) as answerer:
            answers: list[tuple[Sample, ...]] = []

            async def ask() -> None:
                answers.append(await answerer.generate(asked, on_token))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await begun.wait()
                await answerer.switch(V1, 30.0)
        for number, sample in enumerate(answers[0]):
            assert [segment.version for segment in sample.segments] == [V0, V1]
            check_replay(llama, patch, asked, number, sample)

    trio.run(main)


def check_replay(
    folder: Path, patch: dict[str, TensorUpdate], asked: GroupRequest, number: int, sample: Sample
) -> None:
    """Old weights up to the boundary, then new ones on the KV that the old ones have left."""
    stage, row = load_stage(folder, WHOLE, device="cpu"), np.zeros(1, np.int32)
    inputs, position, worst = list(asked.prompt), 0, 0.0
    for at, token in enumerate(sample.tokens):
        if at == sample.segments[1].start:
            stage.apply(patch)
        logits = stage.forward(0, row, np.array([position], np.int32), np.array([inputs], np.int32))[0]
        position, inputs = position + len(inputs), [token]
        assert audit(logits, token, uniform(asked.run_seed, asked.group_id, number, at), asked.sampling, 1e-4)
        wide = logits.astype(np.float64)
        worst = max(worst, abs(wide[token] - np.logaddexp.reduce(wide) - sample.logprobs[at]))
    assert worst < 1e-3


def test_a_group_that_is_given_up_leaves_its_room_to_others(llama: Path) -> None:
    async def main() -> None:
        async with engine(llama, rows=4) as answerer:
            long = replace(request(1, samples=4, length=200), stop_tokens=frozenset())
            begun = trio.Event()
            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(answerer.generate, long, lambda *_: begun.set())
                    await begun.wait()
                    nursery.cancel_scope.cancel()
            assert answerer.statistics.lanes == 0
            (alone,) = await all_of(answerer, [request(2)])
        assert [sample.tokens for sample in alone] == [
            sample.tokens for sample in (await by_torch(llama, [request(2)]))[0]
        ]

    trio.run(main)


def test_a_group_that_was_begun_elsewhere_goes_on_as_if_nothing_had_happened(llama: Path) -> None:
    async def main() -> None:
        async with engine(llama) as answerer:
            whole = await answerer.generate(REQUESTS[3])
            begun = tuple(AnswerSoFar(each.tokens, each.logprobs, each.segments).cut(5) for each in whole)
            again = await answerer.generate(REQUESTS[3], None, SoFar(begun))
        for a, b in zip(whole, again, strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)

    trio.run(main)


def test_a_process_that_is_killed_fails_the_engine_and_all_who_wait(llama: Path) -> None:
    async def main() -> None:
        async with engine(llama) as answerer:
            long = replace(request(1, samples=4, length=200), stop_tokens=frozenset())
            failures = []

            async def ask() -> None:
                with pytest.raises(ChainError, match="its process has ended") as caught:
                    await answerer.generate(long)
                failures.append(caught.value)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
                (child,) = psutil.Process().children()
                os.kill(child.pid, signal.SIGKILL)
                await answerer.failed.wait()
            assert len(failures) == 3

    trio.run(main)
