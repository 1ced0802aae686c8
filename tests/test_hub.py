"""Models from the hub: a small server speaks its routes, and processes of our own fetch from it."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_p2p.models import resolve_model

_ROOT = Path(__file__).parents[1]
_COMMIT = "c0ffee" + 34 * "0"
_LARGE_BYTES = 24 * 2**20


class Hub(ThreadingHTTPServer):
    """Serves a folder as one model, at one commit. `cut` ends the next transfer of a file after so many bytes."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[tuple[str, str, str]] = []  # method, file, Range
        self.cut: dict[str, int] = {}
        self.silent = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> dict[str, list[str]]:
        """The ranges that were asked for, by file."""
        found: dict[str, list[str]] = {}
        for method, file, wanted in self.asked:
            if method == "GET" and not file.startswith("/"):  # what the client asks for on its own account aside
                found.setdefault(file, []).append(wanted)
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        found = re.fullmatch(r"/echo/model/resolve/([^/]+)/([^/?]+)", self.path)
        name = found[2] if found else ""
        self.server.asked.append((self.command, name or self.path, self.headers.get("Range", "")))
        if self.server.silent:
            self.close_connection = True
            return
        path = self.server.folder / name
        if not found or found[1] not in ("main", _COMMIT) or not path.is_file():
            self.send_response(404)
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        part = content[start : int(wanted[2]) + 1 if wanted and wanted[2] else len(content)]
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", _COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if not with_body:
            return
        cut = self.server.cut.pop(name, None)
        self.wfile.write(part[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def hub_of(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def environment(url: str, cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": url, "HF_HOME": str(cache), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}


def run(program: str, url: str, cache: Path) -> list[str]:
    """The lines that a program prints which has `models` and `hub`."""
    head = (
        "from pathlib import Path; import echo_p2p.models as models; from echo_p2p.models import hub\n"
        "from echo_p2p.errors import ModelError\n"
        "quiet = lambda done, total: None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + program], cwd=_ROOT, env=environment(url, cache),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_model(folder, "20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((resolve_model("tiny") / name).read_bytes())
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def save_model(folder: Path, shards: str, vocabulary: int = 100) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size=shards)


def test_what_a_plan_needs_is_fetched_without_any_weights(sharded: Path, tmp_path: Path) -> None:
    with hub_of(sharded) as hub:
        (folder,) = run("print(models.model_folder('echo/model'))", hub.url, tmp_path)
        fetched = set(hub.fetched())
    assert fetched == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert fetched == {path.name for path in Path(folder).iterdir()}


def test_only_the_shards_of_a_span_are_fetched(sharded: Path, tmp_path: Path) -> None:
    named = json.loads((sharded / "model.safetensors.index.json").read_bytes())["weight_map"]
    wanted = [name for name in named if ".layers.1." in name]
    program = f"print(models.fetch_weights(hub.find_snapshot('echo/model', None), {wanted}, quiet))"
    with hub_of(sharded) as hub:
        (folder,) = run(program, hub.url, tmp_path)
        shards = {name for name in hub.fetched() if name.endswith(".safetensors")}
    assert shards == {named[name] for name in wanted}
    assert shards < set(named.values())
    for shard in shards:
        with safe_open(Path(folder) / shard, "pt") as ours, safe_open(sharded / shard, "pt") as theirs:
            assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in ours.keys())  # noqa: SIM118


def test_a_revision_is_resolved_once_and_what_is_here_is_not_asked_for_again(sharded: Path, tmp_path: Path) -> None:
    program = (
        "before = models.resolve_model('echo/model')\n"
        "assert models.resolve_model('echo/model') == models.model_folder('echo/model') == before\n"
        "print(before.name, models.stop_tokens('echo/model'), models.tokenizer_hash('echo/model'))"
    )
    with hub_of(sharded) as hub:
        (line,) = run(program, hub.url, tmp_path)
        assert all(len(ranges) == 1 for ranges in hub.fetched().values())
        absent = [file for method, file, _ in hub.asked if method == "HEAD" and file == "merges.txt"]
        assert len(absent) == 2  # whether anybody answers, and that it is noted; then never again
    assert line.startswith(_COMMIT)
    (offline,) = run(program, "http://127.0.0.1:9", tmp_path)  # nobody listens there
    assert offline == line


def test_the_shapes_of_a_single_file_are_read_from_its_header_alone(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "5GB", vocabulary=1000)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    program = (
        "shapes = hub.remote_shapes(hub.find_snapshot('echo/model', None), 'model.safetensors')\n"
        "print(shapes['model.embed_tokens.weight'], len(shapes))"
    )
    with hub_of(tmp_path / "model") as hub:
        assert run(program, hub.url, tmp_path / "cache") == ["(1000, 32) 47"]
        assert hub.fetched()["model.safetensors"] == ["bytes=0-100000"]
    assert size > 100_000


def large(folder: Path) -> bytes:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    content = bytes(torch.randint(0, 256, (_LARGE_BYTES,), dtype=torch.uint8).numpy())
    (folder / "model.safetensors").write_bytes(content)
    return content


FETCH_LARGE = "path = hub.fetch_large(hub.find_snapshot('echo/model', None), ['model.safetensors'], report)\n"


def test_a_connection_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    content = large(tmp_path / "model")
    program = (
        "seen = []\n"
        "report = lambda done, total: seen.append((done, total))\n"
        + FETCH_LARGE
        + "print(seen == sorted(seen), seen[-1])"
    )
    with hub_of(tmp_path / "model") as hub:
        hub.cut["model.safetensors"] = 10 * 2**20
        assert run(program, hub.url, tmp_path / "cache") == [f"True ({_LARGE_BYTES}, {_LARGE_BYTES})"]
        first, second = hub.fetched()["model.safetensors"]
    assert first == ""
    assert 9 * 2**20 <= int(second.removeprefix("bytes=").removesuffix("-")) <= 10 * 2**20
    check_fetched(tmp_path / "cache", content)


def test_a_download_that_was_killed_goes_on_after_a_restart(tmp_path: Path) -> None:
    content = large(tmp_path / "model")
    killed = (
        "import os, signal\n"
        "def report(done, total):\n"
        f"    if done > {_LARGE_BYTES // 2}: os.kill(os.getpid(), signal.SIGKILL)\n" + FETCH_LARGE
    )
    with hub_of(tmp_path / "model") as hub:
        with pytest.raises(AssertionError):
            run(killed, hub.url, tmp_path / "cache")
        assert run("report = quiet\n" + FETCH_LARGE, hub.url, tmp_path / "cache") == []
        _, second = hub.fetched()["model.safetensors"]
    assert int(second.removeprefix("bytes=").removesuffix("-")) >= _LARGE_BYTES // 2 - 2 * 2**20
    check_fetched(tmp_path / "cache", content)


def test_what_comes_damaged_is_said_and_fetched_anew(tmp_path: Path) -> None:
    content = large(tmp_path / "model")
    with hub_of(tmp_path / "model") as hub:
        cache = tmp_path / "cache"
        part = cache / "hub" / "models--echo--model" / "blobs" / f"{hashlib.sha256(content).hexdigest()}.echo-part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"not the beginning")
        program = f"report = quiet\ntry:\n    {FETCH_LARGE}except ModelError as error: print(error)"
        (line,) = run(program, hub.url, cache)
        assert "came damaged" in line
        assert run(program, hub.url, cache) == []
    check_fetched(cache, content)


def check_fetched(cache: Path, content: bytes) -> None:
    folder = cache / "hub" / "models--echo--model"
    assert (folder / "snapshots" / _COMMIT / "model.safetensors").read_bytes() == content
    assert not list(folder.glob("blobs/*.echo-part"))


def test_a_hub_that_does_not_answer_is_asked_once_and_said_in_a_line(tmp_path: Path) -> None:
    program = "try: models.resolve_model('echo/model')\nexcept ModelError as error: print(error)\n"
    with hub_of(tmp_path) as hub:
        hub.silent = True
        (line,) = run(program, hub.url, tmp_path / "cache")
        assert [method for method, file, _ in hub.asked if file == "config.json"] == ["HEAD"]
    assert "not in the cache and the hub can't be reached" in line
    assert "name a local folder" in line


def test_a_name_that_the_hub_does_not_know_is_the_users_mistake(sharded: Path, tmp_path: Path) -> None:
    program = (
        "from echo_p2p.errors import ConfigError\n"
        "for name in ('echo/absent', 'echo/model@nosuch', 'echo/mo--del'):\n"
        "    try: models.resolve_model(name)\n"
        "    except ConfigError as error: print(error)\n"
    )
    with hub_of(sharded) as hub:
        lines = run(program, hub.url, tmp_path)
    assert len(lines) == 3
    assert all("check the id" in line for line in lines)


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    index = {"weight_map": {"model.embed_tokens.weight": "../../../secret.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    program = "try: models.resolve_model('echo/model')\nexcept ModelError as error: print(error)"
    with hub_of(tmp_path / "model") as hub:
        (line,) = run(program, hub.url, tmp_path / "cache")
        assert not any("secret" in file for _, file, _ in hub.asked)
    assert "no safetensors file beside it" in line


def test_a_volunteer_takes_the_shards_of_its_span_from_the_hub_while_it_is_the_runs_model(
    sharded: Path, tmp_path: Path
) -> None:
    program = f"""
import msgspec
from echo_node.run_model import RunModel, contents_nearby, look_nearby
from echo_node.trainer import make_manifest
from echo_p2p.chain.torch_stage import load_stage
from echo_p2p.config import NodeConfig, RunConfig
from echo_protocols.values import Span

ours = make_manifest(NodeConfig(run=RunConfig(model={str(sharded)!r})), "1" * 52)
manifest = msgspec.structs.replace(ours, model="echo/model")
nearby, held = look_nearby(manifest, ""), Path({str(tmp_path / "held")!r})
contents = contents_nearby(manifest, nearby, held)
print(*sorted({{file.name for file in manifest.model_files}} - contents.keys()))
from echo_p2p.models.files import small_files
from echo_p2p.models.layout import tensor_shapes
contents = small_files(Path({str(sharded)!r}), tensor_shapes(Path({str(sharded)!r})))
model, span = RunModel(manifest, nearby, held, contents), Span(start=1, end=2, layers=4)
print(model.bring_weights(span, quiet))
print(len(load_stage(model.folder, span, device="cpu").tensors()))
other = RunModel(manifest, nearby, held, contents | {{"config.json": contents["config.json"] + b" "}})
print(other.bring_weights(span, quiet))
"""
    named = json.loads((sharded / "model.safetensors.index.json").read_bytes())["weight_map"]
    with hub_of(sharded) as hub:
        assert run(program, hub.url, tmp_path) == ["echo_tensors.json", "hub", "11", "peers"]
        shards = {name for name in hub.fetched() if name.endswith(".safetensors")}
    assert shards == {file for name, file in named.items() if ".layers.1." in name}


def test_a_file_that_is_far_larger_than_its_tensors_is_not_fetched(sharded: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (evil / name).write_bytes((sharded / name).read_bytes())
    with (evil / "model.safetensors").open("wb") as file:
        file.truncate(200_000_000)  # of nothing: it takes no disk
    program = f"""
import msgspec
from echo_node.run_model import RunModel, look_nearby
from echo_node.trainer import make_manifest
from echo_p2p.config import NodeConfig, RunConfig
from echo_p2p.models.files import small_files
from echo_p2p.models.layout import tensor_shapes
from echo_protocols.values import Span

source = Path({str(sharded)!r})
ours = make_manifest(NodeConfig(run=RunConfig(model=str(source))), "1" * 52)
manifest = msgspec.structs.replace(ours, model="echo/model")
contents, held = small_files(source, tensor_shapes(source)), Path({str(tmp_path / "held")!r})
model = RunModel(manifest, look_nearby(manifest, ""), held, contents)
print(model.bring_weights(Span(start=0, end=4, layers=4), quiet))
"""
    with hub_of(evil) as hub:
        assert run(program, hub.url, tmp_path) == ["peers"]
        assert "model.safetensors" not in hub.fetched()
