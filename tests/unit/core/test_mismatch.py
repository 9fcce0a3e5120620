import math

import pytest
import torch

from verl_ext.core.mismatch import LOG_RATIO_BOUND, count_non_finite, mismatch_ratio


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
