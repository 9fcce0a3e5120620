import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.mismatch import LOG_RATIO_BOUND, count_non_finite, mismatch_metrics, mismatch_ratio

LOG_PROBS = st.floats(-30, 0, width=32)
TOKENS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.booleans()), min_size=1, max_size=40)


def oracle(tokens):
    """The formulas in plain Python floats, token by token."""
    pairs = [(a, b) for a, b, keep in tokens if keep]
    if not pairs:
        return {}
    n = len(pairs)
    logs = [max(-20.0, min(20.0, old - infer)) for infer, old in pairs]
    k = [math.exp(x) for x in logs]
    diff = [abs(math.exp(infer) - math.exp(old)) for infer, old in pairs]
    mean = math.fsum(diff) / n
    return {
        "vllm_kl/k1": math.fsum(infer - old for infer, old in pairs) / n,
        "vllm_kl/k3": math.fsum(math.expm1(x) - x for x in logs) / n,
        "vllm_kl/prob_diff_mean": mean,
        "vllm_kl/prob_diff_max": max(diff),
        "vllm_kl/prob_diff_std": math.sqrt(math.fsum((d - mean) ** 2 for d in diff) / n),
        "vllm_kl/log_ratio_abs_mean": math.fsum(abs(infer - old) for infer, old in pairs) / n,
        "vllm_kl/log_ratio_abs_max": max(abs(infer - old) for infer, old in pairs),
        "vllm_kl/ess": math.fsum(k) ** 2 / math.fsum(x * x for x in k) / n,
        "vllm_kl/chi2": math.fsum(x * x for x in k) / n - 1,
    }


def columns(tokens):
    infer, old, mask = zip(*tokens, strict=True)
    return torch.tensor(infer), torch.tensor(old), torch.tensor(mask)


@given(TOKENS)
def test_metrics_equal_the_oracle(tokens):
    expected = oracle(tokens)
    found = mismatch_metrics(*columns(tokens))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@given(TOKENS)
def test_k3_is_never_negative_and_ess_at_most_one(tokens):
    found = mismatch_metrics(*columns(tokens))
    if found:
        assert found["vllm_kl/k3"] >= 0
        assert 0 < found["vllm_kl/ess"] <= 1 + 1e-12


def test_k3_keeps_its_digits_at_the_log_ratios_of_a_healthy_run():
    infer = torch.full((1000,), -1.0)
    old = infer + 2.0**-13
    x = 2.0**-13
    assert mismatch_metrics(infer, old, infer < 0)["vllm_kl/k3"] == pytest.approx(x * x / 2 * (1 + x / 3), rel=1e-8)


def test_masked_tokens_do_not_count_even_when_they_are_nan():
    infer, old = torch.tensor([-1.0, float("nan")]), torch.tensor([-1.5, -2.0])
    found = mismatch_metrics(infer, old, torch.tensor([True, False]))
    assert found["vllm_kl/k1"] == pytest.approx(0.5)


def test_no_token_gives_no_metric():
    assert mismatch_metrics(torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool)) == {}


def test_ratio_is_clamped_and_nan_stays():
    k = mismatch_ratio(torch.tensor([-100.0, 0.0, float("nan")]), torch.tensor([0.0, -100.0, 0.0]))
    assert k[0].item() == pytest.approx(math.exp(LOG_RATIO_BOUND), rel=1e-6)
    assert k[1].item() == pytest.approx(math.exp(-LOG_RATIO_BOUND), rel=1e-6)
    assert math.isnan(k[2].item())


def test_ratio_of_half_precision_is_taken_in_float32():
    infer, old = torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-2.0], dtype=torch.bfloat16)
    assert mismatch_ratio(infer, old).dtype == torch.float32


def test_non_finite_values_are_counted_under_the_mask_only():
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    assert count_non_finite(values, torch.tensor([True, True, False, True])) == 2
