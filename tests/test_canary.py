"""A stage that computes finite garbage: its ring fails, and no group that it may have touched is delivered."""

import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import Drawn, GroupRequest, SoFar
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainBroken, ChainLimits, GroupBroken
from echo_p2p.chain.memory_ring import memory_ring
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.proofs import next_canary_at
from echo_p2p.chain.seat import Seat
from echo_p2p.chain.stage import TensorUpdate
from echo_p2p.chain.verdict import Judge, Remembered, Seen, disagreement, name_of, tolerance_of
from echo_p2p.errors import ChainError
from echo_protocols.hop import CANARY, BeginPrompt, Join
from echo_protocols.rollout import Sample
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

LAYERS = 4
V0, V1 = (PolicyVersion(epoch=0, step=step) for step in (0, 1))
LIMITS = ChainLimits(lanes=16, rows=16, positions=4096, hop_timeout_s=20.0, beat_s=5.0)
SPLITS = {1: (4,), 2: (1, 4), 3: (1, 3, 4)}
KINDS = ("noise", "rows", "weights", "nan")


class Perishable(MemoryStage):
    """A stage whose outputs can't be trusted from the moment that `kind` is set."""

    kind = ""

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        if self.kind == "weights":
            name = f"model.layers.{self.span.start}.mlp.weight"
            self._weights[name][3, 5] = self._weights[name][3, 5] + 0.5
            self.kind = "done"
        outputs = super().forward(lane, rows, positions, inputs)
        match self.kind:
            case "noise":
                return outputs + np.random.default_rng(int(positions[0])).normal(0, 0.1, outputs.shape).astype("f4")
            case "rows":
                return outputs[::-1]
            case "nan":
                return np.full_like(outputs, np.nan)
        return outputs


def stages(stops: int) -> list[Perishable]:
    return [Perishable(Span(start=a, end=b, layers=LAYERS)) for a, b in pairwise((0, *SPLITS[stops]))]


def request(number: int, *, samples: int = 4, length: int = 12) -> GroupRequest:
    return GroupRequest(
        group_id=b"group %d" % number,
        run_seed=b"seed",
        prompt=tuple(1 + (number + i) % 7 for i in range(5)),
        samples=samples,
        sampling=Sampling(max_new_tokens=length),
        stop_tokens=frozenset({3}),
    )


REQUESTS = [request(number, samples=1 + number % 5, length=(4, 30, 9, 20)[number % 4]) for number in range(60)]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await main()

    trio.run(bounded)


async def undisturbed(requests: Sequence[GroupRequest]) -> list[tuple[Sample, ...]]:
    """By a stage alone, without a canary."""
    found: dict[int, tuple[Sample, ...]] = {}

    async def one(driver: ChainDriver, place: int) -> None:
        found[place] = await driver.generate(requests[place])

    async with (
        memory_ring([MemoryStage(Span(start=0, end=LAYERS, layers=LAYERS))], version=V0, limits=LIMITS) as ring,
        open_chain(ring.ring(), ring.hosts[0], canary=False) as driver,
        trio.open_nursery() as nursery,
    ):
        for place in range(len(requests)):
            nursery.start_soon(one, driver, place)
    return [found[place] for place in range(len(requests))]


class Crop:
    """What became of the requests, of which a few are asked for at a time, at one ring after the other."""

    def __init__(self) -> None:
        self.delivered: dict[int, tuple[Sample, ...]] = {}
        self.so_far: dict[int, SoFar] = {}
        self.faults: set[tuple[str, str | None]] = set()
        self._few = trio.Semaphore(6)

    async def ask(self, driver: ChainDriver) -> None:
        async with trio.open_nursery() as nursery:
            for place in range(len(REQUESTS)):
                if place not in self.delivered:
                    nursery.start_soon(self._one, driver, place)

    async def _one(self, driver: ChainDriver, place: int) -> None:
        try:
            async with self._few:
                self.delivered[place] = await driver.generate(REQUESTS[place], None, self.so_far.get(place))
        except GroupBroken as error:
            self.so_far[place] = error.so_far
            self.faults.add((error.failure.reason, error.failure.peer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stops", "place"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_no_token_of_a_stage_that_goes_bad_in_mid_generation_is_delivered(stops: int, place: int, kind: str) -> None:
    async def main() -> None:
        crop, expected, model = Crop(), await undisturbed(REQUESTS), stages(stops)
        async with memory_ring(model, version=V0, limits=LIMITS) as ring:
            async with open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(crop.ask, driver)
                    while driver.statistics.groups < 5:
                        await trio.lowlevel.checkpoint()
                    model[place].kind = kind
                assert driver.failed.is_set()
            delivered = set(crop.delivered)
            assert 5 <= len(delivered) < len(REQUESTS)
            assert all(crop.delivered[each] == expected[each] for each in delivered)
            [(reason, peer)] = crop.faults
            assert peer == ring.route[place].peer
            assert reason == ("engine" if kind == "nan" and place == stops - 1 else "garbage")
            assert all(not so_far.token_count for so_far in crop.so_far.values()) or reason == "engine"
        async with (
            memory_ring(stages(2), version=V0, limits=LIMITS) as ring,
            open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver,
        ):
            await crop.ask(driver)
        assert [crop.delivered[each] for each in range(len(REQUESTS))] == expected

    run(main)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("stops", [1, 3])
def test_canaries_change_no_token(stops: int, exclusive: bool) -> None:
    async def main() -> None:
        crop = Crop()
        async with memory_ring(stages(stops), version=V0, limits=LIMITS) as ring:
            opened = ring.ring(exclusive=exclusive, vocabulary=32)
            async with open_chain(opened, ring.hosts[0], ring.servers[0]) as driver:
                await crop.ask(driver)
                assert driver.canary is not None
                queue = driver._growth._queue
                assert queue._left == queue.room
            assert [crop.delivered[each] for each in range(len(REQUESTS))] == await undisturbed(REQUESTS)
            while any(host.statistics.lanes for host in ring.hosts):
                await trio.lowlevel.checkpoint()

    run(main)


def test_what_is_not_proven_is_drawn_again() -> None:
    """A ring that dies may have been bad before: only what a canary has followed is kept."""

    async def main() -> None:
        asked, heard = request(1, samples=2, length=2000), 0
        asked = replace(asked, stop_tokens=frozenset())

        def hear(sample: int, token: int, version: PolicyVersion) -> None:
            nonlocal heard
            heard += 1

        async with (
            memory_ring(stages(2), version=V0, limits=LIMITS) as ring,
            open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver,
            trio.open_nursery() as nursery,
        ):

            async def one() -> None:
                with pytest.raises(GroupBroken) as caught:
                    await driver.generate(asked, hear)
                assert 0 < caught.value.so_far.token_count < heard
                assert caught.value.so_far.fault(asked) is None

            nursery.start_soon(one)
            [group] = await groups_of(driver)
            while not sum(group.proven):
                await trio.lowlevel.checkpoint()
            while heard <= sum(group.proven):
                await trio.lowlevel.checkpoint()
            ring.network.split([ring.route[1].peer])

    run(main)


async def groups_of(driver: ChainDriver):  # type: ignore[no-untyped-def]
    while not driver._growth.proofs._groups:
        await trio.lowlevel.checkpoint()
    return driver._growth.proofs._groups


def other_weights() -> dict[PolicyVersion, dict[str, TensorUpdate]]:
    other = MemoryStage(Span(start=0, end=LAYERS, layers=LAYERS), seed=2)
    return {V1: {name: TensorUpdate(index=None, values=bits) for name, bits in other.tensors().items()}}


@pytest.mark.parametrize("stops", [1, 3])
def test_each_version_has_a_canary_of_its_own(stops: int) -> None:
    async def main() -> None:
        model = stages(stops)
        async with (
            memory_ring(model, version=V0, releases=other_weights(), limits=LIMITS) as ring,
            open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver,
        ):
            crop = Crop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(crop.ask, driver)
                while driver.statistics.groups < 5:
                    await trio.lowlevel.checkpoint()
                first = driver.canary
                await driver.switch(V1, timeout_s=5)
            assert len(crop.delivered) == len(REQUESTS)
            while driver.canary is first:
                await trio.lowlevel.checkpoint()
            assert first is not None
            assert driver.canary is not None
            assert (first.version, driver.canary.version) == (V0, V1)
            model[-1].kind = "noise"
            with pytest.raises(GroupBroken) as caught:
                await driver.generate(request(99))
            assert caught.value.failure.reason == "garbage"

    run(main)


def test_a_stage_that_was_bad_from_the_beginning_is_found_by_a_reference() -> None:
    async def main() -> None:
        async with (
            memory_ring(stages(3), version=V0, limits=LIMITS) as ring,
            open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver,
        ):
            await driver.generate(request(0))
            known = driver.canary
        assert known is not None
        for kind in ("", "noise"):
            model = stages(2)
            model[1].kind = kind
            async with memory_ring(model, version=V0, limits=LIMITS) as ring:
                reference = {V0: known}.get
                async with open_chain(ring.ring(), ring.hosts[0], ring.servers[0], reference=reference) as driver:
                    if not kind:
                        assert await driver.generate(request(0)) == (await undisturbed([request(0)]))[0]
                        continue
                    with pytest.raises(ChainBroken, match="another chain"):
                        await driver.generate(request(0))

    run(main)


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_that_went_bad_serves_no_ring_until_it_is_loaded_anew(place: int) -> None:
    async def main() -> None:
        model = stages(2)
        async with memory_ring(model, version=V0, limits=LIMITS) as ring:
            async with open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver:
                await driver.generate(request(0))
            model[place].kind = "noise"
            async with open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver:
                with pytest.raises(GroupBroken) as caught:  # though this ring has never seen it well
                    await driver.generate(request(0))
                assert (caught.value.failure.reason, caught.value.failure.peer) == ("garbage", ring.route[place].peer)
            assert [host.corrupt for host in ring.hosts] == [place == 0, place == 1]
            with pytest.raises(ChainError, match="anew"):
                async with open_chain(ring.ring(), ring.hosts[0], ring.servers[0]):
                    raise AssertionError("it opens no more")

    run(main)


SEEN = Seen(V0, (1, 2, 3, 4), (-0.5, -3.0, -1.0, -2.0))


def test_canaries_agree_but_for_rounding_and_for_one_token_at_an_edge() -> None:
    assert disagreement(SEEN, SEEN, 1e-4) is None
    near = replace(SEEN, logprobs=(-0.50009, -3.00025, -1.0, -2.0))
    assert disagreement(near, SEEN, 1e-4) is None
    assert "apart by" in str(disagreement(replace(near, logprobs=(-0.5002, -3.0, -1.0, -2.0)), SEEN, 1e-4))
    edge = replace(SEEN, tokens=(1, 2, 9, 4), logprobs=(-0.5, -3.0, -9.0, -2.0))
    assert disagreement(edge, SEEN, 1e-4) is None
    assert "2 of 4 tokens" in str(disagreement(replace(edge, tokens=(1, 9, 9, 4)), SEEN, 1e-4))


def test_engines_of_16_bits_may_be_further_apart() -> None:
    assert tolerance_of("torch-2.13.0-cpu-float32[0:2/6]+mlx-0.3-gpu-float32[2:6/6]") == 1e-4
    assert tolerance_of("torch-2.13.0-cpu-float32[0:2/6]+torch-2.13.0-cuda-bfloat16[2:6/6]") == 2e-2
    assert tolerance_of("unheard-of") == 2e-2


def test_a_reference_is_asked_once_for_each_version() -> None:
    asked: list[PolicyVersion] = []

    def reference(version: PolicyVersion) -> Seen | None:
        asked.append(version)
        return SEEN if version == V0 else None

    judge = Judge(reference)
    assert "another chain" in str(judge.fault(replace(SEEN, logprobs=(-0.6, -3.0, -1.0, -2.0))))
    assert judge.baseline is None
    assert judge.fault(replace(SEEN, logprobs=(-0.5005, -3.0, -1.0, -2.0))) is None  # other engines
    assert judge.fault(SEEN) is not None
    assert judge.fault(replace(SEEN, version=V1)) is None
    assert judge.fault(replace(SEEN, version=V1)) is None
    assert asked == [V0, V0, V1]


@pytest.mark.parametrize(("ours", "theirs"), [(2e-2, 2e-2), (2e-2, 1e-4), (1e-4, 2e-2)])
def test_rings_of_16_bits_are_no_reference_for_others_and_have_none(ours: float, theirs: float) -> None:
    """As when a GPU of such a ring is replaced: the same weights, and other tokens at many edges."""
    judge = Judge(lambda version: replace(SEEN, tolerance=theirs))
    seen = replace(SEEN, tokens=(7, 8, 3, 4), tolerance=ours)
    assert judge.fault(seen) is None
    assert judge.fault(replace(seen, logprobs=(-1.5, -3.0, -1.0, -2.0))) is not None
    assert "another chain" in str(Judge(lambda version: SEEN).fault(replace(seen, tolerance=1e-4)))


@given(st.floats(0, 1e5), st.floats(0.0, 100.0), st.booleans(), st.booleans())
def test_canaries_are_rare_and_nobody_waits_long_for_one(
    began_at: float, takes_s: float, waited_for: bool, idle: bool
) -> None:
    apart_s = next_canary_at(began_at, takes_s, waited_for=waited_for, idle=idle) - began_at
    if waited_for and idle:
        assert apart_s == 0
        return
    longest_s = 2.0 if waited_for else 5.0
    assert apart_s <= max(longest_s, 25.0 * takes_s) * 1.001 + 1e-6
    assert apart_s >= min(49.9 * takes_s, longest_s, apart_s) - 1e-6
    assert takes_s <= apart_s / 25 + 1e-6
    if takes_s <= longest_s / 50:
        assert math.isclose(apart_s, 50 * takes_s, abs_tol=1e-6, rel_tol=1e-3)


def test_a_stage_remembers_what_it_made_of_canaries_until_its_weights_change() -> None:
    draws = np.random.default_rng(0)
    reads = [bytes([i]) for i in range(20)]
    outputs = draws.standard_normal((1, 12, 8)).astype(np.float32)
    remembered = Remembered(1e-4)
    assert remembered.fault(reads[0], outputs) is None
    assert remembered.fault(reads[0], outputs * np.float32(1.00005)) is None
    for wrong in (outputs * np.float32(1.001), outputs + np.nan, outputs[:, ::-1]):
        assert "apart by" in str(remembered.fault(reads[0], wrong))
    assert remembered.fault(reads[1], -outputs) is None
    for other in reads[2:]:  # more than it keeps
        assert remembered.fault(other, outputs) is None
    assert remembered.fault(reads[0], -outputs) is None
    assert remembered.fault(reads[0], outputs) is not None
    remembered.forget()
    assert remembered.fault(reads[0], outputs) is None


def test_what_was_read_has_a_name_by_all_of_it_unless_it_is_long() -> None:
    ids = np.arange(12, dtype=np.int32)[None]
    names = {name_of(b"", V0, ids), name_of(b"x", V0, ids), name_of(b"", V0, ids + 1), name_of(b"", V0, ids[:, :11])}
    assert len(names | {name_of(b"", V1, ids)}) == 5
    assert all(names)
    assert name_of(b"", V0, np.zeros((1, 64), np.int32))
    assert name_of(b"", V0, np.zeros((1, 65), np.int32)) == b""
    assert name_of(b"", V0, np.zeros((65, 1, 4), np.float32)) == b""


class Held(MemoryStage):
    """A stage whose joins take until they are let go."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.go = threading.Event()

    def join(self, lane: int, rows: NDArray[np.int32], source: int) -> None:
        assert self.go.wait(20)
        super().join(lane, rows, source)


def test_the_step_that_follows_a_join_changes_none_of_its_tokens() -> None:
    """Canaries don't wait between steps: the last stage has begun the next one when it draws for this one."""
    whole = Span(start=0, end=LAYERS, layers=LAYERS)
    order = BeginPrompt(
        lane=1, group_id=CANARY, run_seed=b"seed", sampling=Sampling(max_new_tokens=2), samples=8, positions=9
    )
    rows = np.arange(8, dtype=np.int32)
    joining = Join(lane=2, prompt=1, step=0, rows=tuple(rows.tolist()), samples=tuple(rows.tolist()))

    async def drawn(*, hurried: bool) -> list[list[int]]:
        stage = Held(whole)
        host = StageHost("A" * 44, stage, MemoryWeights({}), V0)
        seat, tokens = Seat(host), [list[int](), list[int]()]
        seat.begin(order)
        with await host.turns.begin() as turn:
            prompt = np.array([[1, 2, 3]], np.int32)
            await seat.forward(turn, 1, 0, np.zeros(1, np.int32), np.zeros(1, np.int32), prompt)

        async def join() -> None:
            with await host.turns.begin() as turn:
                found = await seat.join(turn, joining)
                assert found is not None
                tokens[0] = found.tokens.tolist()

        async def decode() -> None:
            with await host.turns.begin() as turn:
                found = await seat.forward(turn, 2, 1, rows, np.full(8, 3, np.int32), rows[:, None])
                assert isinstance(found, Drawn)
                tokens[1] = found.tokens.tolist()

        async with trio.open_nursery() as nursery:
            if not hurried:
                stage.go.set()
                await join()
            else:
                nursery.start_soon(join)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(decode)
            await trio.testing.wait_all_tasks_blocked()
            stage.go.set()
        return tokens

    async def main() -> None:
        assert await drawn(hurried=True) == await drawn(hurried=False)

    run(main)


@pytest.mark.parametrize("after", range(1, 4))
def test_a_switch_in_the_middle_of_a_canary_is_no_garbage(after: int) -> None:
    """It is void: another one follows, of which the stages remember nothing that they made of the first."""

    async def main() -> None:
        async with (
            memory_ring(stages(2), version=V0, releases=other_weights(), limits=LIMITS) as ring,
            open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver,
        ):
            while ring.hosts[0].statistics.steps < after:  # of the canary that follows the opening
                await trio.lowlevel.checkpoint()
            await driver.switch(V1, timeout_s=5)
            while driver.canary is None or driver.canary.version != V1:
                await trio.lowlevel.checkpoint()
            assert await driver.generate(request(0))
            assert not driver.failed.is_set()

    run(main)
