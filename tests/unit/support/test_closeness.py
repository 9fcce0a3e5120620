"""`close` accepts what differs by rounding on another machine, and nothing else."""

import math

import pytest
import torch

from tests.support.closeness import close


@pytest.mark.parametrize(
    ("found", "expected", "settings"),
    [
        ([13.9, 2.6e-6], [13.9, 0.0], {}),  # the recomputation of a gradient on another CPU
        (1.0 + 1e-6, 1.0, {}),
        (torch.tensor([1], dtype=torch.int64), [1.0], {}),
        ([0.0, 0.0], [0.0, 0.0], {"rtol": 0.0}),
        ([], [], {}),
        ([math.nan, math.inf, -math.inf, 1.0], [math.nan, math.inf, -math.inf, 1.0], {}),
        ([math.nan], [math.nan], {}),
        (1e-6, 0.0, {"scale": 1.0}),
        (torch.ones(2, requires_grad=True), torch.ones(2).bfloat16(), {}),
    ],
)
def test_what_is_close(found, expected, settings):
    close(found, expected, **settings)


@pytest.mark.parametrize(
    ("found", "expected", "settings", "message"),
    [
        ([13.9, 2e-4], [13.9, 0.0], {}, r"gradient: 0.0002 instead of 0.0 at \(1,\): 0.0002 apart, where 1e-05"),
        ([1e-9], [0.0], {}, "of the scale 0 is allowed"),
        ([[1.0, 2.0]], [[1.0, 2.1]], {"rtol": 1e-3}, r"at \(0, 1\)"),
        ([1.0, 1.0], [1.0, math.nan], {}, r"NaN or infinities differ: \[1.0\] instead of \[nan\]"),
        ([math.nan, 1.0], [1.0, 1.0], {}, "NaN or infinities differ"),
        ([math.inf], [-math.inf], {}, "NaN or infinities differ"),
        ([1.0], 1.0, {}, r"shape \(1,\) instead of \(\)"),
    ],
)
def test_what_is_not(found, expected, settings, message):
    with pytest.raises(AssertionError, match=message):
        close(found, expected, name="gradient", **settings)
