"""The golden vectors: these values have these bytes, and these bytes have these values."""

import json
import re
import runpy
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo_p2p import identity
from echo_protocols import envelope, hop, keys, peer, release, rollout, run, sync, values
from echo_protocols.envelope import Border, Opened, Refusal, Sealer, reopen
from echo_protocols.release import policy_hash
from echo_protocols.rollout import group_fault
from echo_protocols.run import RunManifest
from echo_protocols.sync import PullReply
from echo_protocols.uniform import group_id, prompt_index, uniform
from echo_protocols.values import canonical, encode

FOLDER = Path(__file__).parent.parent / "protocols" / "vectors"
WIRE = (values, envelope, peer, run, rollout, release, sync, hop)
MAKE = runpy.run_path(str(FOLDER / "make.py"))
KINDS = {kind.name: kind for kind in vars(envelope).values() if isinstance(kind, envelope.Kind)}


def load(name: str):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def manifest() -> RunManifest:
    return msgspec.msgpack.decode(bytes.fromhex(load("run")["encoded"]), type=RunManifest)


def test_the_files_are_what_the_command_writes():
    assert MAKE["texts"]() == {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}


@pytest.mark.parametrize("vector", load("keys"), ids=lambda vector: vector["peer_id"][-6:])
def test_keys(vector):
    ours = identity.from_seed(bytes.fromhex(vector["seed"]))
    public, signature, data = (bytes.fromhex(vector[name]) for name in ("public_key", "signature", "data"))
    assert (ours.public_key, ours.peer_id, ours.sign(data)) == (public, vector["peer_id"], signature)
    assert keys.public_key(vector["peer_id"]) == public
    assert keys.verify(public, signature, data)


def test_run():
    vector, run = load("run"), manifest()
    assert MAKE["plain"](run) == vector["manifest"]
    assert canonical(run).hex() == vector["encoded"]
    assert run.run_id().hex() == vector["run_id"]
    assert run.randomness().hex() == vector["randomness"]
    assert canonical(run.sampling).hex() == vector["sampling_encoded"]
    assert run.sampling.hash().hex() == vector["sampling_hash"]


def test_a_run_that_gives_the_files_of_its_model():
    vector = load("run")["with_files"]
    run = msgspec.msgpack.decode(bytes.fromhex(vector["encoded"]), type=RunManifest)
    assert MAKE["plain"](run) == vector["manifest"]
    assert canonical(run).hex() == vector["encoded"]
    assert run.run_id().hex() == vector["run_id"]


def test_uniform():
    vector = load("uniform")
    seed = bytes.fromhex(vector["randomness"])
    for group in vector["groups"]:
        place = tuple(group["place"])
        assert group_id(seed, place).hex() == group["group_id"]
        assert prompt_index(seed, place, vector["prompts"]) == group["prompt_index"]
    for draw in vector["uniforms"]:
        u = uniform(seed, bytes.fromhex(vector["group_id"]), draw["sample"], draw["position"])
        assert u == float.fromhex(draw["u"])


def test_every_kind_of_envelope_has_a_vector():
    assert {vector["kind"] for vector in load("envelopes")} == set(KINDS)


@pytest.mark.parametrize("vector", load("envelopes"), ids=lambda vector: vector["kind"])
def test_envelopes(vector):
    kind, run_id, sealed = KINDS[vector["kind"]], bytes.fromhex(vector["run_id"]), bytes.fromhex(vector["sealed"])
    signer = load("keys")[0]
    opened = Border().open(sealed, kind, run_id, vector["issued_at"], once=True)
    assert isinstance(opened, Opened)
    assert opened == reopen(sealed, kind)
    assert (opened.signer, opened.sequence) == (signer["peer_id"], vector["sequence"])
    assert opened.issued_at == vector["issued_at"]
    assert MAKE["plain"](opened.payload) == vector["value"]
    assert encode(opened.payload).hex() == vector["payload"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(signer["seed"]))
    again = Sealer(bytes.fromhex(signer["public_key"]), key.sign, vector["sequence"] - 1)
    assert again.seal(kind, run_id, opened.payload, vector["issued_at"]) == sealed


def test_rollouts_belong_to_the_run():
    run, worker = manifest(), load("keys")[0]["peer_id"]
    asynchronous, sequential = [
        reopen(bytes.fromhex(vector["sealed"]), envelope.ROLLOUT).payload
        for vector in load("envelopes")
        if vector["kind"] == "rollout"
    ]
    assert group_fault(asynchronous, worker, run) is None
    assert group_fault(sequential, worker, msgspec.structs.replace(run, protocol="sequential")) is None


@pytest.mark.parametrize("case", load("refused")["cases"], ids=lambda case: case["case"])
def test_refused(case):
    opened = Border().open(bytes.fromhex(case["data"]), envelope.ROLE, envelope.NO_RUN, load("refused")["now"])
    assert isinstance(opened, Refusal)
    assert opened.reason == case["reason"]


@pytest.mark.parametrize("vector", load("pull"), ids=lambda vector: vector["value"]["failure"] or "group")
def test_pull(vector):
    reply = msgspec.msgpack.decode(bytes.fromhex(vector["encoded"]), type=PullReply)
    assert MAKE["plain"](reply) == vector["value"]
    assert encode(reply).hex() == vector["encoded"]


def test_policy():
    vector = load("policy")
    assert (
        policy_hash({part: bytes.fromhex(result) for part, result in vector["results"].items()}).hex()
        == (vector["policy_hash"])
    )


def test_every_kind_of_frame_has_a_vector():
    assert {vector["kind"] for vector in load("hop")} == {kind.__name__ for kind in hop._KINDS}


@pytest.mark.parametrize("vector", load("hop"), ids=lambda vector: vector["kind"])
def test_hop(vector):
    chain, frame = hop.decode(bytes.fromhex(vector["encoded"]))
    assert chain.hex() == vector["chain"]
    assert type(frame).__name__ == vector["kind"]
    assert MAKE["plain"](frame) == vector["value"]
    assert b"".join(hop.encode(chain, frame)).hex() == vector["encoded"]


def test_the_specification_names_every_kind_field_and_reason():
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`([^`\n]+)`", text))
    structs = {each for module in WIRE for each in vars(module).values() if isinstance(each, type)}
    structs = {each for each in structs if issubclass(each, msgspec.Struct) and not each.__name__.startswith("_")}
    fields = {name for each in structs - {hop.Forward, hop.Tokens} for name in each.__struct_fields__}
    assert fields - said == set()
    assert set(KINDS) - said == set()
    for kind in KINDS.values():
        size = f"{kind.max_bytes >> 10} KiB" if kind.max_bytes < 1 << 20 else f"{kind.max_bytes >> 20} MiB"
        assert re.search(rf"\| `{kind.name}` \|[^|]*\| {size} \|", text), kind.name
    for number, kind in ((number, kind.__name__) for kind, number in hop._KINDS.items()):
        assert f"| {number} {kind} |" in text
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (envelope, rollout, sync))
    reasons = set(re.findall(r'(?:return|else|Refusal\() ?"([a-z]+(?:-[a-z]+)*)"', source))
    assert len(reasons) > 20
    assert reasons - {"known-version"} - said == set()
