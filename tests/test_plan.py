"""Chains cover the model, fit their peers, stay while their members stay, and are as many as the peers allow."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from echo_p2p.chain.plan import plan, split
from echo_protocols.peer import Capacity, Plan

Peers = dict[str, Capacity]

swarms = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.builds(Capacity, max_layers=st.integers(0, 14), layers_per_s=st.sampled_from([0.0, 1.0, 3.0, 10.0])),
    max_size=10,
)
depths = st.integers(1, 12)


def holds(layers: int, speed: float = 1.0) -> Capacity:
    return Capacity(max_layers=layers, layers_per_s=speed)


def spans(made: Plan) -> list[list[tuple[str, int, int]]]:
    return [[(stop.peer, stop.span.start, stop.span.end) for stop in chain] for chain in made.chains]


def assert_fits(made: Plan, peers: Mapping[str, Capacity]) -> None:  # Plan checks covering and overlap itself
    for chain in made.chains:
        for stop in chain:
            assert len(stop.span) <= peers[stop.peer].max_layers


def test_nobody_makes_no_chain() -> None:
    assert plan({}, 4, None) == Plan(number=0, layers=4)
    assert plan({"a": holds(0)}, 4, None).chains == ()


def test_a_peer_that_can_hold_everything_is_a_chain_of_one() -> None:
    made = plan({"a": holds(4), "b": holds(9)}, 4, None)
    assert spans(made) == [[("a", 0, 4)], [("b", 0, 4)]]
    assert made.number == 1


def test_two_halves_make_one_chain() -> None:
    assert spans(plan({"a": holds(2), "b": holds(2)}, 4, None)) == [[("a", 0, 2), ("b", 2, 4)]]


def test_spans_follow_speed_within_capacity() -> None:
    assert spans(plan({"slow": holds(9, 1.0), "fast": holds(9, 3.0)}, 12, None)) == [[("slow", 0, 3), ("fast", 3, 12)]]
    assert spans(plan({"slow": holds(9, 1.0), "fast": holds(5, 9.0)}, 12, None)) == [[("slow", 0, 7), ("fast", 7, 12)]]


def test_an_unmeasured_peer_counts_as_a_usual_one() -> None:
    made = plan({"a": holds(9, 4.0), "b": holds(9, 0.0)}, 10, None)
    assert [len(stop.span) for stop in made.chains[0]] == [5, 5]


def test_split_is_as_good_as_trying_everything() -> None:
    capacities, speeds, layers = [5, 4, 7], [1.0, 2.5, 1.5], 11

    def slowest(shares: list[int]) -> float:
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    everything = [[i, j, layers - i - j] for i in range(1, 6) for j in range(1, 5) if 1 <= layers - i - j <= 7]
    assert slowest(split(capacities, speeds, layers)) == min(map(slowest, everything))


def test_a_chain_stays_when_others_join() -> None:
    peers = {"b": holds(2), "c": holds(2)}
    first = plan(peers, 4, None)
    second = plan(peers | {"a": holds(3), "d": holds(2), "e": holds(4)}, 4, first)
    assert second.chains[0] == first.chains[0]
    assert len(second.chains) == 3
    assert second.number == first.number + 1


def test_a_peer_that_can_not_be_placed_changes_nothing() -> None:
    first = plan({"a": holds(2), "b": holds(2)}, 4, None)
    assert plan({"a": holds(2), "b": holds(2), "c": holds(3)}, 4, first) is first


def test_a_chain_that_lost_a_member_dissolves_and_the_rest_are_placed_anew() -> None:
    first = plan({"a": holds(2), "b": holds(2), "c": holds(4)}, 4, None)
    second = plan({"a": holds(2), "c": holds(4)}, 4, first)
    assert spans(second) == [[("c", 0, 4)]]
    third = plan({"a": holds(2), "c": holds(4), "d": holds(3)}, 4, second)
    assert third.chains[0] == second.chains[0]
    assert {stop.peer for stop in third.chains[1]} == {"a", "d"}
    assert (first.number, second.number, third.number) == (1, 2, 3)


def test_a_chain_dissolves_when_a_member_no_longer_fits_its_span() -> None:
    first = plan({"a": holds(3), "b": holds(3)}, 4, None)
    second = plan({"a": holds(1), "b": holds(3)}, 4, first)
    assert spans(second) == [[("a", 0, 1), ("b", 1, 4)]]


def test_another_model_dissolves_every_chain() -> None:
    first = plan({"a": holds(4)}, 4, None)
    second = plan({"a": holds(4)}, 6, first)
    assert (second.layers, second.chains, second.number) == (6, (), 2)


@given(swarms, swarms, depths)
def test_every_plan_fits_sticks_and_leaves_no_chain_unmade(before: Peers, after: Peers, layers: int) -> None:
    first = plan(before, layers, None)
    second = plan(after, layers, first)
    for made, peers in ((first, before), (second, after)):
        assert_fits(made, peers)
        placed = {stop.peer for chain in made.chains for stop in chain}
        assert sum(peers[peer].max_layers for peer in peers.keys() - placed) < layers
    for chain in first.chains:
        stays = all(stop.peer in after and after[stop.peer].max_layers >= len(stop.span) for stop in chain)
        assert not stays or chain in second.chains
    assert (second.number == first.number) == (second.chains == first.chains)
    assert second.number - first.number in (0, 1)


@given(swarms, depths)
def test_the_order_of_the_peers_does_not_matter(peers: Peers, layers: int) -> None:
    made = plan(peers, layers, None)
    assert plan(dict(reversed(peers.items())), layers, None) == made
    assert plan(peers, layers, made) is made
