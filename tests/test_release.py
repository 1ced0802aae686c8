"""Parts of a model, and the hash of a policy."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from echo_protocols.release import Chunk, part_of, parts_of, policy_hash, total_bytes
from echo_protocols.values import Span


def test_tensors_belong_to_their_layer_or_to_an_end_of_the_model():
    assert part_of("model.layers.11.self_attn.q_proj.weight") == "layer.11"
    assert part_of("model.language_model.layers.0.mlp.down_proj.weight") == "layer.0"
    assert part_of("model.embed_tokens.weight") == "embed"
    assert part_of("model.norm.weight") == part_of("lm_head.weight") == "head"


def test_a_span_needs_its_layers_and_the_ends_that_it_holds():
    assert parts_of(Span(start=1, end=3, layers=4), tied=True) == ("layer.1", "layer.2")
    assert parts_of(Span(start=0, end=1, layers=4), tied=False) == ("embed", "layer.0")
    assert parts_of(Span(start=3, end=4, layers=4), tied=False) == ("layer.3", "head")
    assert parts_of(Span(start=3, end=4, layers=4), tied=True) == ("embed", "layer.3", "head")
    assert parts_of(Span(start=0, end=1, layers=1), tied=True) == ("embed", "layer.0", "head")


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n), max_size=5))))
def test_the_spans_of_a_chain_need_every_part(model):
    layers, cuts = model
    edges = sorted({0, layers, *cuts})
    spans = [Span(start=start, end=end, layers=layers) for start, end in pairwise(edges)]
    held = {part for span in spans for part in parts_of(span, tied=False)}
    assert held == {"embed", "head", *(f"layer.{i}" for i in range(layers))}


results = st.dictionaries(st.text(min_size=1, max_size=12), st.binary(min_size=32, max_size=32), max_size=6)


@given(results, results)
def test_the_policy_hash_is_of_the_parts_whatever_their_order(one, other):
    assert policy_hash(one) == policy_hash(dict(reversed(one.items())))
    assert (policy_hash(one) == policy_hash(other)) == (one == other)


def test_bytes_of_chunks_add_up():
    chunks = [Chunk(part="head", hash=bytes(32), size_bytes=n, base=None, result=bytes(32)) for n in (1, 20, 300)]
    assert total_bytes(chunks) == 321
