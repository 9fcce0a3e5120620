import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.corrections import correction_metrics, icepop

RATIOS = st.lists(st.floats(0, 1e8, width=32), min_size=1, max_size=50)


@given(RATIOS)
def test_icepop_equals_the_papers_m_of_k(ratios):
    found = icepop(torch.tensor(ratios), alpha=0.5, beta=5.0)
    assert found.weight.tolist() == [k if 0.5 <= k <= 5.0 else 0.0 for k in ratios]
    assert found.low.tolist() == [k < 0.5 for k in ratios]
    assert found.high.tolist() == [k > 5.0 for k in ratios]


def test_icepop_bounds_are_inclusive():
    assert icepop(torch.tensor([0.5, 5.0]), 0.5, 5.0).weight.tolist() == [0.5, 5.0]


def test_icepop_weighs_nan_zero():
    assert icepop(torch.tensor([math.nan, math.inf]), 0.5, 5.0).weight.tolist() == [0.0, 0.0]


def test_icepop_weight_carries_no_gradient():
    k = torch.ones(2, requires_grad=True)
    assert not icepop(k, 0.5, 5.0).weight.requires_grad


@pytest.mark.parametrize("seed", range(3))
def test_icepop_equals_verls_own_bounds(seed):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    torch.manual_seed(seed)
    log_ratio = torch.randn(4, 16) * 1.5
    mask = (torch.rand(4, 16) < 0.8).float()
    mask[:, 0] = 1
    theirs, _ = compute_rollout_correction_weights(log_ratio, mask, rollout_is="token", rollout_is_threshold="0.5_5.0")
    ours = icepop(log_ratio.exp(), 0.5, 5.0).weight * mask
    torch.testing.assert_close(ours, theirs)


def test_metrics_of_a_case_counted_by_hand():
    # Three sequences of 3, 2 and 1 tokens; the last token of the first is not the model's.
    k = torch.tensor([0.1, 1.0, 9.0, 6.0, 7.0, 2.0])
    mask = torch.tensor([True, True, False, True, True, True])
    entropy = torch.tensor([3.0, 1.0, 100.0, 5.0, 4.0, 2.0])
    found = correction_metrics(icepop(k, 0.5, 5.0), mask, torch.tensor([0, 3, 5, 6]), entropy)
    assert found == pytest.approx(
        {
            "correction/dropped": 3 / 5,
            "correction/dropped_low": 1 / 5,
            "correction/dropped_high": 2 / 5,
            "correction/sequences_all_dropped": 1 / 3,
            "correction/weight_mean": (1.0 + 2.0) / 5,
            "correction/entropy_dropped": (3 + 5 + 4) / 3,
            "correction/entropy_kept": 1.5,
        }
    )


def test_a_masked_sequence_is_not_counted_as_dropped():
    mask = torch.tensor([True, False])
    found = correction_metrics(icepop(torch.tensor([1.0, 1.0]), 0.5, 5.0), mask, torch.tensor([0, 1, 2]))
    assert found["correction/sequences_all_dropped"] == 0


def test_no_token_gives_no_metric():
    weights = icepop(torch.ones(2), 0.5, 5.0)
    assert correction_metrics(weights, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2])) == {}
