import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.base.names import BUCKETS
from verl_ext.core.answers import Servers, answer_facts, answer_metrics, looped_tail, server_number


def longest_loop(tokens):
    """The rule word by word: every period, from the end backwards."""
    found = []
    for period in range(1, 257):
        length = period
        while length < min(len(tokens), 1024) and tokens[-1 - length] == tokens[-1 - length + period]:
            length += 1
        if length >= max(64, 4 * period) and length <= len(tokens):
            found.append((period, length))
    return min(found)[1] if found else 0


@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(0, 20),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_a_loop_is_found_as_the_rule_says(start, period, times, end):
    tokens = start + period * times + end
    assert looped_tail(tokens) == longest_loop(tokens)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], 0),
        ([7], 0),
        ([7] * 63, 0),
        ([1, *[7] * 64], 64),
        ([*range(16)] * 4, 64),
        ([*range(17)] * 3 + [*range(16)], 0),
        ([*range(256)] * 4, 1024),
        ([*range(257)] * 4, 0),
        ([7] * 100_000, 1024),
        ([*[7] * 100, 1], 0),
    ],
)
def test_loops_at_the_limits(tokens, found):
    assert looped_tail(tokens) == found


def test_the_facts_of_an_answer():
    assert answer_facts({"a:1"}, [1, 2]) == [server_number("a:1"), 0, 2, 0]
    assert answer_facts({"a:1", "a:2"}, [7] * 70) == [0, 70, 7, 0]
    assert answer_facts((), [], fresh=5) == [0, 0, -1, 5]


def test_an_answer_of_the_largest_length_is_cut_unless_it_ends():
    facts = torch.tensor([[1, 0, 9], [1, 64, 5], [1, 0, 5], [1, 0, 5]])
    found = answer_metrics(facts, [10, 10, 9, 10], added={3}, limit=10, end_ids={9})
    assert found == {"answers/looped": pytest.approx(1 / 3), "answers/cut": pytest.approx(1 / 3)}
    assert answer_metrics(facts[:0], [], added=set(), limit=10, end_ids=set()) == {}


def facts_of(*addresses):
    return torch.tensor([[server_number(address) if address else 0, 0, 0] for address in addresses])


def test_servers_have_verls_order_and_their_nodes_that_of_their_first():
    servers = Servers(["b:1", "[::1]:2", "b:3", "b:1"])
    found = servers.buckets(facts_of("b:3", "b:1", "[::1]:2", "later:9", None))
    names = {axis: [BUCKETS[axis][place] for place in places] for axis, places in found.items()}
    assert names == {"replica": ["02", "00", "01", "other", "other"], "node": ["00", "00", "01", "other", "other"]}
    assert Servers(["b:1"]).buckets(facts_of("b:1")) == Servers().buckets(facts_of("b:1")) == {}


def test_more_servers_than_buckets_share_the_last():
    addresses = [f"{host}:{port}" for host, port in itertools.product(range(70), range(2))]
    found = Servers(addresses).buckets(facts_of(*addresses))
    assert found["replica"].tolist() == [min(number, 64) for number in range(140)]
    assert found["node"].tolist() == [min(number // 2, 64) for number in range(140)]


def test_servers_of_several_kinds_of_accelerators_are_told_apart():
    accelerators = {"b": "H100", "::1": "H20"}
    servers = Servers(["b:1", "[::1]:2", "b:3", "c:4"], accelerators)
    assert servers.kinds == ["H100", "H20", "H100", ""]
    assert servers.mixed == "H100: 00, 02; H20: 01; unknown: 03"
    assert str(servers).split(", ")[:2] == ["00 b:1 (H100)", "01 [::1]:2 (H20)"]
    for alike in (["b:1", "b:3", "c:4"], ["c:4", "d:5"], []):
        assert Servers(alike, accelerators).mixed == ""
