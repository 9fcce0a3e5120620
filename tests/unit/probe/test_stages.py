import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from verl_ext.probe.stages import SYNC, UPDATE, Stage, said_of, stage


def oracle(before, after):
    """In float64, token by token: k3 before and after, and how far each side has moved."""

    def mean(values):
        kept = [value for value in values if math.isfinite(value)]
        return math.fsum(kept) / len(kept) if kept else None

    def k3(log_q, log_p):
        apart = [float(p) - float(q) for q, p in zip(log_q, log_p, strict=True)]
        bounded = [min(max(x, -20.0), 20.0) for x in apart if math.isfinite(x)]
        return mean([math.expm1(x) - x for x in bounded])

    moved = [
        mean([abs(float(b) - float(a)) for a, b in zip(*each, strict=True)]) for each in zip(before, after, strict=True)
    ]
    return [k3(*before), k3(*after), *moved]


log_probs = arrays.arrays(np.float32, 7, elements=st.floats(-40, 0, width=32) | st.just(-math.inf))


@given(st.tuples(log_probs, log_probs), st.tuples(log_probs, log_probs))
def test_a_stage_against_the_oracle(before, after):
    found = stage(SYNC, *(tuple(torch.from_numpy(one) for one in each) for each in (before, after)))
    numbers = [found.before, found.after, found.rollout_moved, found.train_moved]
    for number, other in zip(numbers, oracle(before, after), strict=True):
        assert number == (None if other is None else pytest.approx(other, rel=1e-9, abs=1e-15))
    assert (found.tokens, found.rollout_not_finite, found.train_not_finite) == (
        7,
        *(np.isinf(one).sum() for one in after),
    )


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Stage(SYNC, 1e-4, 1e-4, 0.0, 0.0), "changes nothing"),
        (Stage(SYNC, 1e-4, 1e-2, 0.1, 0.0), "What it sends is not what"),
        (Stage(SYNC, 1e-4, 1e-4, 0.1, 0.0), "moves the rollout by 1.0e-01"),
        (Stage(UPDATE, 1e-4, 1e-4, 0.0, 0.0), "its learning rate is 0"),
        (Stage(UPDATE, 1e-4, 1e-2, 0.0, 0.1), "does not arrive"),
        (Stage(UPDATE, 1e-4, 1e-2, 0.1, 0.1), "One update widens the gap"),
        (Stage(UPDATE, 1e-4, 1.1e-4, 0.1, 0.1), "moves training by 1.0e-01"),
        (Stage(SYNC, 1e-4, None, None, 0.0, 9, rollout_not_finite=9), "9 of 9 tokens have a log-probability of NaN"),
        (Stage(UPDATE, 1e-4, 1e-4, 0.1, 0.1, 9, train_not_finite=1), "1 of 9 tokens have a log-probability of NaN"),
        (Stage(SYNC, None, 1e-4, None, 0.0, 9), "what it changed is not known"),
        (Stage(UPDATE, 1e-2, 1e-2, 1e-6, 1e-5), "moves training by 1.0e-05"),  # less than the gap can show
    ],
)
def test_what_a_stage_says(one, said):
    assert said in said_of([one])[0]
