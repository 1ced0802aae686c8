"""Real processes over the real stacks on loopback: a stage dies, stalls or computes wrongly, and no token is wrong."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

pytestmark = pytest.mark.slow

MORE_GROUPS = 30


def bench() -> ModuleType:
    """The swarm that the bench measures, here without a clock."""
    path = Path(__file__).parent / "bench" / "chain_failover.py"
    spec = importlib.util.spec_from_file_location("chain_failover", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their own
    spec.loader.exec_module(module)
    return module


BENCH = bench()
CASES = {case.name: case for case in BENCH.CASES}


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        pytest.param("killed_second", "noise"),
        *(pytest.param(each, "noise", marks=pytest.mark.long) for each in CASES if each != "killed_second"),
        pytest.param("corrupt", "nan", marks=pytest.mark.long),
    ],
)
def test_a_chain_goes_on_without_a_stage_that_fails_and_no_token_is_wrong(
    tmp_path: Path, name: str, spoil: str
) -> None:
    async def main() -> None:
        async with BENCH.scene(tmp_path, "inference.slowdown_s=0.004") as found:
            for peer in ("one", "two", "three"):
                await found.add(peer, spoil)
            await found.warm()
            (before,) = found.plan.chains
            victim = before[CASES[name].place]
            loads = {stop: loads_of(found, stop.peer) for stop in before}
            CASES[name].strike(found, victim.peer)
            await BENCH.eventually(lambda: bool(found.plan.chains) and found.plan.chains[0] != before)
            came = len(found.taken)
            await BENCH.eventually(lambda: len(found.taken) > came + MORE_GROUPS)
            for stop in set(before) & set(found.plan.chains[0]):  # only their neighbours have changed
                assert loads_of(found, stop.peer) == loads[stop]
            await CASES[name].mend(found, victim.peer)
            await BENCH.eventually(lambda: found.plan.span_of(victim.peer) is not None)
            check_groups(found)
            wrong, tokens = await BENCH.wrong_tokens(found)
            assert tokens > 1000
            assert wrong == 0
        assert found.fleet.processes() == []

    trio.run(main)


def loads_of(found: Any, peer: str) -> int:
    """How often a peer has loaded a span."""
    return int(found.nodes[peer].output().count("loaded span"))


def check_groups(found: Any) -> None:
    """Each number came once, whole, and with its own prompt: `check_group` has refused anything else."""
    numbers = [(each.worker, each.group.counter) for each in found.taken]
    assert len(set(numbers)) == len(numbers)
    assert not {"prompt-index", "logprob", "length", "segments", "duplicate"} & found.presence.border.refused.keys()
