import pytest
import torch

from verl_ext.core.recorder import Recorder, point_of, state_of
from verl_ext.errors import HookError


def test_a_model_of_unknown_names_is_an_error():
    with pytest.raises(HookError, match="Linear has no decoder layers"):
        Recorder(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("model.embed_tokens", "embedding"),
        ("model.layers.11.self_attn", "11.attention"),
        ("base_model.model.model.layers.0.mlp.gate", "0.router"),
        ("model.layers.3.block_sparse_moe", "3.experts"),
        ("language_model.model.norm", "norm"),
        ("model.layers.3.self_attn.q_norm", None),
        ("model.layers.3.mlp.gate_proj", None),
        ("lm_head", None),
    ],
)
def test_points_are_known_by_the_names_of_modules(name, point):
    assert point_of(name) == point


def test_the_residual_that_vllm_hands_on_belongs_to_a_layers_states():
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert torch.equal(state_of("0.layer", (hidden, residual)), hidden + residual)
    assert torch.equal(state_of("norm", (hidden, residual)), hidden)
    assert torch.equal(state_of("0.router", (hidden, None)), hidden)
