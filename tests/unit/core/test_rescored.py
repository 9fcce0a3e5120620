"""The two parts of the gap of rescored trajectories, against plain Python floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from verl_ext.core.measure import split_gap
from verl_ext.core.tokens import Lag, Tokens

LOG_PROBS = st.floats(-6, 0, width=32)
TOKEN = st.tuples(LOG_PROBS, LOG_PROBS, LOG_PROBS | st.just(math.nan), st.booleans())  # l_infer, l of then, l_old, m
BATCH = st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=5)


def split(batch, rows):
    batch = [batch[row] for row in rows]
    infer, then, old, mask = (torch.tensor([token[i] for row in batch for token in row]) for i in range(4))
    offsets = torch.tensor([0, *map(len, batch)]).cumsum(0)
    return split_gap(Tokens(infer, old, mask.bool(), offsets), then.split(offsets.diff().tolist()))


def oracle(batch, rows):
    tokens = [token for row in rows for token in batch[row] if token[3] and math.isfinite(token[2])]
    if not tokens:
        return {}

    def mean(term, first, second):
        return math.fsum(term(token[second] - token[first]) for token in tokens) / len(tokens)

    def k3(log_k):
        return math.expm1(log_k) - log_k

    return {
        "vllm_kl/engine/k1": mean(lambda x: -x, 0, 1),
        "vllm_kl/engine/k3": mean(k3, 0, 1),
        "vllm_kl/engine/log_ratio_abs_mean": mean(abs, 0, 1),
        "vllm_kl/stale/k1": mean(lambda x: -x, 1, 2),
        "vllm_kl/stale/k3": mean(k3, 0, 2) - mean(k3, 0, 1),
        "vllm_kl/rescored": sum(any(token[3] and math.isfinite(token[2]) for token in batch[row]) for row in rows),
    }


@at_most(50)
@given(batch=BATCH, seed=st.integers(0, 99))
def test_the_parts_equal_the_oracle(batch, seed):
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = order[: 1 + seed % len(batch)]
    assert split(batch, rows) == pytest.approx(oracle(batch, rows), rel=1e-5, abs=1e-9)


def test_of_a_trajectory_that_versions_share_only_the_newest_ones_tokens_count():
    """The first has two generated tokens of its newest version, the last one of a tool; the second has one version."""
    infer, then = torch.tensor([-1.0, -2.0, -3.0, -1.5, -1.0, -2.0]), torch.tensor([-9.0, -2.5, -3.5, -9.0, -1.5, -2.5])
    mask = torch.tensor([True, True, True, False, True, True])
    lag = Lag(torch.tensor([1, 2]), torch.tensor([2, 2]), torch.tensor([2, 2]))
    batch = Tokens(infer, infer, mask, torch.tensor([0, 4, 6]), lag=lag)
    found = split_gap(batch, [then[:4], then[4:]])
    assert found["vllm_kl/engine/log_ratio_abs_mean"] == pytest.approx(0.5)
    assert found["vllm_kl/rescored"] == 2
    unknown = Tokens(infer, infer, mask, batch.offsets, lag=Lag(lag.newest, lag.oldest))
    assert split_gap(unknown, [then[:4], then[4:]])["vllm_kl/rescored"] == 1
