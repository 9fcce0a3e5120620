import pytest
import torch

from verl_ext.base.errors import HookError
from verl_ext.routing.recorder import joined_passes, named_points, own_positions, point_of, positions, state_of


def test_a_model_of_unknown_names_is_an_error():
    with pytest.raises(HookError, match="Linear has no decoder layers"):
        named_points(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("model.embed_tokens", "embedding"),
        ("model.layers.11.self_attn", "11.attention"),
        ("base_model.model.model.layers.0.mlp.gate", "0.router"),
        ("model.layers.3.self_attn.indexer", "3.indexer"),
        ("model.layers.3.self_attn.indexer.k_norm", None),
        ("model.layers.3.block_sparse_moe", "3.experts"),
        ("language_model.model.norm", "norm"),
        ("model.layers.3.self_attn.q_norm", None),
        ("model.layers.3.mlp.gate_proj", None),
        ("lm_head", "lm_head"),
        ("language_model.logits_processor", "lm_head"),
        ("model.layers.3.mlp.shared_head", None),
    ],
)
def test_points_are_known_by_the_names_of_modules(name, point):
    assert point_of(name) == point


def test_the_residual_that_vllm_hands_on_belongs_to_a_layers_states():
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert torch.equal(state_of("0.layer", (hidden, residual)), hidden + residual)
    assert torch.equal(state_of("norm", (hidden, residual)), hidden)
    assert torch.equal(state_of("0.router", (hidden, None)), hidden)


def test_the_positions_of_vllms_buffer_are_those_of_its_tokens():
    """`Indexer` of vLLM 0.27 takes (hidden states, q, positions, rotary) and returns a buffer of more rows."""
    buffer = torch.tensor([[0, -1], [1, 0], [7, 0], [9, 9]], dtype=torch.int32)
    hidden, q = torch.zeros(3, 8), torch.zeros(3, 4)
    own = own_positions((hidden, q, torch.tensor([4, 5, 6]), None))
    assert own.tolist() == [4, 5, 6]
    assert positions(buffer, own).tolist() == [[0, -1], [1, 0], [-1, 0]], "no token attends to a later one"


def test_the_positions_of_transformers_are_those_of_whole_sequences():
    own = own_positions(
        (torch.zeros(1, 3, 8), torch.zeros(1, 3, 4), (torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)), None)
    )
    assert own.tolist() == [0, 1, 2]
    assert positions(torch.tensor([[[2, 1], [1, 0], [0, 2]]]), own).tolist() == [[[-1, -1], [1, 0], [0, 2]]]


def test_passes_are_cut_to_their_sequences_and_joined():
    passes = {"norm": [torch.zeros(3, 2), torch.ones(4, 2)], "0.indexer": [torch.zeros(3, 1), torch.ones(4, 2)]}
    whole, cut = joined_passes(passes), joined_passes(passes, [2, 3])
    assert [len(whole["norm"]), len(cut["norm"])] == [7, 5]
    assert cut["norm"][:, 0].tolist() == [0, 0, 1, 1, 1]
    assert cut["0.indexer"].tolist() == [[0, -1]] * 2 + [[1, 1]] * 3


@pytest.mark.parametrize("lengths", [[3], [3, 5], [3, 4, 1]])
def test_other_passes_than_the_sequences_are_an_error(lengths):
    with pytest.raises(HookError, match=r"norm was recorded for passes of \[3, 4\] tokens"):
        joined_passes({"norm": [torch.zeros(3, 2), torch.zeros(4, 2)]}, lengths)
