"""The gap of combine weights against a float64 total variation over all experts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.combine import weight_gap

EXPERTS = 9


def drawn(tokens, layers, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, layers, EXPERTS, generator=generator).argsort(-1)[..., :top_k]
    weights = torch.rand(tokens, layers, top_k, generator=generator) + 1e-3
    return ids, weights


def total_variation(ids, weights, other_ids, other_weights):
    def dense(ids, weights):
        weights = weights.double()
        return torch.zeros(*ids.shape[:2], EXPERTS, dtype=torch.float64).scatter(
            2, ids, weights / weights.sum(-1, keepdim=True)
        )

    return (dense(ids, weights) - dense(other_ids, other_weights)).abs().sum(-1) / 2


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, EXPERTS), st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_it_is_the_total_variation_of_the_shares(tokens, layers, top_k, scale, seed):
    ids, weights = drawn(tokens, layers, top_k, seed)
    other_ids, other_weights = drawn(tokens, layers, top_k, seed + 1)
    found = weight_gap(ids.to(torch.uint8), weights, other_ids.to(torch.int16), scale * other_weights)
    assert found.dtype == torch.float32
    expected = total_variation(ids, weights, other_ids, other_weights)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    same = weight_gap(ids.flip(-1).to(torch.uint8), scale * weights.flip(-1), ids, weights)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-6)


def test_experts_that_have_nothing_in_common_are_apart_by_1_and_rows_of_zeros_too():
    ids, weights = torch.tensor([[[0, 1]]]), torch.tensor([[[0.5, 0.5]]])
    assert weight_gap(ids, weights, ids + 2, weights).item() == 1
    assert weight_gap(ids, weights, ids, torch.zeros_like(weights)).item() == 1


def test_a_weight_that_is_no_number_makes_a_gap_that_is_none():
    ids, weights = torch.tensor([[[0, 1]], [[0, 1]]]), torch.tensor([[[0.5, float("nan")]], [[0.5, 0.5]]])
    found = weight_gap(ids, weights, ids, torch.full_like(weights, 0.5))
    assert found[0].isnan().all() and found[1].item() == pytest.approx(0)
