"""Writes the golden vectors beside this file: `python protocols/vectors/make.py`. Knows no test.

Run it after a change of the wire that is meant, and review the difference like code. A second implementation is right
when it makes these bytes of these values, and these values of these bytes; bytes are given in hexadecimal.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo_protocols import envelope, hop, keys
from echo_protocols.peer import Capacity, Complaint, Plan, RoleRecord, Stop, Way
from echo_protocols.release import Chunk, Release, Skip, policy_hash
from echo_protocols.rollout import LargeRollout, RolloutGroup, Sample, Segment, Slot
from echo_protocols.run import Admission, Algorithm, ModelFile, RunManifest, Sampling, TaskSpec
from echo_protocols.sync import LatestRelease, PullReply, PullRequest
from echo_protocols.uniform import Place, group_id, prompt_index, uniform
from echo_protocols.values import PolicyVersion, Span, canonical, encode

SEED = bytes(range(32))
OTHER_SEED = bytes(range(32, 64))
ISSUED_AT = 1_750_000_000.25
FIRST_SEQUENCE = 1_750_000_000_000_000

_KEY = Ed25519PrivateKey.from_private_bytes(SEED)
_PUBLIC = _KEY.public_key().public_bytes_raw()
_OTHER_PUBLIC = Ed25519PrivateKey.from_private_bytes(OTHER_SEED).public_key().public_bytes_raw()
_PEER, _OTHER = keys.peer_id(_PUBLIC), keys.peer_id(_OTHER_PUBLIC)
_THIRD = keys.peer_id(Ed25519PrivateKey.from_private_bytes(bytes(range(64, 96))).public_key().public_bytes_raw())

_V0, _V1 = PolicyVersion(epoch=0, step=41), PolicyVersion(epoch=1, step=42)
_MANIFEST = RunManifest(
    swarm="vectors",
    model="tiny",
    tokenizer_hash=b"t" * 32,
    layers=6,
    vocabulary=64,
    stop_tokens=(2,),
    task=TaskSpec(
        name="sokoban", seed=3, settings={"size": 6, "boxes": 1, "share": 0.5, "hard": False, "look": "plain"}
    ),
    algorithm=Algorithm(clip_ratio=0.2),  # which every manifest said before a recipe could
    sampling=Sampling(temperature=0.75, top_p=0.9, top_k=40, max_new_tokens=4),
    protocol="async",
    max_lag=4,
    group_size=2,
    groups_per_step=8,
    prompts=1000,
    trainers=(_PEER,),
    admission=Admission(banned=(_OTHER,)),
    seed=7,
)
_WITH_FILES = msgspec.structs.replace(
    _MANIFEST,
    model_files=(
        ModelFile(name="config.json", hash=b"c" * 32, size_bytes=700),
        ModelFile(name="echo_tensors.json", hash=b"s" * 32, size_bytes=9000),
    ),
)
_ROUTE = (
    Stop(peer=_PEER, span=Span(start=0, end=2, layers=6)),
    Stop(peer=_OTHER, span=Span(start=2, end=6, layers=6)),
)


_STANDBY = Stop(peer=_THIRD, span=Span(start=2, end=6, layers=6))


def plain(value: object) -> object:
    """A value as JSON can say it: structs by field name, bytes in hexadecimal."""
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return {name: plain(field) for name, field in fields if field is not msgspec.UNSET}
    if isinstance(value, bytes | memoryview):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _group(slot: Slot | None) -> RolloutGroup:
    place: Place = ("slot", slot.step, slot.slot) if slot else (_PEER, 5)
    return RolloutGroup(
        counter=5,
        prompt_index=prompt_index(_MANIFEST.randomness(), place, _MANIFEST.prompts),
        slot=slot,
        samples=(
            Sample(
                tokens=(1, 40, 63, 7),
                logprobs=(-0.5, -1.25, 0.0, -7.0),
                finish="length",
                segments=(Segment(start=0, version=_V0), Segment(start=2, version=_V1)),
            ),
            Sample(tokens=(2,), logprobs=(-0.125,), finish="stop", segments=(Segment(start=0, version=_V1),)),
        ),
        sampling_hash=_MANIFEST.sampling.hash(),
        engine="torch-float32[0:2/6]+torch-float32[2:6/6]",
    )


def _release() -> Release:
    patch = Chunk(part="layer.0", hash=b"p" * 32, size_bytes=1234, base=b"b" * 32, result=b"r" * 32)
    whole = Chunk(part="layer.0", hash=b"w" * 32, size_bytes=99_999, base=None, result=b"r" * 32)
    skipped = Chunk(part="layer.0", hash=b"s" * 32, size_bytes=2345, base=b"a" * 32, result=b"r" * 32)
    skip = Skip(base=PolicyVersion(epoch=1, step=39), base_release=b"o" * 32, chunks=(skipped,))
    return Release(
        version=PolicyVersion(epoch=1, step=43),
        parent=_V1,
        parent_release=b"q" * 32,
        snapshot_release=None,
        policy_hash=policy_hash({"layer.0": b"r" * 32}),
        patch=(patch,),
        skips=(skip,),
        snapshot=(whole,),
        model_bytes=123_456,
        figures={"loss": -0.25, "ess": 0.5},
    )


def _role() -> RoleRecord:
    return RoleRecord(
        role="inference",
        software="echo 0.1.0",
        run_id=_MANIFEST.run_id(),
        streams=(f"/ip4/192.0.2.1/tcp/4001/p2p/{_PEER}",),
        gossip=(f"/ip4/192.0.2.1/tcp/4002/p2p/{_PEER}",),
        reach="public",
        capacity=Capacity(
            max_layers=4,
            layers_per_s=1000.0,
            head_layers=8.5,
            memory_bytes=2**33,
            value_bytes=2,
            device="cuda",
            ways=(Way(peer=_OTHER, latency_s=0.025, bytes_s=2e6),),
        ),
        span=Span(start=0, end=2, layers=6),
        version=_V1,
        tokens_per_s=12.5,
        started_at=1_749_999_000.0,
    )


def keys_vectors() -> object:
    """PeerIDs and signatures."""
    return [
        {
            "seed": seed.hex(),
            "public_key": keys.public_key(peer).hex(),
            "peer_id": peer,
            "data": b"echo".hex(),
            "signature": Ed25519PrivateKey.from_private_bytes(seed).sign(b"echo").hex(),
        }
        for seed, peer in ((SEED, _PEER), (OTHER_SEED, _OTHER))
    ]


def run_vectors() -> object:
    """The manifest, its id, and what follows from it."""
    return {
        "manifest": plain(_MANIFEST),
        "encoded": canonical(_MANIFEST).hex(),
        "run_id": _MANIFEST.run_id().hex(),
        "randomness": _MANIFEST.randomness().hex(),
        "sampling_encoded": canonical(_MANIFEST.sampling).hex(),
        "sampling_hash": _MANIFEST.sampling.hash().hex(),
        "with_files": {
            "manifest": plain(_WITH_FILES),
            "encoded": canonical(_WITH_FILES).hex(),
            "run_id": _WITH_FILES.run_id().hex(),
        },
    }


def uniform_vectors() -> object:
    """Group ids, prompts and draws."""
    seed = _MANIFEST.randomness()
    places: list[Place] = [("slot", 42, 0), ("slot", 42, 1), (_PEER, 0), (_PEER, 5), (_OTHER, 2**53)]
    groups = [
        {"place": list(place), "group_id": group_id(seed, place).hex(), "prompt_index": prompt_index(seed, place, 1000)}
        for place in places
    ]
    group = group_id(seed, ("slot", 42, 0))
    draws = [(0, 0), (0, 1), (1, 0), (7, 31), (2**53, 2**53)]
    uniforms = [{"sample": s, "position": p, "u": uniform(seed, group, s, p).hex()} for s, p in draws]
    return {"randomness": seed.hex(), "prompts": 1000, "groups": groups, "group_id": group.hex(), "uniforms": uniforms}


def envelope_vectors() -> object:
    """One sealed envelope of each kind, by one signer, with consecutive sequence numbers."""
    slots = (Slot(step=42, slot=0), Slot(step=42, slot=3))
    run = _MANIFEST.run_id()
    sealer = envelope.Sealer(_PUBLIC, _KEY.sign, FIRST_SEQUENCE)
    payloads: list[tuple[envelope.Kind[Any], bytes, object]] = [
        (envelope.ROLE, envelope.NO_RUN, _role()),
        (envelope.RUN, envelope.NO_RUN, _MANIFEST),
        (envelope.PLAN, run, Plan(number=9, layers=6, chains=(_ROUTE,), standby=(_STANDBY,))),
        (envelope.RELEASE, run, _release()),
        (envelope.LATEST, run, LatestRelease(version=_V1, release=b"h" * 32, size_bytes=1000)),
        (envelope.ROLLOUT, run, _group(None)),
        (envelope.ROLLOUT, run, _group(Slot(step=42, slot=3))),
        (envelope.LARGE_ROLLOUT, run, LargeRollout(blob=b"l" * 32, size_bytes=70_000)),
        (envelope.PULL, run, PullRequest(version=_V1, slots=slots)),
        (envelope.COMPLAINT, run, Complaint(plan=9, accused=_OTHER, reason="silent")),
    ]
    return [
        {
            "kind": kind.name,
            "run_id": run_id.hex(),
            "sequence": FIRST_SEQUENCE + number,
            "issued_at": ISSUED_AT,
            "value": plain(payload),
            "payload": encode(payload).hex(),
            "sealed": sealer.seal(kind, run_id, payload, ISSUED_AT).hex(),
        }
        for number, (kind, run_id, payload) in enumerate(payloads, 1)
    ]


def refused_vectors() -> object:
    """Bytes that must not open as a role record of no run at the time given, and the reason to count."""
    sealed = envelope.Sealer(_PUBLIC, _KEY.sign, 0).seal(envelope.ROLE, envelope.NO_RUN, _role(), ISSUED_AT)
    draft = msgspec.msgpack.decode(sealed, type=envelope.Envelope)

    def signed(**changes: object) -> bytes:
        changed = msgspec.structs.replace(draft, **changes)
        return encode(msgspec.structs.replace(changed, signature=_KEY.sign(envelope.signed_bytes(changed))))

    neutral = (1).to_bytes(32, "little")
    weak = msgspec.structs.replace(draft, signer=neutral, signature=neutral + bytes(32))
    nan = encode({"role": "inference", "software": "x", "tokens_per_s": float("nan")})
    cases = {
        "a field more": ("malformed", encode([*msgspec.msgpack.decode(sealed), 0])),
        "a longer array header": ("malformed", b"\xdc\x00\x08" + sealed[1:]),
        "cut off": ("malformed", sealed[:-1]),
        "a NaN in the payload": ("malformed", signed(payload=nan)),
        "a control character": ("malformed", signed(payload=encode({"role": "inference", "software": "a\nb"}))),
        "another major version": ("protocol-version", signed(version=(2, 0))),
        "another kind": ("unknown-kind", signed(kind="plan")),
        "another run": ("wrong-run", signed(run_id=b"r" * 32)),
        "issued in the future": ("clock", signed(issued_at=ISSUED_AT + 61.0)),
        "changed after signing": ("bad-signature", encode(msgspec.structs.replace(draft, sequence=2))),
        "a key of small order": ("bad-signature", encode(weak)),
    }
    return {
        "now": ISSUED_AT,
        "cases": [{"case": case, "reason": reason, "data": data.hex()} for case, (reason, data) in cases.items()],
    }


def pull_vectors() -> object:
    """Frames of the answer to a pull."""
    replies = (PullReply(group=b"sealed"), PullReply(failure="the chain failed"))
    return [{"value": plain(reply), "encoded": encode(reply).hex()} for reply in replies]


def policy_vectors() -> object:
    """The policy hash of some parts."""
    results = {"layer.10": b"a" * 32, "layer.2": b"b" * 32, "embed": b"c" * 32, "head": b"d" * 32}
    return {"results": plain(results), "policy_hash": policy_hash(results).hex()}


def hop_vectors() -> object:
    """One frame of each kind, a forward in bf16, and the prompt of an answer that goes on."""
    two_rows, floats = bytes([0, 0, 0, 0, 1, 0, 0, 0]), bytes(range(32))
    begin = hop.BeginPrompt(
        lane=3,
        group_id=b"g" * 32,
        run_seed=_MANIFEST.randomness(),
        sampling=_MANIFEST.sampling,
        samples=2,
        positions=40,
    )
    forward = hop.Forward(
        lane=3, step=0, version=_V1, length=2, width=2, rows=two_rows, positions=bytes(8), payload=floats
    )
    frames: list[hop.Frame] = [
        hop.Open(
            route=_ROUTE,
            run_id=_MANIFEST.run_id(),
            plan=9,
            lanes=3,
            versions=(_V1,),
            engines=("torch-float32",),
            room=(65_536,),
            ragged=(True,),
        ),
        begin,
        msgspec.structs.replace(begin, drawn=5),
        hop.EndLane(lane=3),
        hop.Prepare(version=_V1, timeout_s=60.0),
        hop.Switch(version=_V1),
        hop.Beat(number=17),
        hop.Failure(reason="bad-lane", text="lane 4 is not known", peer=_OTHER),
        forward,
        msgspec.structs.replace(forward, payload=floats[:16], halves=True),
        hop.Tokens(lane=3, step=0, version=_V1, rows=two_rows, tokens=two_rows, logprobs=bytes(8)),
        hop.Join(lane=4, prompt=3, step=1, rows=(5, 6), samples=(0, 1)),
    ]
    chain = bytes(range(16))
    return [
        {
            "kind": type(frame).__name__,
            "chain": chain.hex(),
            "value": plain(frame),
            "encoded": b"".join(hop.encode(chain, frame)).hex(),
        }
        for frame in frames
    ]


VECTORS = {
    "keys": keys_vectors,
    "run": run_vectors,
    "uniform": uniform_vectors,
    "envelopes": envelope_vectors,
    "refused": refused_vectors,
    "pull": pull_vectors,
    "policy": policy_vectors,
    "hop": hop_vectors,
}


def texts() -> dict[str, str]:
    """The content of each file by its name."""
    return {f"{name}.json": json.dumps(make(), indent=1) + "\n" for name, make in VECTORS.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
