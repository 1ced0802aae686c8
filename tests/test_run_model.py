"""A run's model on a machine that may have none of it: small files by hash, weights from where they are."""

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch
import trio
from msgspec import UNSET
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_node.inference import _join_first, measure_capacity
from echo_node.model_files import open_model
from echo_node.places import Places
from echo_node.prompts import load_prompts
from echo_node.run_model import Nearby, RunModel, contents_nearby, look_nearby
from echo_node.trainer import keep_model_files, make_manifest
from echo_p2p.chain.shape import model_shape
from echo_p2p.chain.torch_stage import TorchStage, load_stage
from echo_p2p.config import InferenceConfig, NodeConfig, RunConfig
from echo_p2p.errors import ConfigError, ModelError, NetError
from echo_p2p.models import load_tokenizer, model_folder
from echo_p2p.models.files import check_contents, small_files
from echo_p2p.models.hub import Snapshot
from echo_p2p.models.layout import INDEX, LAYOUT, tensor_shapes
from echo_p2p.models.naming import run_name
from echo_p2p.net.blobs import serve_blobs
from echo_p2p.net.memory import MemoryNetwork
from echo_p2p.swarm import Member, Run
from echo_p2p.tensors import by_part
from echo_p2p.weights.codec import content_hash
from echo_p2p.weights.fetch import Replica
from echo_p2p.weights.publish import Publisher
from echo_p2p.weights.store import Store
from echo_protocols.peer import RoleRecord
from echo_protocols.release import Chunk, Release
from echo_protocols.run import RunManifest
from echo_protocols.values import PolicyVersion, Span, encode

TRAINER, OTHER, OURS = "1" * 52, "2" * 52, "3" * 52
LOW = Span(start=0, end=2, layers=4)


def quiet(done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trainer's model, in shards."""
    folder = tmp_path_factory.mktemp("trainer") / "model"
    tokenizer = load_tokenizer("tiny")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("tiny") / name, folder / name)
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


@pytest.fixture(scope="module")
def run(path: Path) -> Run:
    manifest = make_manifest(NodeConfig(run=RunConfig(model=str(path))), TRAINER)
    return Run(manifest, manifest.run_id(), TRAINER, 0.0, path)


def contents_of(path: Path) -> dict[str, bytes]:
    return small_files(path, tensor_shapes(path))


class Crowd:
    """The trainer and another peer, who serve blobs, and a newcomer's view of them."""

    def __init__(self, network: MemoryNetwork, run: Run) -> None:
        self.streams = network.node(OURS)
        self.peer = OURS
        record = RoleRecord(role="inference", software="test", run_id=run.run_id)
        self.members = {OTHER: Member(OTHER, record, 0.0)}


@asynccontextmanager
async def crowd(run: Run, lookups: dict[str, Callable[[bytes], bytes | None]]) -> AsyncIterator[Crowd]:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        for peer, lookup in lookups.items():
            await nursery.start(lambda task_status, p=peer, f=lookup: serve(network, p, f, task_status))  # type: ignore[misc]
        yield Crowd(network, run)
        nursery.cancel_scope.cancel()


async def serve(
    network: MemoryNetwork, peer: str, lookup: Callable[[bytes], bytes | None], task_status: trio.TaskStatus[None]
) -> None:
    await serve_blobs(network.node(peer), lookup, in_thread=False, task_status=task_status)


async def opened(run: Run, by: Crowd, home: Path) -> RunModel:
    store = Store(home / "blobs", 1 << 30)
    return await open_model(run, by, by.streams, home / "model", store, "")  # type: ignore[arg-type]


def trainers_store(run: Run, folder: Path) -> Store:
    store = Store(folder, 1 << 30)
    assert run.model is not None
    keep_model_files(store, run.model)
    return store


def test_whoever_has_nothing_gets_the_files_from_peers_and_may_pass_them_on(
    run: Run, path: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        store = trainers_store(run, tmp_path / "trainer")
        async with crowd(run, {TRAINER: store.get}) as by:  # the other peer doesn't answer
            model = await opened(run, by, tmp_path / "ours")
        assert {file.name: file.read_bytes() for file in model.folder.iterdir()} == contents_of(path)
        assert model_shape(model.folder) == model_shape(path)
        assert load_prompts(run.manifest, model.folder).ids(0) == load_prompts(run.manifest, path).ids(0)
        ours = Store(tmp_path / "ours" / "blobs", 1 << 30)
        async with crowd(run, {OTHER: ours.get}) as by:
            await opened(run, by, tmp_path / "theirs")

    trio.run(main)


def test_a_run_that_nobody_could_serve_ends_no_peer_that_waits_for_another(run: Run, tmp_path: Path) -> None:
    """Anybody may publish one."""
    hopeless = Run(msgspec.structs.replace(run.manifest, model="/nowhere", model_files=UNSET), bytes(32), OTHER, 1.0)

    async def main() -> None:
        async with crowd(run, {}) as by:  # the trainer can't be reached now
            presence = SimpleNamespace(swarm=by, hive=by.streams)
            board: Any = SimpleNamespace(config=NodeConfig(), presence=presence)
            places = Places(tmp_path, tmp_path)
            for runs in ([run, hopeless], [hopeless, run], [run]):
                assert await _join_first(board, places, runs) is None
            with pytest.raises(ModelError, match="/nowhere"):
                await _join_first(board, places, [hopeless, hopeless])

    trio.run(main)


def test_what_does_not_hash_to_the_manifest_is_asked_for_elsewhere(run: Run, path: Path, tmp_path: Path) -> None:
    async def main() -> None:
        store = trainers_store(run, tmp_path / "trainer")
        async with crowd(run, {OTHER: lambda hash: (store.get(hash) or b"")[::-1], TRAINER: store.get}) as by:
            model = await opened(run, by, tmp_path / "ours")
        assert {file.name: file.read_bytes() for file in model.folder.iterdir()} == contents_of(path)
        async with crowd(run, {TRAINER: lambda hash: b"other" + bytes(700)}) as by:
            with pytest.raises(NetError):
                await opened(run, by, tmp_path / "nowhere")
        assert not (tmp_path / "nowhere" / "model").exists()

    trio.run(main)


def test_after_an_interruption_only_what_is_missing_is_asked_for(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        store, asked = trainers_store(run, tmp_path / "trainer"), Counter[bytes]()
        allowed = 2

        def lookup(hash: bytes) -> bytes | None:
            if allowed and len(asked) >= allowed:
                return None
            asked[hash] += 1
            return store.get(hash)

        async with crowd(run, {TRAINER: lookup}) as by:
            with pytest.raises(NetError):
                await opened(run, by, tmp_path / "ours")
            assert len(asked) == 2
            allowed = 0
            await opened(run, by, tmp_path / "ours")
            files = run.manifest.model_files
            assert isinstance(files, tuple)
            assert asked == {file.hash: 1 for file in files}
            shutil.rmtree(tmp_path / "ours" / "blobs")  # the run's folder is enough
            await opened(run, by, tmp_path / "ours")
            assert asked.total() == len(files)

    trio.run(main)


def test_a_manifest_names_the_trainers_folder_and_its_weights_but_not_its_path(run: Run, path: Path, tmp_path) -> None:
    name = run.manifest.model
    assert re.fullmatch(r"model:[0-9a-f]{8}", name)
    assert str(path.parent).encode() not in encode(run.manifest)
    moved = shutil.copytree(path, tmp_path / "elsewhere" / "model")
    assert run_name(str(moved)) == run_name(f"{moved}/") == name
    shard = next(moved.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run_name(str(moved)) != name  # another policy: its run must not go on from this one's checkpoint
    assert run_name("tiny") == "tiny"
    assert run_name("Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B@main"
    assert run_name(str(shutil.copytree(path, tmp_path / "tiny"))) == name.replace("model", "tiny")


@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_an_engine_that_needs_the_weights_here_is_refused_at_once_with_what_would_do(
    run: Run, path: Path, tmp_path: Path, engine: Literal["mlx", "vllm"]
) -> None:
    def model(nearby: Nearby) -> RunModel:
        return RunModel(run.manifest, nearby, tmp_path / "run", contents_of(path))

    without = model(look_nearby(run.manifest, ""))
    for does in ("auto", "torch"):
        without.check_engine(does)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        without.check_engine(engine)
    said = str(refused.value)
    assert f"--engine {engine}" in said
    assert "it is a folder on its trainer's machine" in said
    assert "--set inference.model=FOLDER" in said
    assert "--engine torch" in said
    model(Nearby(path)).check_engine(engine)
    model(Nearby(snapshot=Snapshot("echo/model", "c0ffee", path))).check_engine(engine)


def test_a_stage_without_weights_is_filled_by_a_release_and_after_a_restart_from_the_store(
    run: Run, path: Path, tmp_path: Path
) -> None:
    version, theirs = PolicyVersion(epoch=0, step=0), Store(tmp_path / "theirs", 1 << 30)
    policy = load_stage(path, Span(start=0, end=4, layers=4), device="cpu").tensors()
    release = Publisher(theirs).publish(version, policy)
    model = RunModel(run.manifest, Nearby(), tmp_path / "run", contents_of(path))
    fetched: list[bytes] = []
    reports: list[tuple[int, int]] = []

    async def fetch(chunk: Chunk) -> bytes:
        fetched.append(chunk.hash)
        return theirs.get(chunk.hash) or b""

    async def lookup(hash: bytes) -> Release:
        raise AssertionError("one release is enough")

    async def filled() -> TorchStage:
        stage = load_stage(model.folder, LOW, device="cpu", weights=False)
        store = Store(tmp_path / "ours", 1 << 30)
        replica = Replica(stage.tensors(), store, report=lambda done, total: reports.append((done, total)))
        await replica.stage(release, lookup, fetch)
        replica.switch(version, stage)
        return stage

    for _ in range(2):
        held = by_part(trio.run(filled).tensors())
        assert {part: content_hash(tensors) for part, tensors in held.items()} == {
            chunk.part: chunk.result for chunk in release.snapshot if chunk.part in held
        }
        assert len(fetched) == len(held) == 3  # embed and two layers, the first time alone
    wanted = sum(chunk.size_bytes for chunk in release.snapshot if chunk.hash in fetched)
    assert reports[-1] == (wanted, wanted)
    assert reports == sorted(reports)


def test_a_path_in_a_manifest_is_never_opened(run: Run, path: Path, tmp_path: Path) -> None:
    touched: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir"):
            touched.append(str(arguments[0]))

    async def main() -> None:
        nonlocal watching
        store = trainers_store(run, tmp_path / "trainer")
        async with crowd(run, {TRAINER: store.get}) as by:
            watching = True
            model = await opened(run, by, tmp_path / "ours")
            origin = model.bring_weights(LOW, quiet)
            watching = False
        assert origin == "peers"

    watching = False
    sys.addaudithook(watch)
    trio.run(main)
    assert touched
    assert not [name for name in touched if name.startswith(str(path))]


def test_the_folder_that_a_user_names_gives_weights(run: Run, path: Path, tmp_path: Path) -> None:
    named = json.loads((path / INDEX).read_bytes())["weight_map"]
    part = tmp_path / "part"  # a copy of a part: only the shards of layers 0 and 1
    part.mkdir()
    of_span = {file for name, file in named.items() if "embed" in name or ".layers.0." in name or ".layers.1." in name}
    for name in (INDEX, "config.json", *of_span):
        shutil.copy(path / name, part / name)
    nearby = look_nearby(run.manifest, str(part))
    model = RunModel(run.manifest, nearby, tmp_path / "run", contents_of(path))
    assert model.bring_weights(LOW, quiet) == "folder"
    assert {file.name for file in model.folder.glob("*.safetensors")} == of_span
    assert model.bring_weights(Span(start=2, end=4, layers=4), quiet) == "peers"
    assert not list(model.folder.glob("*.safetensors"))
    assert not (model.folder / INDEX).exists()
    with pytest.raises(ModelError, match="no folder"):
        look_nearby(run.manifest, str(tmp_path / "absent"))


def test_weights_of_another_model_are_not_taken(run: Run, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(other)
    model = RunModel(run.manifest, Nearby(other), tmp_path / "run", contents_of(path))
    assert model.bring_weights(LOW, quiet) == "peers"


def test_files_that_are_not_the_runs_are_removed_and_links_not_followed(run: Run, path: Path, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    (folder / "config.json").symlink_to(outside)
    (folder / "chat_template.jinja").write_text("{{ evil }}")
    RunModel(run.manifest, Nearby(), folder, contents_of(path))
    assert outside.read_text() == "mine"
    assert not (folder / "config.json").is_symlink()
    assert {file.name for file in folder.iterdir()} == set(contents_of(path))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantisation"),
        ("config.json", {"attn_implementation": "evil/kernel"}, "code"),
        ("config.json", {"text_config": {"_attn_implementation": "evil/kernel"}}, "code"),
        ("config.json", {"experts_implementation": {"": "evil/kernel"}}, "code"),
        ("config.json", {"num_hidden_layers": 5}, "4 layers"),
        ("config.json", {"vocab_size": 10**400}, "vocab_size that no model has"),
        ("config.json", {"num_experts": 2**20}, "num_experts that no model has"),
        ("config.json", {"hidden_size": 0}, "hidden_size"),
        ("config.json", {"hidden_size": "64"}, "hidden_size"),
        ("tokenizer_config.json", {"vocab_file": "/dev/zero"}, "vocab_file"),
        (LAYOUT, {"model.embed_tokens.weight": [2**40, 2**40]}, "larger than any"),
        (LAYOUT, {"model.embed_tokens.weight": [-1]}, "can't be read"),
    ],
)
def test_files_that_would_do_more_than_describe_a_model_are_refused(
    run: Run, path: Path, name: str, changes: dict[str, object], words: str
) -> None:
    good, manifest = contents_of(path), run.manifest
    check_contents(good, manifest.layers, manifest.vocabulary)
    bad = good | {name: json.dumps(json.loads(good[name]) | changes).encode()}
    with pytest.raises(ModelError, match=words):
        check_contents(bad, manifest.layers, manifest.vocabulary)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 10**6, b'{"a": NaN'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", LAYOUT])
def test_what_is_no_json_is_refused(run: Run, path: Path, name: str, content: bytes) -> None:
    with pytest.raises(ModelError):
        check_contents(contents_of(path) | {name: content}, run.manifest.layers, run.manifest.vocabulary)


def test_a_tokenizer_that_is_none_is_a_model_error(run: Run, path: Path, tmp_path: Path) -> None:
    RunModel(run.manifest, Nearby(), tmp_path, contents_of(path) | {"tokenizer.json": b'{"model": 1}'})
    with pytest.raises(ModelError, match="no tokenizer that loads"):
        load_tokenizer(str(tmp_path))


def test_a_run_of_an_older_trainer_is_served_from_what_is_here(run: Run, path: Path, tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(run.manifest, model_files=msgspec.UNSET)
    nearby = look_nearby(manifest, str(path))
    model = RunModel(manifest, nearby, tmp_path, contents_nearby(manifest, nearby, tmp_path))
    assert model_shape(model.folder) == model_shape(path)
    assert model.bring_weights(LOW, quiet) == "folder"
    with pytest.raises(ModelError, match=r"inference\.model"):
        contents_nearby(manifest, look_nearby(manifest, ""), tmp_path)


def test_the_built_in_model_needs_no_peer(tmp_path: Path) -> None:
    manifest = make_manifest(NodeConfig(), TRAINER)
    nearby = look_nearby(manifest, "")
    contents = contents_nearby(manifest, nearby, tmp_path)
    model = RunModel(manifest, nearby, tmp_path, contents)
    assert model.bring_weights(LOW, quiet) == "folder"
    assert not (tmp_path / "modeling_evil.py").exists()
    assert os.path.samefile(tmp_path / "model.safetensors", model_folder("tiny") / "model.safetensors")


def test_a_machine_without_room_for_a_layer_is_told_what_would_do(run: Run, path: Path) -> None:
    config = InferenceConfig(memory_share=1e-9)
    with pytest.raises(ModelError, match=r"one layer of .* needs .* raise inference\.memory_share"):
        measure_capacity(config, run.manifest, path)
    assert measure_capacity(InferenceConfig(), run.manifest, path).max_layers == 4


def test_a_manifest_names_each_file_once_and_not_too_much(run: Run) -> None:
    def with_files(*files: list[object]) -> RunManifest:
        fields = msgspec.structs.asdict(run.manifest) | {"model_files": files}
        return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=RunManifest)

    def file(name: str, size_bytes: int = 1) -> list[object]:
        return [name, bytes(32), size_bytes]

    good = [file("config.json"), file(LAYOUT)]
    assert with_files(*good).model_files is not msgspec.UNSET
    for bad in (
        [], good[:1], good[::-1], [good[0], *good], [file("../config.json"), *good], [*good, file("modeling.py")],
        [*good, file("/etc/passwd")], [*good, file("model.safetensors")], [good[0], file(LAYOUT, -1)],
        [good[0], file(LAYOUT, 2**26 + 1)],
        [*good, file("tokenizer.json", 2**26), file("tokenizer_config.json", 2**26)],
    ):  # fmt: skip
        with pytest.raises(msgspec.DecodeError):
            with_files(*bad)
