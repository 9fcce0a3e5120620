"""The mismatch by the sign of the advantage, and of single tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core import mismatch
from verl_ext.core.mismatch import (
    LOG_RATIO_BOUND,
    advantage_metrics,
    count_non_finite,
    mismatch_ratio,
    signs_of_rows,
    sums_by_row,
    sums_by_sign,
)
from verl_ext.core.tokens import Tokens, jagged


def oracle(l_infer, l_old, mask, advantages):
    """Computes the metrics in float64, sign by sign, token by token."""
    finite = [m and math.isfinite(a) and math.isfinite(b) for m, a, b in zip(mask, l_infer, l_old, strict=True)]
    total = sum(finite)
    found, k1_of = {}, {}
    for name, has in (("positive", lambda a: a > 0), ("negative", lambda a: a < 0)):
        rows = [
            (float(i), float(o)) for i, o, f, a in zip(l_infer, l_old, finite, advantages, strict=True) if f and has(a)
        ]
        if total:
            found[f"vllm_kl/share/advantage/{name}"] = len(rows) / total
        if rows:
            k1_of[name] = math.fsum(i - o for i, o in rows) / len(rows)
            bounded = [min(max(o - i, -20.0), 20.0) for i, o in rows]
            found[f"vllm_kl/k1/advantage/{name}"] = k1_of[name]
            found[f"vllm_kl/k3/advantage/{name}"] = math.fsum(math.expm1(x) - x for x in bounded) / len(rows)
    if len(k1_of) == 2:
        found["vllm_kl/advantage_skew"] = k1_of["positive"] - k1_of["negative"]
    return found


def tokens_of(l_infer, l_old, mask):
    offsets = torch.tensor([0, len(mask)])
    return Tokens(torch.tensor(l_infer), torch.tensor(l_old), torch.tensor(mask, dtype=torch.bool), offsets)


log_probs = st.one_of(st.floats(-60, 0, width=32), st.sampled_from([math.nan, -math.inf]))
row = st.tuples(log_probs, log_probs, st.booleans(), st.sampled_from([-1.5, -0.0, 0.0, 1e-30, 2.0]))


@given(st.lists(row, min_size=1, max_size=40), st.integers(1, 50))
def test_against_the_oracle_whatever_the_block(rows, block):
    l_infer, l_old, mask, advantages = (list(column) for column in zip(*rows, strict=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mismatch, "TOKENS_AT_ONCE", block)
        signs = torch.tensor(advantages, dtype=torch.float64)
        found = advantage_metrics(sums_by_sign(tokens_of(l_infer, l_old, mask), signs))
    wanted = oracle(np.float32(l_infer), np.float32(l_old), mask, advantages)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@given(st.lists(st.tuples(st.lists(row, max_size=6), st.sampled_from([None, -1.5, 0.0, 2.0])), min_size=1, max_size=6))
def test_by_trajectory_as_by_token(trajectories):
    """For None each token has its own advantage; otherwise all generated tokens have the same."""
    rows = [token for tokens, _ in trajectories for token in tokens]
    offsets = torch.tensor([0, *(len(tokens) for tokens, _ in trajectories)]).cumsum(0)
    l_infer, l_old, mask, own = (torch.tensor([token[i] for token in rows], dtype=torch.float64) for i in range(4))
    given_to = torch.tensor([math.nan if one is None else one for tokens, one in trajectories for _ in tokens])
    advantages = torch.where(given_to.isnan(), own, given_to) * mask
    tokens = Tokens(l_infer, l_old, mask.bool(), offsets)
    found, left = signs_of_rows(sums_by_row(tokens), jagged(advantages, offsets))
    alike = {index for index, (_, one) in enumerate(trajectories) if one is not None}
    assert not alike & set(left)
    for index in left:
        part = slice(int(offsets[index]), int(offsets[index + 1]))
        one = Tokens(l_infer[part], l_old[part], tokens.mask[part], torch.tensor([0, part.stop - part.start]))
        found += sums_by_sign(one, advantages[part])
    torch.testing.assert_close(found, sums_by_sign(tokens, advantages), rtol=1e-9, atol=1e-6)


def test_ratio_is_clamped_and_nan_stays():
    k = mismatch_ratio(torch.tensor([-100.0, 0.0, float("nan")]), torch.tensor([0.0, -100.0, 0.0]))
    assert k[0].item() == pytest.approx(math.exp(LOG_RATIO_BOUND), rel=1e-5)
    assert k[1].item() == pytest.approx(math.exp(-LOG_RATIO_BOUND), rel=1e-5)
    assert math.isnan(k[2].item())


def test_ratio_of_half_precision_is_taken_in_float32():
    infer, old = torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-2.0], dtype=torch.bfloat16)
    assert mismatch_ratio(infer, old).dtype == torch.float32


def test_non_finite_values_are_counted_under_the_mask_only():
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    assert count_non_finite(values, torch.tensor([True, True, False, True])) == 2
