"""Whether a model fits, and what would, in words."""

from dataclasses import replace

import pytest

from echo_p2p.chain.fit import layers_on, memory_for, refusal, shortfall, size_text
from echo_p2p.chain.pricing import Device, Workload

MIB = 2**20
WORK = Workload(
    layers=28, layer_values=15 * MIB, embedding_values=150 * MIB, head_values=150 * MIB, kv_values=2048, positions=544,
    rows=8,
)  # fmt: skip


def device(memory_bytes: int) -> Device:
    return Device(max_layers=28, memory_bytes=memory_bytes)


def test_what_is_said_to_be_needed_is_enough_and_no_byte_more() -> None:
    for layers in (1, 5):
        needed = memory_for(WORK, layers, 4, ends=False)
        assert layers_on(device(needed + 8), WORK) == layers
        assert layers_on(device(needed - 64), WORK) == layers - 1
    whole = memory_for(WORK, 28, 4, ends=True)
    assert layers_on(device(whole + 8), WORK) == 28


def test_keys_and_values_count() -> None:
    memory = memory_for(WORK, 4, 4, ends=False) + 8
    assert layers_on(device(memory), replace(WORK, rows=32)) < layers_on(device(memory), WORK) == 4


def test_a_refusal_names_what_would_help() -> None:
    free = 250 * MIB
    words = refusal(WORK, "Qwen/Qwen3-0.6B", free_bytes=free, share=0.5, value_bytes=4)
    needed = memory_for(WORK, 1, 4, ends=False)
    assert words.startswith(
        f"one layer of Qwen/Qwen3-0.6B needs {size_text(needed)}, 136 MiB of it for keys and values"
    )
    assert "this machine offers 125 MiB (memory_share 0.5 of 250 MiB free)" in words
    assert f"free {size_text(needed / 0.5 - free)}, or raise inference.memory_share to 0.9 (" in words
    assert ". " not in words


def test_advice_that_is_followed_helps() -> None:
    free, share = 1024 * MIB, 0.1
    assert layers_on(device(int(free * share)), WORK) == 0
    words = refusal(WORK, "m", free_bytes=free, share=share, value_bytes=4)
    raised = float(words.partition("memory_share to ")[2].partition(" ")[0].rstrip(","))
    assert layers_on(device(int(free * raised)), WORK) >= 1


def test_a_smaller_model_is_named_by_its_parameters() -> None:
    work = replace(WORK, rows=1, lanes=1)
    words = refusal(work, "m", free_bytes=80 * MIB, share=0.5, value_bytes=4)
    assert "a model of up to about" in words
    assert "memory_share to" in words
    tiny = refusal(WORK, "m", free_bytes=MIB, share=0.5, value_bytes=4)
    assert "parameters" not in tiny
    assert "memory_share to" not in tiny  # no share of so little would do


def test_the_trainer_hears_how_many_peers_are_missing() -> None:
    assert shortfall({}, WORK).startswith("no peer serves this run yet: its 28 layers need 7.3 GiB")
    small = device(10 * MIB)
    assert shortfall({"a": small}, WORK).startswith("no peer here has room for a layer")
    eight = device(memory_for(WORK, 8, 4, ends=False) + 8)
    assert shortfall({"a": eight, "b": eight}, WORK) == (
        "the peers here can hold 9 of 28 layers: about 3 more peers like the median would do"
    )
    assert "can't reach each other" in shortfall({name: eight for name in "abcde"}, WORK)


@pytest.mark.parametrize("count", range(1, 8))
def test_as_many_more_peers_as_it_says_are_about_enough(count: int) -> None:
    eight = device(memory_for(WORK, 8, 4, ends=False) + 8)
    words = shortfall({str(i): eight for i in range(count)}, WORK)
    if "about" in words:
        more = int(words.partition("about ")[2].partition(" ")[0])
        assert "can hold" not in shortfall({str(i): eight for i in range(count + more)}, WORK)
