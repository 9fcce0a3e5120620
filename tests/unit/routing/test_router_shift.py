"""The router's scores of the old policy and their comparison in the update, on a real transformers MoE."""

import math

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.utils import tensordict_utils as tu

from tests.support.closeness import close
from tests.support.micro_batches import nested
from tests.support.routing_families import FAMILIES, SMALL
from verl_ext.base.errors import HookError
from verl_ext.routing.choices import find_choices, probe_choices
from verl_ext.routing.router_shift import ShiftRecorder, check_outputs, refuse_probabilities, router_logits
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

LAYERS, EXPERTS, TOP_K = 2, 8, 2
LENGTHS = [(4, 3), (2, 5), (1, 1)]  # prompt and response length of each trajectory
TOKENS = sum(response for _, response in LENGTHS)
FLOAT16 = 2e-3  # half the distance of float16 numbers at the log-probabilities that occur


def build_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": LAYERS}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))


@pytest.fixture
def model():
    return build_model()


class Engine:
    """verl's `forward_step`, as FSDPEngineWithLMHead runs it without padding removal."""

    def __init__(self, model):
        self.module = model

    def forward_step(self, micro_batch, loss_function, forward_only):
        ids = torch.nested.to_padded_tensor(micro_batch["input_ids"], padding=0)
        lengths = micro_batch["input_ids"].offsets().diff()
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        log_probs = self.module(ids, attention_mask=mask.long()).logits.log_softmax(-1)
        taken = log_probs.gather(2, ids.roll(-1, 1)[..., None])[..., 0]
        model_output = {
            "log_probs": torch.nested.nested_tensor_from_jagged(taken[mask], micro_batch["input_ids"].offsets())
        }
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=None)
        return loss, {"model_output": model_output, "loss": loss.item(), "metrics": metrics}


def micro_batch(**settings):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 32, (prompt + response,), generator=generator) for prompt, response in LENGTHS]
    data = TensorDict(
        {
            "input_ids": nested(ids),
            "prompts": nested([row[:prompt] for row, (prompt, _) in zip(ids, LENGTHS, strict=True)]),
            "responses": nested([row[prompt:] for row, (prompt, _) in zip(ids, LENGTHS, strict=True)]),
            "response_mask": nested([torch.ones(response, dtype=torch.long) for _, response in LENGTHS]),
        },
        batch_size=len(ids),
    )
    settings = {
        "use_remove_padding": False,
        "dp_size": 1,
        "batch_num_tokens": TOKENS,
        "global_batch_size": 3,
    } | settings
    tu.assign_non_tensor(data, **settings)
    return data


@torch.no_grad()
def sequence_scores(model, ids, prompt):
    """[r, L, E] log-probabilities of the routers over one sequence by itself, float64: the oracle."""
    found = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: found.append(output[0].double().log_softmax(-1)))
        for router in (point.module for point in find_choices(model))
    ]
    model(ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)[prompt - 1 : -1]


def recorded(model, engine=None, **settings):
    """(engine, recorder, data with the old policy's scores)"""
    engine = engine or Engine(model)
    recorder = ShiftRecorder(engine)
    recorder.enabled = True
    data = micro_batch(calculate_entropy=True, **settings)
    with torch.no_grad():
        _, output = engine.forward_step(data, loss_function=None, forward_only=True)
    data = micro_batch(**settings)
    for name in ("router_experts", "router_scores"):
        data[name] = nested([row.clone() for row in output["model_output"][name].unbind()])
    return engine, recorder, data


def deviations(engine, data):
    """Returns what the loss gets as router_deviation, [R]."""
    seen = []

    def loss(model_output, data, dp_group=None):
        seen.append(data["router_deviation"].to_padded_tensor(0.0))
        return model_output["log_probs"].values().sum(), {}

    value, _ = engine.forward_step(data.clone(recurse=False), loss_function=loss, forward_only=False)
    value.backward()
    assert seen[0].shape == (3, max(response for _, response in LENGTHS))
    return torch.cat([row[:response] for row, (_, response) in zip(seen[0], LENGTHS, strict=True)])


def response_rows(sequences):
    """Returns, for each sequence, its rows that predicted the response tokens."""
    return [row[-n - 1 : -1].clone() for row, (_, n) in zip(sequences.unbind(), LENGTHS, strict=True)]


def test_compute_log_prob_returns_the_old_routers_experts_and_scores(model):
    _, _, data = recorded(model)
    ids = micro_batch()["input_ids"].unbind()
    for row, (prompt, response) in enumerate(LENGTHS):
        full = sequence_scores(model, ids[row], prompt)
        values, experts = full.topk(TOP_K)
        assert data["router_experts"].unbind()[row].tolist() == experts.tolist()
        scores = data["router_scores"].unbind()[row]
        assert scores.shape == (response, LAYERS, TOP_K) and scores.dtype == torch.float16
        torch.testing.assert_close(scores.double(), values, rtol=0, atol=FLOAT16)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_deviation_of_a_moved_router_equals_the_oracle(model, checkpointed):
    engine, recorder, data = recorded(model)
    assert deviations(engine, data).max() < FLOAT16  # nothing has moved
    ids = micro_batch()["input_ids"].unbind()
    old = [sequence_scores(model, row, prompt) for row, (prompt, _) in zip(ids, LENGTHS, strict=True)]
    with torch.no_grad():
        for router in recorder.routers:
            router.weight += torch.randn_like(router.weight) * 0.1
    current = [sequence_scores(model, row, prompt) for row, (prompt, _) in zip(ids, LENGTHS, strict=True)]
    if checkpointed:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = deviations(engine, data)
    chosen = [table.topk(TOP_K).indices for table in old]
    expected = torch.cat(
        [(c - o).abs().gather(2, ids).mean((1, 2)) for c, o, ids in zip(current, old, chosen, strict=True)]
    )
    assert expected.min() > 10 * FLOAT16
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=FLOAT16)


def test_the_loss_is_scaled_by_the_factor_of_each_token(model, actor_config):
    """The policy has not moved (ratio 1), so a token's gradient is -A gamma over the tokens."""
    engine, recorder, data = recorded(model)
    with torch.no_grad():
        for router in recorder.routers:
            router.weight += torch.randn_like(router.weight) * 0.1
    gamma = deviations(engine, data).neg().exp()
    leaves = []

    def from_leaf(model_output, data, dp_group=None):
        log_probs = model_output["log_probs"]
        leaves.append(log_probs.values().detach().requires_grad_())
        rebuilt = torch.nested.nested_tensor_from_jagged(leaves[0], log_probs.offsets())
        return ours(model_output={"log_probs": rebuilt}, data=data, dp_group=dp_group)

    with torch.no_grad():
        _, output = engine.forward_step(micro_batch(), loss_function=None, forward_only=True)
    data["old_log_probs"] = nested(response_rows(output["model_output"]["log_probs"]))
    data["advantages"] = nested([torch.full((response,), -1.0) for _, response in LENGTHS])
    settings = LossSettings.from_dict({"policy_loss": {"loss_mode": "router_shift", "floor": 0.0}})
    ours, _ = build_worker_loss(actor_config(clip_ratio_low=0.9, clip_ratio_high=9.0), settings)
    loss, output = engine.forward_step(data, loss_function=from_leaf, forward_only=False)
    loss.backward()
    by_row = torch.nested.nested_tensor_from_jagged(leaves[0].grad, data["input_ids"].offsets())
    close(torch.cat(response_rows(by_row)), gamma / TOKENS)
    close(loss, gamma.mean())
    close(output["metrics"]["actor/router_shift/factor"].aggregate(), gamma.mean())
    # Nothing moved but the router: a difference of log-probabilities over 32 tokens.
    close(output["metrics"]["actor/ppo_kl"].aggregate(), 0.0, scale=math.log(32))


def test_nothing_is_recorded_when_off_or_for_a_reference_policy(model):
    engine = Engine(model)
    recorder = ShiftRecorder(engine)
    with torch.no_grad():
        _, output = engine.forward_step(micro_batch(calculate_entropy=True), loss_function=None, forward_only=True)
        assert set(output["model_output"]) == {"log_probs"}
        recorder.enabled = True
        _, output = engine.forward_step(micro_batch(calculate_entropy=False), loss_function=None, forward_only=True)
        assert set(output["model_output"]) == {"log_probs"}


def test_a_part_of_each_sequence_is_refused(model):
    with pytest.raises(HookError, match=r"saw 9 tokens .* micro-batch of 21"):
        recorded(model, Half(model))


class Half(Engine):
    """An engine whose routers see a part of the tokens, as under sequence parallelism."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        self.module(micro_batch["input_ids"].values()[None, :9])
        return torch.tensor(1.0), {"model_output": {}}


def test_a_router_that_returns_probabilities_is_refused(model):
    router = find_choices(model)[0].module
    logits = router_logits(router, router(torch.randn(5, 32)))
    assert logits.shape == (5, EXPERTS)
    refuse_probabilities(router, logits)
    with pytest.raises(HookError, match="Qwen3MoeTopKRouter returns probabilities"):
        refuse_probabilities(router, logits.softmax(-1))


def test_a_router_that_leaves_the_choice_to_its_block_is_refused_before_the_run():
    config = AutoConfig.for_model("deepseek_v3", **SMALL | FAMILIES["deepseek_v3"])
    with pytest.raises(HookError, match=r"router_shift cannot read router DeepseekV3MoE, which leaves the choice"):
        probe_choices(config, check_outputs)


def test_a_router_that_returns_no_ids_is_refused_before_the_run():
    settings = {name: value for name, value in SMALL.items() if name != "attn_implementation"}
    config = AutoConfig.for_model("llama4_text", **settings, intermediate_size_mlp=32, num_local_experts=4)
    with pytest.raises(HookError, match=r"cannot read router Llama4TextMoe, which returns 0 integer"):
        probe_choices(config, check_outputs)
