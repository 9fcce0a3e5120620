"""Hidden states of two copies of a model, one of them with a planted cause: each is found at its place."""

import copy
import math

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_ext.core.fake_quant import fake_quantized
from verl_ext.core.recorder import Recorder, order_of
from verl_ext.errors import HookError
from verl_ext.probe.states import compare_states
from verl_ext.probe.verdict import start_of

TOP_K = 2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}
    experts = {"num_experts": 4, "num_experts_per_tok": TOP_K}
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_hidden_layers=3, **sizes, **heads, **experts))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made.eval()


def states_of(model):
    recorder = Recorder(model)
    with torch.no_grad():
        model(torch.arange(1, 21).view(1, -1))
        model(torch.arange(30, 41).view(1, -1))
    return recorder.close()


def compared(model, plant):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        plant(changed.model)
    return compare_states(states_of(changed), states_of(model), TOP_K)


def router_in_bf16(model):
    model.layers[1].mlp.gate.register_forward_hook(lambda m, i, out: (out[0].bfloat16().float(), *out[1:]))


def permuted_expert(model):
    for name in ("gate_up_proj", "down_proj"):
        weights = getattr(model.layers[2].mlp.experts, name)
        weights[[0, 1]] = weights[[1, 0]]


def dropped_bias(model):
    model.layers[1].self_attn.v_proj.bias.zero_()


def rounded_layer(model):
    weight = model.layers[0].self_attn.o_proj.weight
    weight.copy_(fake_quantized(weight, "fp4", "tensor"))


def other_norm(model):
    model.norm.weight.mul_(1.01)


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (router_in_bf16, "1.router"),
        (permuted_expert, "2.experts"),
        (dropped_bias, "1.attention"),
        (rounded_layer, "0.attention"),
        (other_norm, "norm"),
    ],
)
def test_a_planted_cause_is_found_at_its_place(model, plant, place):
    places = compared(model, plant)
    assert start_of(places) == place
    before = [each for each in places if order_of(each.point) < order_of(place)]
    assert all(each.error == 0 for each in before)


def test_the_same_model_has_no_place_where_it_comes_apart(model):
    places = compared(model, lambda model: None)
    assert [place.point for place in places][:3] == ["embedding", "0.attention", "0.router"]
    assert [place.point for place in places][-2:] == ["2.layer", "norm"]
    assert all(place.error == 0 for place in places) and start_of(places) == ""
    routers = [place for place in places if place.point.endswith("router")]
    assert len(routers) == 3 and all(place.differs == place.weight_gap == 0 for place in routers)


def test_experts_that_differ_are_told_with_the_gap_of_their_weights():
    ours = torch.tensor([[3.0, 2.0, 0.0, -1.0], [3.0, 2.0, 0.0, -1.0]])
    theirs = torch.tensor([[3.0, 0.0, 2.0, -1.0], [3.0, 2.0, 0.0, -1.0]])
    (place,) = compare_states({"0.router": ours}, {"0.router": theirs}, top_k=2)
    share = torch.tensor([3.0, 2.0]).softmax(0)[1].item()  # what one gives to expert 1 and the other to 2
    assert place.differs == 0.5 and place.weight_gap == pytest.approx(share / 2)


def test_other_tokens_are_an_error():
    with pytest.raises(HookError, match=r"norm is \(3, 2\) in the rollout and \(4, 2\) in training"):
        compare_states({"norm": torch.zeros(3, 2)}, {"norm": torch.zeros(4, 2)})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_states_that_are_not_finite_are_counted_on_their_side_and_named(value):
    def states():
        return {"0.attention": torch.ones(3, 2), "0.router": torch.eye(3), "norm": torch.ones(3, 2)}

    rollout, train = states(), states()
    rollout["0.router"][1, 0] = value
    train["norm"][:] = value
    places = compare_states(rollout, train, TOP_K)
    assert [(place.rollout_not_finite, place.train_not_finite) for place in places] == [(0, 0), (1, 0), (0, 3)]
    assert [place.error for place in places] == [0, 0, None]
    assert (places[1].differs, places[1].weight_gap, places[2].differs) == (0, 0, None)
    assert start_of(places) == "0.router" and start_of(places[2:]) == "norm"


@pytest.fixture(scope="module")
def sparse_model():
    """GLM-5's architecture: an indexer chooses four positions for each token to attend to."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "n_routed_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}
    layers = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full"] * 3}
    config = GlmMoeDsaConfig(vocab_size=64, num_experts_per_tok=TOP_K, **sizes, **heads, **widths, **layers)
    return GlmMoeDsaForCausalLM(config).eval()


def indexer_in_bf16(model):
    def rounded(module, inputs):
        return (inputs[0].bfloat16().float() + 0.1, *inputs[1:])

    model.layers[1].self_attn.indexer.register_forward_pre_hook(rounded)


def test_an_indexer_that_chooses_other_positions_is_where_it_starts(sparse_model):
    places = compared(sparse_model, indexer_in_bf16)
    assert start_of(places) == "1.indexer"
    by_point = {place.point: place for place in places}
    assert by_point["0.indexer"].error == by_point["0.indexer"].differs == 0
    found = by_point["1.indexer"]
    assert 0 < found.error < found.differs <= 1, "of four positions, some are other ones"
    assert by_point["1.attention"].error > 0 and found.weight_gap is None


def test_positions_that_both_had_to_take_are_no_choice():
    ours = torch.tensor([[0, -1], [1, 0], [2, 0], [3, 1], [-1, -1]]).float()  # the last: vLLM did not score a short one
    theirs = torch.tensor([[0, -1], [0, 1], [2, 1], [3, 1], [0, 1]]).float()
    (place,) = compare_states({"0.indexer": ours}, {"0.indexer": theirs})
    assert (place.error, place.differs) == (pytest.approx(1 / 6), pytest.approx(1 / 3))
    (place,) = compare_states({"0.indexer": torch.full((2, 4), -1.0)}, {"0.indexer": theirs[:2]})
    assert (place.error, place.differs) == (0, 0)
