"""Turns at a stage: computed one at a time and in order, with the next one ready; sent on in order."""

import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from echo_p2p.chain.turns import UNDER_WAY, Turns
from echo_p2p.errors import ChainError


def with_deadline(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        with trio.fail_after(20):
            await main()

    trio.run(run)


def test_turns_are_computed_and_left_in_the_order_in_which_they_began() -> None:
    async def main() -> None:
        turns, computed, left, running = Turns(), list[int](), list[int](), threading.Lock()

        def compute(number: int) -> None:
            assert running.acquire(blocking=False)
            computed.append(number)
            running.release()

        async def take(number: int) -> None:
            with await turns.begin() as turn:
                await turn.run(lambda: compute(number))
                left.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(take, number)
                await trio.testing.wait_all_tasks_blocked() if number < UNDER_WAY else await trio.lowlevel.checkpoint()
        assert computed == left
        assert sorted(left) == list(range(50))

    with_deadline(main)


def test_the_next_turn_is_in_its_thread_while_one_computes() -> None:
    async def main() -> None:
        turns, go, second = Turns(), threading.Event(), threading.Event()

        async def first_turn() -> None:
            with await turns.begin() as turn:
                await turn.run(go.wait)
                await trio.to_thread.run_sync(second.wait)  # it computes while what the first has made is sent on

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first_turn)
            await trio.testing.wait_all_tasks_blocked()
            with await turns.begin() as turn:
                go.set()
                await turn.run(second.set)

    with_deadline(main)


def test_a_turn_alone_waits_for_all_others_and_lets_none_begin() -> None:
    async def main() -> None:
        turns, go, events = Turns(), threading.Event(), list[str]()

        async def step(name: str) -> None:
            with await turns.begin() as turn:
                await turn.run(go.wait)
                events.append(name)

        async def switch() -> None:
            async with turns.alone() as turn:
                await turn.run(lambda: events.append("switch"))
                await trio.testing.wait_all_tasks_blocked()

        async with trio.open_nursery() as nursery:
            for task, args in ((step, ("before",)), (switch, ()), (step, ("after",))):
                nursery.start_soon(task, *args)
                await trio.testing.wait_all_tasks_blocked()
            assert not events
            go.set()
        assert events == ["before", "switch", "after"]

    with_deadline(main)


def test_a_turn_that_is_cancelled_before_it_computes_does_not_compute_and_does_not_stop_the_next() -> None:
    async def main() -> None:
        turns, go, computed = Turns(), threading.Event(), list[str]()

        async def stuck() -> None:
            with await turns.begin() as turn:
                await turn.run(go.wait)

        async def left_out(scope: trio.CancelScope) -> None:
            with scope, await turns.begin() as turn:
                await turn.run(lambda: computed.append("left out"))

        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stuck)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(left_out, scope)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            go.set()
            with await turns.begin() as turn:
                await turn.run(lambda: computed.append("next"))
        assert computed == ["next"]

    with_deadline(main)


def test_a_turn_without_work_is_passed_over() -> None:
    async def main() -> None:
        turns = Turns()
        with await turns.begin():
            pass
        with await turns.begin() as turn:
            assert await turn.run(lambda: 7) == 7
        with pytest.raises(ChainError, match="engine"), await turns.begin() as turn:
            await turn.run(_fail)
        with await turns.begin() as turn:
            assert await turn.run(lambda: 8) == 8

    with_deadline(main)


def _fail() -> None:
    raise ChainError("engine")


def test_a_turn_that_is_cancelled_before_its_thread_starts_holds_nobody_up() -> None:
    async def main() -> None:
        turns = Turns()
        with trio.fail_after(10):
            for _ in range(5):
                with trio.CancelScope() as scope, await turns.begin() as turn:
                    scope.cancel()
                    await turn.run(lambda: pytest.fail("it was cancelled"))
                assert scope.cancelled_caught
            with await turns.begin() as turn:
                assert await turn.run(lambda: 7) == 7
            async with turns.alone() as turn:
                assert await turn.run(lambda: 8) == 8

    trio.run(main)
