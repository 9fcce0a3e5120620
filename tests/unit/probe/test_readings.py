import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from verl_ext.probe.readings import DECODE, PREFILL, REPLAYED, TRAIN, Pair, compare
from verl_ext.probe.states import Place
from verl_ext.probe.verdict import HEAD, verdict


def oracle(log_q, log_p):
    """In float64, token by token: mean of r - log r - 1, the log-ratio clamped to +-20; largest; share of equals."""
    pairs = [(float(q), float(p)) for q, p in zip(log_q, log_p, strict=True) if math.isfinite(p) and math.isfinite(q)]
    if not pairs:
        return 0.0, 0.0, 0.0
    x = [min(max(p - q, -20.0), 20.0) for q, p in pairs]
    k3 = math.fsum(math.expm1(v) - v for v in x) / len(x)
    return k3, max(abs(p - q) for q, p in pairs), sum(p == q for q, p in pairs) / len(pairs)


log_probs = arrays.arrays(np.float32, 12, elements=st.floats(-40, 0, width=32) | st.just(-math.inf))


@given(log_probs, log_probs)
def test_a_pair_against_the_oracle(log_q, log_p):
    positions = torch.arange(12) * 200
    (pair,) = compare({DECODE: torch.from_numpy(log_q), TRAIN: torch.from_numpy(log_p)}, positions)
    k3, largest, equal = oracle(log_q, log_p)
    assert (pair.k3, pair.largest, pair.equal) == pytest.approx((k3, largest, equal), rel=1e-9, abs=1e-15)
    assert pair.not_finite == sum(not math.isfinite(float(p) - float(q)) for q, p in zip(log_q, log_p, strict=True))
    inside = [i for i in range(12) if math.isfinite(float(log_p[i]) - float(log_q[i]))]
    for bounds, found in (((0, 256), "0-256"), ((256, 1024), "256-1024"), ((1024, 4096), "1024-4096")):
        rows = [i for i in inside if bounds[0] <= 200 * i < bounds[1]]
        assert (found in pair.by_position) == bool(rows)
        if rows:
            assert pair.by_position[found] == pytest.approx(oracle(log_q[rows], log_p[rows])[0], rel=1e-9, abs=1e-15)


def test_buckets_of_probability_are_those_of_what_is_sampled_from():
    log_q, log_p = torch.tensor([-0.05, -5.0]), torch.tensor([-0.06, -5.5])
    (pair,) = compare({DECODE: log_q, TRAIN: log_p}, torch.tensor([0, 1]))
    assert list(pair.by_probability) == ["0-0.01", "0.9-"]
    assert pair.by_probability["0-0.01"] > pair.by_probability["0.9-"] > 0


def test_pairs_are_of_the_readings_that_there_are():
    readings = {name: torch.zeros(2) for name in (DECODE, PREFILL, TRAIN)}
    pairs = compare(readings, torch.arange(2))
    assert [(pair.one, pair.other) for pair in pairs] == [(DECODE, TRAIN), (DECODE, PREFILL), (PREFILL, TRAIN)]
    assert all(pair.equal == 1 and pair.k3 == 0 for pair in pairs)


def pairs_of(whole, sampling, rest, replayed=None):
    found = {(DECODE, TRAIN): whole, (DECODE, PREFILL): sampling, (PREFILL, TRAIN): rest}
    if replayed is not None:
        found[DECODE, REPLAYED] = replayed
    return [Pair(one, other, k3, k3 / 10, 0.1, 0.0, {}, {}) for (one, other), k3 in found.items()]


@pytest.mark.parametrize(
    ("pairs", "cause", "said"),
    [
        (pairs_of(1e-14, 1e-15, 1e-14), "none", "agree"),
        (pairs_of(1e-3, 9e-4, 1e-4), "sampling path", "does not agree with itself"),
        (pairs_of(1e-13, 1e-3, 1e-3), "sampling path", "does not agree with itself"),
        (pairs_of(1e-3, 1e-6, 1e-3, 1e-4), "routing", "90% of the gap is routing"),
        (pairs_of(1e-3, 1e-6, 1e-3, 9e-4), "arithmetic", "with the rollout's experts replayed 9.0e-04"),
        (pairs_of(1e-3, 1e-6, 1e-3), "arithmetic", "compute differently"),
    ],
)
def test_the_verdict_says_which_pair_holds_the_gap(pairs, cause, said):
    found = verdict(pairs, [])
    assert found.cause == cause and said in found.sentence
    assert (found.advice == "stability=r3") == (cause == "routing")


PLACES = [Place("embedding", 0.0), Place("0.attention", 1e-7), Place("0.layer", 2e-7), Place("norm", 2e-7)]


@pytest.mark.parametrize(
    ("changed", "dtype", "start"),
    [
        ({}, "float32", HEAD),  # k3 of 1e-3 cannot come from such states
        ({2: 0.3, 3: 0.3}, "float32", "0.layer"),
        ({1: 1e-2, 2: 1e-2, 3: 1e-2}, "bfloat16", ""),  # rounding
        ({1: 1e-2, 2: 0.5, 3: 0.5}, "bfloat16", "0.layer"),
    ],
)
def test_where_it_starts_is_more_than_the_rounding_of_a_dtype(changed, dtype, start):
    places = [replace(place, error=changed.get(index, place.error)) for index, place in enumerate(PLACES)]
    found = verdict(pairs_of(1e-3, 0.0, 1e-3), places, dtype)
    assert (found.cause, found.start) == ("arithmetic", start)
    assert (start or "nothing stands out") in found.advice or (start == HEAD and "temperature" in found.advice)
