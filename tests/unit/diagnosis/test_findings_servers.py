"""A server that differs, in simulated runs: how often it is found, and how often one is where none does."""

import numpy as np
import pytest

from tests.support.findings import levels_of, run_of, seen_as
from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings import servers
from verl_ext.diagnosis.findings.registry import find_all


def simulated(seed, replicas, steps=40, *, scatter=0.5, heavy=False, excess=None, from_step=0, per_node=0):
    """k3 by replica around 1e-4, with independent noise in every step; `excess`: replica -> times the k3."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_t(2.5, (steps, replicas)) if heavy else rng.standard_normal((steps, replicas))
    k3 = 1e-4 * np.exp(scatter * noise)
    for replica, times in (excess or {}).items():
        k3[from_step:, replica] *= times
    names = BUCKETS["replica"]
    found = {f"vllm_kl/k3/replica/{names[i]}": k3[:, i].tolist() for i in range(replicas)}
    if per_node:
        by_node = k3.reshape(steps, -1, per_node).mean(2)
        found |= {f"vllm_kl/k3/node/{names[i]}": by_node[:, i].tolist() for i in range(by_node.shape[1])}
    return run_of(found)


def found_in(run):
    return find_all(run).get("server_differs")


@pytest.mark.parametrize(("replicas", "excess"), [(2, {1: 5.0}), (8, {3: 5.0}), (64, {63: 5.0}), (8, {3: 9.0, 5: 5.0})])
def test_a_server_of_a_larger_gap_is_named_with_its_step(replicas, excess):
    number = BUCKETS["replica"][next(iter(excess))]
    for seed in range(20):
        found = found_in(simulated(seed, replicas, excess=excess, from_step=10))
        assert found.mark == "server_differs.one" and f"replica {number}" in found.text
        assert abs(found.step - 11) <= 6


def test_a_node_is_named_where_all_its_servers_differ_and_a_server_where_it_alone_does():
    whole = found_in(simulated(1, 16, excess={4: 5.0, 5: 5.0, 6: 5.0, 7: 5.0}, per_node=4))
    assert whole.level == "one" and "node 01" in whole.text
    single = found_in(simulated(1, 16, excess={5: 9.0}, per_node=4))
    assert single.level == "one" and "replica 05" in single.text


@pytest.mark.parametrize("replicas", [2, 8, 64])
@pytest.mark.parametrize("steps", [8, 20, 100])
@pytest.mark.parametrize("heavy", [False, True])
def test_where_none_differs_none_is_named(replicas, steps, heavy):
    alarms = [found_in(simulated(seed, replicas, steps, scatter=1.0, heavy=heavy)).level for seed in range(100)]
    assert alarms.count("one") <= 1


def test_every_level_has_a_case_and_one_server_says_nothing():
    assert seen_as("server_differs.alike", simulated(1, 4)) == ("server_differs.alike", None)
    assert levels_of(servers) == {"server_differs.one", "server_differs.alike"}
    assert found_in(simulated(1, 1)) is None
    assert found_in(simulated(1, 4, steps=7, excess={1: 50.0})).level == "alike", "too few readings"


def test_float32_has_no_server_that_differs():
    same = {f"vllm_kl/k3/replica/{name}": [value] * 20 for name, value in (("00", 1e-14), ("01", 3e-12))}
    assert found_in(run_of(same)).level == "alike"
