import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.routing import expert_overlap, router_metrics


@given(st.integers(0, 6), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**31))
def test_overlap_equals_pythons_set_intersection(tokens, layers, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.rand(tokens, layers, 12, generator=generator).argsort(-1)[..., :top_k].to(torch.int16) for _ in range(2)
    )
    found = expert_overlap(a, b)
    for n in range(tokens):
        for layer in range(layers):
            assert found[n, layer] == len(set(a[n, layer].tolist()) & set(b[n, layer].tolist()))


def test_order_within_a_set_does_not_matter():
    ids = torch.tensor([[[3, 1, 2]]])
    assert expert_overlap(ids, ids.flip(-1)).item() == 3


def test_different_shapes_are_an_error_that_shows_both():
    with pytest.raises(ValueError, match=r"\(1, 2, 2\).*\(1, 3, 2\)"):
        expert_overlap(torch.zeros(1, 2, 2), torch.zeros(1, 3, 2))


def test_metrics_of_a_case_counted_by_hand():
    # Two trajectories of 2 and 3 tokens, two layers.
    found = router_metrics(
        agree_BL=torch.tensor([[2.0, 1.5], [3.0, 2.0]]),
        exact_BL=torch.tensor([[2.0, 1.0], [3.0, 1.0]]),
        differs_B=torch.tensor([1.0, 2.0]),
        tokens_B=torch.tensor([2.0, 3.0]),
    )
    assert found == pytest.approx(
        {
            "router/tokens": 5,
            "router/any_layer_differs": 3 / 5,
            "router/agreement": (1.0 + 0.7) / 2,
            "router/agreement/layer_00": 1.0,
            "router/agreement/layer_01": 0.7,
            "router/exact_match": (1.0 + 0.4) / 2,
            "router/exact_match/layer_00": 1.0,
            "router/exact_match/layer_01": 0.4,
        }
    )


def test_no_token_gives_no_metric():
    assert router_metrics(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1), torch.zeros(1)) == {}
