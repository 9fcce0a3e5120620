"""Routing capture on a real transformers MoE: layer numbering, the shift by one token, a planted disagreement."""

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.utils import tensordict_utils as tu

from verl_ext.errors import HookError
from verl_ext.workers.routing import (
    RoutingRecorder,
    agreement_outputs,
    attach,
    find_routers,
    probe_routers,
    response_rows,
)

LAYERS, EXPERTS, TOP_K = 3, 8, 2
LENGTHS = [(4, 3), (2, 5), (1, 1)]  # prompt and response length of each trajectory


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    return Qwen3MoeForCausalLM(config).eval()


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (prompt + response,), generator=generator) for prompt, response in LENGTHS]


@torch.no_grad()
def route_alone(model, ids):
    """[n, L, K] expert ids of one sequence by itself, from the routers' own outputs: the oracle."""
    recorder = RoutingRecorder(model)
    with recorder.recording():
        model(ids.unsqueeze(0))
        return recorder.experts()


@torch.no_grad()
def route_padded(model, rows):
    """The same for right-padded sequences in one forward, as verl runs them without padding removal."""
    recorder = RoutingRecorder(model)
    padded = torch.nested.to_padded_tensor(nested(rows), padding=0)
    mask = torch.arange(padded.shape[1]) < torch.tensor([[len(row)] for row in rows])
    with recorder.recording():
        model(padded, attention_mask=mask.long())
        return recorder.experts()


def micro_batch(rows, routed, padding_removed):
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "response_mask": nested([torch.ones(response, dtype=torch.long) for _, response in LENGTHS]),
            "routed_experts": nested(routed),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor_data(data, "use_remove_padding", padding_removed)
    return data


def as_rollout(routed):
    """What the rollout returns: the last sampled token was never forwarded, so its row is zeros."""
    rollout = [rows.clone().to(torch.int32) for rows in routed]
    for rows in rollout:
        rows[-1] = 0
    return rollout


@pytest.mark.parametrize("padding_removed", [True, False])
def test_equal_routing_agrees_everywhere(model, padding_removed):
    rows = sequences()
    alone = [route_alone(model, ids) for ids in rows]
    train = torch.cat(alone) if padding_removed else route_padded(model, rows)
    found = agreement_outputs(train, micro_batch(rows, as_rollout(alone), padding_removed))
    assert found["router_agreement"].values().tolist() == [1.0] * 9
    sums = found["router_sums"]
    assert sums[:, : 2 * LAYERS].tolist() == [[float(r)] * (2 * LAYERS) for _, r in LENGTHS]
    assert sums[:, -2].tolist() == [0, 0, 0]
    assert sums[:, -1].tolist() == [3, 5, 1]


@pytest.mark.parametrize("padding_removed", [True, False])
@pytest.mark.parametrize(("trajectory", "token", "layer"), [(0, 0, 0), (0, 2, 2), (1, 4, 1), (2, 0, 2)])
def test_a_planted_disagreement_is_found_at_its_token_and_layer(model, padding_removed, trajectory, token, layer):
    rows = sequences()
    alone = [route_alone(model, ids) for ids in rows]
    train = torch.cat(alone) if padding_removed else route_padded(model, rows)
    rollout = as_rollout(alone)
    prompt, _ = LENGTHS[trajectory]
    # The pass over the token before response token j chose the experts behind it.
    chosen = rollout[trajectory][prompt + token - 1, layer]
    chosen[0] = next(e for e in range(EXPERTS) if e not in chosen.tolist())
    found = agreement_outputs(train, micro_batch(rows, rollout, padding_removed))

    expected = [torch.ones(response) for _, response in LENGTHS]
    expected[trajectory][token] = 1 - 1 / TOP_K / LAYERS
    torch.testing.assert_close(found["router_agreement"].values(), torch.cat(expected))
    sums = found["router_sums"]
    lost = torch.zeros(len(LENGTHS), LAYERS)
    lost[trajectory, layer] = 1
    counts = torch.tensor([[float(response)] for _, response in LENGTHS])
    torch.testing.assert_close(sums[:, :LAYERS], counts - lost / TOP_K)
    torch.testing.assert_close(sums[:, LAYERS : 2 * LAYERS], counts - lost)
    torch.testing.assert_close(sums[:, -2], lost.sum(1))


def test_masked_response_tokens_do_not_count(model):
    rows = sequences()
    alone = [route_alone(model, ids) for ids in rows]
    data = micro_batch(rows, as_rollout(alone), padding_removed=True)
    masks = [torch.ones(response, dtype=torch.long) for _, response in LENGTHS]
    masks[1][1:3] = 0  # a tool's output
    data["response_mask"] = nested(masks)
    assert agreement_outputs(torch.cat(alone), data)["router_sums"][:, -1].tolist() == [3, 3, 1]


def test_rollout_with_other_layers_is_an_error_with_the_remedy(model):
    rows = sequences()
    alone = [route_alone(model, ids) for ids in rows]
    data = micro_batch(rows, [r[:, :2] for r in alone], padding_removed=True)
    with pytest.raises(HookError, match=r"top-2.*stability.router_agreement=false"):
        agreement_outputs(torch.cat(alone), data)


def test_routers_come_in_layer_order(model):
    assert list(find_routers(model)) == [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]


def test_a_dense_model_is_an_error_that_names_the_setting():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(HookError, match=r"no router was found in LlamaForCausalLM"):
        find_routers(LlamaForCausalLM(config))


SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
READABLE = {
    "qwen3_moe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
}


@pytest.mark.parametrize("family", READABLE)
def test_routers_of_these_families_can_be_read(family):
    probe_routers(AutoConfig.for_model(family, **SMALL, **READABLE[family]))


def test_a_router_that_returns_no_expert_ids_is_refused_before_the_run():
    config = AutoConfig.for_model("llama4_text", **SMALL, intermediate_size_mlp=32, num_local_experts=4)
    with pytest.raises(HookError, match=r"cannot read router Llama4TextMoe"):
        probe_routers(config)


def test_an_moe_that_declares_no_router_is_refused_before_the_run():
    with pytest.raises(HookError, match=r"no router was found in DeepseekV3ForCausalLM"):
        probe_routers(AutoConfig.for_model("deepseek_v3", **SMALL | {"num_key_value_heads": 2}, n_routed_experts=8))


def test_a_part_of_the_sequences_is_refused(model):
    rows = sequences()
    alone = [route_alone(model, ids) for ids in rows]
    half = torch.cat(alone)[:8]  # as sequence parallelism would leave it
    with pytest.raises(HookError, match=r"saw 8 tokens of a micro-batch of 16"):
        agreement_outputs(half, micro_batch(rows, as_rollout(alone), padding_removed=True))


def test_response_rows_by_hand():
    # Sequences of 5 and 3 tokens with responses of 2 and 1, packed.
    rows = response_rows(torch.tensor([0, 5]), torch.tensor([5, 3]), torch.tensor([2, 1]))
    assert rows.tolist() == [2, 3, 6]


class Engine:
    """The part of verl's engine that `attach` touches."""

    def __init__(self, model):
        self.module = model
        self.calls = 0

    def forward_step(self, micro_batch, loss_function, forward_only):
        self.calls += 1
        self.module(micro_batch["input_ids"].values().unsqueeze(0))
        return 0.0, {"model_output": {}}


def test_attached_engine_compares_only_forward_passes_with_routing(model):
    rows = sequences()[:1]
    ids = [route_alone(model, rows[0])]
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "response_mask": nested([torch.ones(3, dtype=torch.long)]),
            "routed_experts": nested(ids),
        },
        batch_size=1,
    )
    tu.assign_non_tensor_data(data, "use_remove_padding", True)
    engine = Engine(model)
    attach(engine)
    _, output = engine.forward_step(data, loss_function=None, forward_only=True)
    assert output["model_output"]["router_agreement"].values().tolist() == [1.0] * 3
    _, output = engine.forward_step(data, loss_function=None, forward_only=False)
    assert output["model_output"] == {}
    _, output = engine.forward_step(data.exclude("routed_experts"), loss_function=None, forward_only=True)
    assert output["model_output"] == {}
    assert engine.calls == 3
