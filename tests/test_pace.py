"""What is unusually late is given up long before the longest time: by its stage, or by the head of its ring."""

import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.link import ChainBroken, ChainLimits
from echo_p2p.chain.memory_ring import memory_ring
from echo_p2p.chain.memory_stage import MemoryStage
from echo_p2p.chain.pace import Pace, Rounds
from echo_protocols.run import Sampling
from echo_protocols.values import PolicyVersion, Span

V0 = PolicyVersion(epoch=0, step=0)
times = st.floats(1e-4, 50.0)


def known(times_s: list[float], size: int = 8, **settings: float) -> Pace:
    pace = Pace(**({"floor_s": 2.0, "ceiling_s": 30.0, "times": 8.0} | settings))
    for taken_s in times_s:
        pace.learn(size, taken_s)
    return pace


def test_nothing_is_late_before_the_usual_is_known() -> None:
    assert known([0.01] * 7).bound_s(8) == 30.0
    assert known([0.01] * 8).bound_s(8) == 2.0
    assert known([0.5] * 8).bound_s(8) == 4.0
    assert known([9.0] * 8).bound_s(8) == 30.0


def test_a_few_slow_steps_do_not_change_what_is_usual() -> None:
    assert known([0.5] * 25 + [20.0] * 6).usual_s(8) == 0.5
    assert known([20.0] + [0.5] * 40).usual_s(8) == 0.5
    assert known([0.5] * 31 + [2.0] * 20).usual_s(8) == 2.0  # but it follows what has become so


def test_sizes_not_seen_are_judged_by_those_that_were() -> None:
    pace = known([0.5] * 8, size=8)
    assert pace.usual_s(15) == 0.5
    assert pace.usual_s(16) == 1.0
    assert pace.usual_s(256) == 16.0
    assert pace.usual_s(1) == 0.5
    for _ in range(8):
        pace.learn(256, 0.7)
    assert pace.usual_s(300) == 0.7
    assert pace.usual_s(64) == 4.0


@given(st.lists(st.tuples(st.integers(0, 1 << 18), times), max_size=200), st.integers(0, 1 << 18))
def test_what_is_given_lies_between_floor_and_ceiling_and_over_the_usual(
    taken: list[tuple[int, float]], size: int
) -> None:
    pace = Pace(2.0, 30.0, 8.0)
    for each, taken_s in taken:
        pace.learn(each, taken_s)
    assert 2.0 <= pace.bound_s(size) <= 30.0
    usual = pace.usual_s(size)
    assert pace.bound_s(size) == 30.0 if usual is None else pace.bound_s(size) >= min(usual, 30.0)


def test_the_oldest_step_is_waited_for_from_when_the_one_before_it_came() -> None:
    rounds = Rounds[int](known([0.5] * 8))
    assert rounds.deadline == math.inf
    rounds.sent(1, 8, now=100.0)
    rounds.sent(2, 8, now=101.0)
    assert rounds.deadline == 104.0
    rounds.came(1, now=103.0)
    assert rounds.deadline == 107.0
    rounds.came(7, now=106.0)  # nobody has asked for it
    assert rounds.deadline == 107.0
    rounds.came(2, now=106.5)
    assert rounds.deadline == math.inf
    rounds.sent(3, 8, now=200.0)
    assert rounds.deadline == 204.0


def test_a_switch_gives_time_until_the_first_step_behind_it_has_come() -> None:
    pace = known([0.5] * 8)
    rounds = Rounds[int](pace)
    rounds.sent(1, 8, now=0.0)
    rounds.switched()
    rounds.sent(2, 8, now=1.0)
    rounds.sent(3, 8, now=1.0)
    assert rounds.deadline == 4.0
    rounds.came(1, now=1.0)
    assert rounds.deadline == 31.0
    rounds.came(2, now=20.0)
    assert rounds.deadline == 50.0  # it was sent as early, and may have queued as long
    rounds.came(3, now=21.0)
    rounds.sent(4, 8, now=22.0)
    assert rounds.deadline == 26.0
    assert pace.usual_s(8) == 0.5


class Hanging(MemoryStage):
    """A stage whose calls hang from the moment that `hang` is set until `let` is."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.hang, self.hangs, self.let = threading.Event(), threading.Event(), threading.Event()

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        if self.hang.is_set():
            self.hangs.set()
            self.let.wait(50)
        return super().forward(lane, rows, positions, inputs)


def stages(*cuts: int) -> list[Hanging]:
    return [Hanging(Span(start=a, end=b, layers=cuts[-1])) for a, b in pairwise((0, *cuts))]


# Whoever waits for the longest time of these waits for ever.
PATIENT = ChainLimits(hop_timeout_s=1e6, patience_s=1.0, beat_s=1e6, idle_timeout_s=1e6)
ASKED = GroupRequest(b"group", b"seed", (1, 2, 3), 2, Sampling(max_new_tokens=8000), frozenset())


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await main()

    trio.run(bounded)


async def warm(driver: ChainDriver) -> None:
    while driver.statistics.steps < 20:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(("cuts", "place"), [((4,), 0), ((2, 4), 0), ((2, 4), 1), ((1, 2, 4), 1), ((1, 2, 4), 2)])
def test_a_stage_that_hangs_names_itself_and_shows_how_long_it_has_been_at_it(
    cuts: tuple[int, ...], place: int
) -> None:
    model = stages(*cuts)

    async def main() -> None:
        async with memory_ring(model, version=V0, limits=PATIENT) as ring:
            async with open_chain(ring.ring(lanes=2), ring.hosts[0], ring.servers[0]) as driver:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(expect, driver, "stalled", ring.route[place].peer)
                    await warm(driver)
                    model[place].hang.set()
                    assert await trio.to_thread.run_sync(model[place].hangs.wait, 30)
                    early = ring.hosts[place].running_s
                    while ring.hosts[place].running_s <= early:
                        await trio.lowlevel.checkpoint()
                assert ring.hosts[place].running_s > early >= 0.0  # whoever waited has gone, it hangs on
            model[place].let.set()
            while ring.hosts[place].running_s:
                await trio.lowlevel.checkpoint()

    try:
        run(main)
    finally:
        model[place].let.set()


async def expect(driver: ChainDriver, reason: str, peer: str | None) -> None:
    with pytest.raises(ChainBroken) as caught:
        await driver.generate(ASKED)
    assert (caught.value.failure.reason, caught.value.failure.peer) == (reason, peer)


@pytest.mark.parametrize(("cuts", "place"), [((2, 4), 1), ((1, 2, 4), 1), ((1, 2, 4), 2)])
def test_a_peer_that_falls_silent_is_missed_soon_and_named_where_it_is_the_only_one(
    cuts: tuple[int, ...], place: int
) -> None:
    async def main() -> None:
        async with (
            memory_ring(stages(*cuts), version=V0, limits=PATIENT) as ring,
            open_chain(ring.ring(lanes=2), ring.hosts[0], ring.servers[0]) as driver,
            trio.open_nursery() as nursery,
        ):
            peer = ring.route[place].peer
            nursery.start_soon(expect, driver, "silent", peer if len(cuts) == 2 else None)
            await warm(driver)
            ring.network.uplink_bytes_s[peer] = 1e-9  # nothing that it sends arrives any more

    run(main)


def test_an_idle_ring_misses_a_silent_peer_by_its_beats() -> None:
    async def main() -> None:
        limits = replace(PATIENT, beat_s=0.05)
        async with (
            memory_ring(stages(2, 4), version=V0, limits=limits) as ring,
            open_chain(ring.ring(), ring.hosts[0], ring.servers[0]) as driver,
        ):
            await driver.generate(replace(ASKED, sampling=Sampling(max_new_tokens=30)))
            ring.network.uplink_bytes_s[ring.route[1].peer] = 1e-9
            await driver.failed.wait()
            assert isinstance(driver.fault, ChainBroken)
            assert driver.fault.failure.reason == "silent"

    run(main)
