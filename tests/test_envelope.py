"""The border: what is sealed opens, and whatever else arrives is refused with its reason and does no harm."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from echo_protocols import envelope, keys
from echo_protocols.envelope import (
    LATEST,
    MAX_CLOCK_SKEW_S,
    NO_RUN,
    PLAN,
    PULL,
    ROLE,
    ROLLOUT,
    RUN,
    Border,
    Envelope,
    Kind,
    Opened,
    Refusal,
    Sealer,
    reopen,
    signed_bytes,
)
from echo_protocols.peer import Capacity, Plan, RoleRecord, Stop
from echo_protocols.release import Chunk, Release, Skip
from echo_protocols.rollout import Slot
from echo_protocols.run import RunManifest, Sampling, TaskSpec
from echo_protocols.sync import LatestRelease, PullRequest
from echo_protocols.values import PolicyVersion, Span, decode, encode

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw()
PEER = keys.peer_id(PUBLIC)
NOW = 1_700_000_000.0
RUN_ID = b"r" * 32
KINDS = (ROLE, RUN, PLAN, LATEST, ROLLOUT, PULL)
ROLE_RECORD = RoleRecord(
    role="inference", software="echo/0.1", capacity=Capacity(max_layers=4), span=Span(start=0, end=2, layers=4)
)
LATEST_RELEASE = LatestRelease(version=PolicyVersion(epoch=0, step=1), release=b"h" * 32, size_bytes=1000)


def sealer(first_sequence: int = 0) -> Sealer:
    return Sealer(PUBLIC, KEY.sign, first_sequence)


def sealed(kind: Kind = ROLE, payload: object = ROLE_RECORD, run_id: bytes = NO_RUN) -> bytes:
    return sealer().seal(kind, run_id, payload, NOW)


def forged(payload: bytes = encode(ROLE_RECORD), *, sign: bool = True, **changes: object) -> bytes:
    """A signed envelope of which any field may be wrong."""
    draft = msgspec.structs.replace(msgspec.msgpack.decode(sealed(), type=Envelope), payload=payload, **changes)
    return encode(msgspec.structs.replace(draft, signature=KEY.sign(signed_bytes(draft))) if sign else draft)


def reason_for(data: bytes, kind: Kind = ROLE, run_id: bytes = NO_RUN) -> str | None:
    border = Border()
    opened = border.open(data, kind, run_id, NOW)
    assert dict(border.refused) == ({opened.reason: 1} if isinstance(opened, Refusal) else {})
    return opened.reason if isinstance(opened, Refusal) else None


def manifest(**changes: object) -> RunManifest:
    return RunManifest(
        swarm="echo", model="tiny", tokenizer_hash=bytes(32), layers=4, vocabulary=64, trainers=(PEER,), **changes
    )


def test_what_is_sealed_opens_as_it_was():
    opened = Border().open(sealed(), ROLE, NO_RUN, NOW, once=True)
    assert opened == Opened(PEER, 1, NOW, ROLE_RECORD)
    assert reopen(sealed(), ROLE) == opened


def test_sequence_numbers_grow_over_kinds():
    ours = sealer(41)
    first = reopen(ours.seal(ROLE, NO_RUN, ROLE_RECORD, NOW), ROLE)
    second = reopen(ours.seal(LATEST, RUN_ID, LATEST_RELEASE, NOW), LATEST)
    assert (first.sequence, second.sequence) == (42, 43)


def test_a_whole_number_as_the_time_is_signed_as_it_is_read():
    assert isinstance(Border().open(sealer().seal(ROLE, NO_RUN, ROLE_RECORD, 1_700_000_000), ROLE, NO_RUN, NOW), Opened)


def test_a_payload_over_its_bound_is_not_sealed():
    chains = tuple(
        (Stop(peer=f"{'A' * 42}{a}{b}", span=Span(start=0, end=1, layers=1)),)
        for a in "BCDEFGHJKLMNPQRSTU"
        for b in "BCDEFGHJKLMNPQRSTU"
    )
    with pytest.raises(ValueError, match="over the bound"):
        sealed(PLAN, Plan(number=1, layers=1, chains=chains))


def test_a_plan_without_standbys_is_one_of_before_and_a_standby_serves_no_chain():
    span = Span(start=0, end=1, layers=1)
    a, b = (Stop(peer=letter * 50, span=span) for letter in "AB")
    old = {"number": 1, "layers": 1, "chains": [[[a.peer, [0, 1, 1]]]]}
    assert decode(encode(old), Plan) == Plan(number=1, layers=1, chains=((a,),))
    made = Plan(number=1, layers=1, chains=((a,),), standby=(b,))
    assert decode(encode(made), Plan) == made
    assert (made.span_of(a.peer), made.span_of(b.peer), made.chain_of(b.peer)) == (span, span, None)
    for standby in ((a,), (b, b), (Stop(peer=b.peer, span=Span(start=0, end=1, layers=2)),)):
        with pytest.raises(ValueError, match="stands by for one span"):
            Plan(number=1, layers=1, chains=((a,),), standby=standby)


# -- refused, each with its reason ------------------------------------------------------------------------------------


def test_oversized_input_is_refused_before_it_is_read():
    assert reason_for(bytes(ROLE.max_bytes + 513)) == "oversized"
    assert reason_for(forged(bytes(ROLE.max_bytes + 1))) == "malformed"


def test_every_truncation_is_malformed():
    whole = sealed()
    assert {reason_for(whole[:size]) for size in range(len(whole))} == {"malformed"}


def test_wrong_types_are_malformed():
    assert reason_for(forged(encode({"role": 1, "software": "echo"}))) == "malformed"
    assert reason_for(forged(encode({"role": "inference"}))) == "malformed"
    assert reason_for(forged(encode([1, 2, 3]))) == "malformed"
    assert reason_for(forged(encode({"role": "pirate", "software": "echo"}))) == "malformed"
    assert reason_for(encode("hello")) == "malformed"
    assert reason_for(encode([[1, 0], "role"])) == "malformed"
    assert reason_for(forged(b"\x81\xa8software\xa2\xff\xfe")) == "malformed"


def test_wrong_run_is_refused():
    assert reason_for(sealed(LATEST, LATEST_RELEASE, RUN_ID), LATEST, b"s" * 32) == "wrong-run"
    assert reason_for(sealed(LATEST, LATEST_RELEASE, RUN_ID), LATEST, RUN_ID) is None


def test_wrong_kind_is_refused_even_if_the_payload_would_fit():
    assert reason_for(sealed(LATEST, LATEST_RELEASE), ROLE) == "unknown-kind"
    assert reason_for(forged(kind="gossip")) == "unknown-kind"


def test_wrong_signature_is_refused():
    other = Ed25519PrivateKey.from_private_bytes(b"o" * 32).public_key().public_bytes_raw()
    assert reason_for(forged(sign=False, sequence=7)) == "bad-signature"
    assert reason_for(forged(sign=False, issued_at=NOW + 1)) == "bad-signature"
    assert reason_for(forged(sign=False, signer=other)) == "bad-signature"
    assert reason_for(forged(sign=False, signature=bytes(64))) == "bad-signature"
    assert reason_for(forged(signer=b"\xff" * 32)) == "bad-signature"


def test_a_signature_of_other_data_does_not_serve():
    draft = msgspec.msgpack.decode(sealed(), type=Envelope)
    without_domain = signed_bytes(draft).removeprefix(b"echo/envelope/1\x00")
    assert reason_for(encode(msgspec.structs.replace(draft, signature=KEY.sign(without_domain)))) == "bad-signature"


def test_another_major_version_is_refused_whatever_follows_it():
    assert reason_for(forged(version=(2, 0))) == "protocol-version"
    assert reason_for(encode([[2, 0], {"laid": "out", "in": "another way"}])) == "protocol-version"
    assert reason_for(encode([[0, 9]])) == "protocol-version"


def test_fields_of_a_later_minor_version_are_ignored():
    newer = encode({**msgspec.to_builtins(ROLE_RECORD), "mood": ["good", {"since": 1}]})
    opened = Border().open(forged(newer, version=(1, 7)), ROLE, NO_RUN, NOW)
    assert isinstance(opened, Opened)
    assert opened.payload == ROLE_RECORD


def test_a_manifest_with_settings_that_this_version_does_not_know_is_refused():
    newer = encode({**msgspec.to_builtins(manifest(), builtin_types=(bytes,)), "audit_rate": 0.1})
    assert reason_for(forged(newer, kind="run"), RUN) == "not-exact"
    assert reason_for(forged(encode(manifest()), kind="run"), RUN) is None


def test_a_clock_ahead_is_refused_beyond_the_skew():
    assert reason_for(forged(issued_at=NOW + MAX_CLOCK_SKEW_S)) is None
    assert reason_for(forged(issued_at=NOW + MAX_CLOCK_SKEW_S + 1)) == "clock"
    for impossible in (float("nan"), float("inf"), float("-inf"), -1.0, 1e300):
        assert reason_for(forged(issued_at=impossible)) == "malformed"


def test_numbers_out_of_range_are_malformed():
    assert reason_for(forged(sequence=2**53 + 1)) == "malformed"
    assert reason_for(forged(sequence=-1)) == "malformed"
    for speed in (float("nan"), float("inf"), -1.0):
        capacity = {"max_layers": 4, "layers_per_s": speed}
        assert (
            reason_for(forged(encode({"role": "inference", "software": "echo", "capacity": capacity}))) == "malformed"
        )
        assert (
            reason_for(forged(encode({"role": "inference", "software": "echo", "tokens_per_s": speed}))) == "malformed"
        )


def test_what_would_upset_a_screen_is_malformed():
    for text in ("\x1b[2J", "two\nlines", "end\n", "\x00", ""):
        assert reason_for(forged(encode({"role": "inference", "software": text}))) == "malformed"
    assert reason_for(forged(encode({"role": "inference", "software": "écho ∞"}))) is None


def test_deep_nesting_is_malformed():
    deep = b"\x91" * 200_000
    assert reason_for(b"\x81\xa1z" + deep, ROLLOUT) == "malformed"
    assert reason_for(forged(b"\x81\xa1z" + b"\x91" * 8000)) == "malformed"
    assert reason_for(encode([[1, 0]])[:-1] + deep, ROLLOUT) == "malformed"
    assert reason_for(b"\x9a\x92\x01\x00" + deep, ROLLOUT) == "malformed"


def test_declared_sizes_beyond_the_data_are_malformed():
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        assert reason_for(header) == "malformed"
        assert reason_for(forged(header)) == "malformed"
        assert reason_for(forged(b"\x81\xa7samples" + header, kind="rollout"), ROLLOUT) == "malformed"


def test_there_is_one_encoding_of_an_envelope():
    whole = sealed()
    fields = msgspec.msgpack.decode(whole)
    assert reason_for(encode([*fields, "unsigned"])) == "malformed"
    assert reason_for(whole + b"\x00") == "malformed"
    longer_header = b"\xdc\x00\x08" + whole[1:]  # array 16 in place of a fixed array
    assert msgspec.msgpack.decode(longer_header) == fields
    assert reason_for(longer_header) == "malformed"


def test_a_key_that_anybody_can_sign_for_is_refused():
    # With the neutral point as key, the neutral point and 0 sign everything.
    neutral = (1).to_bytes(32, "little")
    assert reason_for(forged(sign=False, signer=neutral, signature=neutral + bytes(32))) == "bad-signature"
    assert not keys.verify(neutral, neutral + bytes(32), b"anything")


def test_chains_that_do_not_cover_the_layers_are_malformed():
    def chain(*spans: tuple[int, int, int]) -> list[object]:
        return [[f"{'A' * 43}{'BCDE'[i]}", span] for i, span in enumerate(spans)]

    def plan(*chains: list[object]) -> bytes:
        return forged(encode({"number": 1, "layers": 4, "chains": chains}), kind="plan")

    assert reason_for(plan(chain((0, 2, 4), (2, 4, 4))), PLAN) is None
    for bad in (chain((0, 2, 4)), chain((1, 4, 4)), chain((0, 3, 4), (2, 4, 4)), chain((0, 4, 9)), chain((2, 1, 4))):
        assert reason_for(plan(bad), PLAN) == "malformed"
    assert reason_for(plan(chain((0, 4, 4)), chain((0, 4, 4))), PLAN) == "malformed"


def test_pulls_name_different_slots_of_one_step():
    def pull(*slots: tuple[int, int]) -> bytes:
        return forged(encode({"version": [0, 1], "slots": slots}), kind="pull")

    assert reason_for(pull((2, 0), (2, 1)), PULL) is None
    for bad in (pull(), pull((2, 0), (2, 0)), pull((2, 0), (3, 1)), pull((2, -1))):
        assert reason_for(bad, PULL) == "malformed"


# -- replays ----------------------------------------------------------------------------------------------------------


def opens(border: Border, sequence: int, kind: Kind = ROLE) -> bool:
    return isinstance(border.open(forged(sequence=sequence, kind=kind.name), kind, NO_RUN, NOW, once=True), Opened)


def test_a_replay_is_refused_and_counted():
    border = Border()
    assert opens(border, 5)
    assert not opens(border, 5)
    assert border.refused == {"replayed": 1}
    assert isinstance(border.open(forged(sequence=5), ROLE, NO_RUN, NOW), Opened)  # records are read again and again


def test_late_messages_open_once_inside_the_window_and_never_behind_it():
    border = Border(replay_window=8)
    assert [opens(border, n) for n in (0, 10, 3, 4, 3, 2, 9, 9, 10, 11, 4, 5)] == [
        True, True, True, True, False, False, True, False, False, True, False, True,
    ]  # fmt: skip


def test_a_refused_message_takes_no_place_in_the_window():
    border = Border()
    border.open(forged(sign=False, sequence=9), ROLE, NO_RUN, NOW, once=True)
    border.open(forged(b"", sequence=9), ROLE, NO_RUN, NOW, once=True)
    assert opens(border, 9)


def test_kinds_and_signers_have_windows_of_their_own():
    border, other = Border(), Ed25519PrivateKey.generate()
    theirs = Sealer(other.public_key().public_bytes_raw(), other.sign, 4)
    assert opens(border, 5)
    assert isinstance(border.open(theirs.seal(ROLE, NO_RUN, ROLE_RECORD, NOW), ROLE, NO_RUN, NOW, once=True), Opened)
    pull = encode(PullRequest(version=PolicyVersion(epoch=0, step=0), slots=(Slot(step=1, slot=0),)))
    assert isinstance(border.open(forged(pull, kind="pull", sequence=5), PULL, NO_RUN, NOW, once=True), Opened)


def test_the_least_recently_heard_window_is_evicted():
    border = Border(max_windows=2)
    others = [Ed25519PrivateKey.generate() for _ in range(2)]
    assert opens(border, 5)
    for other in others:
        theirs = Sealer(other.public_key().public_bytes_raw(), other.sign, 0)
        border.open(theirs.seal(ROLE, NO_RUN, ROLE_RECORD, NOW), ROLE, NO_RUN, NOW, once=True)
    assert opens(border, 5)


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**53)), max_size=60), st.integers(1, 16))
def test_the_window_agrees_with_a_set(sequence, size):
    window, seen, highest = envelope._ReplayWindow(size), set(), -1
    for number in sequence:
        fresh = number > highest or (number > highest - size and number not in seen)
        assert window.first_time(number) == fresh
        seen.add(number)
        highest = max(highest, number)


# -- hostile bytes ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400), st.sampled_from(KINDS))
def test_no_bytes_raise(data, kind):
    assert isinstance(Border().open(data, kind, NO_RUN, NOW), Refusal)


@given(st.data(), st.integers(1, 3))
def test_no_mutation_of_a_sealed_envelope_opens(data, changes):
    whole = bytearray(sealed())
    before = bytes(whole)
    for _ in range(changes):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    opened = Border().open(bytes(whole), ROLE, NO_RUN, NOW, once=True)
    assert isinstance(opened, Refusal) or bytes(whole) == before


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SHAPES = {kind: [field.name for field in msgspec.structs.fields(kind.type)] for kind in (*KINDS, envelope.RELEASE)}


@given(st.data())
def test_no_signed_payload_raises(data):
    kind = data.draw(st.sampled_from(list(SHAPES)))
    payload = data.draw(st.dictionaries(st.sampled_from(SHAPES[kind]), json, max_size=5) | json)
    Border().open(forged(encode(payload), kind=kind.name), kind, NO_RUN, NOW)


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_no_signed_bytes_raise(payload, kind):
    Border().open(forged(payload, kind=kind.name), kind, NO_RUN, NOW)


# -- the run id -------------------------------------------------------------------------------------------------------


def test_the_run_id_is_the_hash_of_the_manifest_as_it_is_read():
    for written in (
        manifest(),
        manifest(sampling=Sampling(temperature=1)),
        manifest(task=TaskSpec(settings={"b": 1, "a": 2.5})),
    ):
        read = Border().open(sealed(RUN, written), RUN, NO_RUN, NOW)
        assert isinstance(read, Opened)
        assert read.payload.run_id() == written.run_id()


def test_the_run_id_does_not_depend_on_the_order_of_settings():
    one, two = {"size": 6, "boxes": 1, "hard": False}, {"hard": False, "boxes": 1, "size": 6}
    assert manifest(task=TaskSpec(settings=one)).run_id() == manifest(task=TaskSpec(settings=two)).run_id()
    assert sealed(RUN, manifest(task=TaskSpec(settings=one))) == sealed(RUN, manifest(task=TaskSpec(settings=two)))


def test_every_setting_changes_the_run_id():
    ids = {
        manifest(**change).run_id() for change in ({}, {"seed": 2}, {"max_lag": 3}, {"group_size": 4}, {"prompts": 9})
    }
    assert len(ids) == 5
    assert len({Sampling(temperature=t).hash() for t in (1, 1.0, 0.5)}) == 2


def test_groups_that_fit_no_envelope_make_no_run():
    with pytest.raises(ValueError, match=r"lower group_size or sampling\.max_new_tokens"):
        manifest(group_size=1024, sampling=Sampling(max_new_tokens=4096))


# -- peer ids ---------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_hold_their_key(key):
    assert keys.public_key(keys.peer_id(key)) == key
    assert keys.peer_id(key).startswith("12D3KooW")


@given(
    st.text(max_size=70) | st.text(alphabet="123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=70)
)
def test_what_is_no_peer_id_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"PeerID|base58"):
        keys.public_key(text)


def test_there_is_one_peer_id_for_a_key():
    for other in (f"1{PEER}", PEER[1:], f"{PEER}\n", f" {PEER}", PEER.lower()):
        with pytest.raises(ValueError, match=r"PeerID|base58"):
            keys.public_key(other)


def test_release_without_sense_is_malformed():
    def chunk(base: bytes | None) -> Chunk:
        return Chunk(part="head", hash=bytes(32), size_bytes=1, base=base, result=bytes(32))

    def release(**fields: object) -> Release:
        version = {"version": PolicyVersion(epoch=1, step=2), "parent": PolicyVersion(epoch=1, step=1)}
        rest = {"parent_release": None, "snapshot_release": None, "policy_hash": bytes(32), "model_bytes": 1}
        return Release(**{**version, **rest, **fields})

    def skip(step: int, base: bytes | None) -> Skip:
        return Skip(base=PolicyVersion(epoch=1, step=step), base_release=bytes(32), chunks=(chunk(base),))

    patch = {"patch": (chunk(bytes(32)),)}
    assert release(**patch, continues=PolicyVersion(epoch=0, step=2)).patch_bytes == 1
    assert release(**patch, skips=(skip(0, bytes(32)),))
    for bad in (
        {},
        {"patch": (chunk(None),)},
        {"snapshot": (chunk(bytes(32)),)},
        {"patch": (chunk(bytes(32)),), "parent": None},
        {"patch": (chunk(bytes(32)),), "parent": PolicyVersion(epoch=1, step=2)},
        {"snapshot": (chunk(None),), "continues": PolicyVersion(epoch=1, step=2)},
        {"snapshot": (chunk(None),), "continues": PolicyVersion(epoch=0, step=1)},
        {**patch, "skips": (skip(0, None),)},
        {**patch, "skips": (skip(1, bytes(32)),)},
        {"snapshot": (chunk(None),), "parent": None, "skips": (skip(0, bytes(32)),)},
    ):
        with pytest.raises(ValueError, match=r"patch|continue|base|skip|older"):
            release(**bad)
