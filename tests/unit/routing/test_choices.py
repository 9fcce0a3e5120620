"""Expert choices of transformers models are recorded and replaced; the experts' inputs show it, for every family."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from tests.support.closeness import close
from tests.support.routing_families import EXPERTS, FAMILIES, SMALL, TOP_K, build, experts_inputs, moe_layers
from verl_ext.base.errors import HookError
from verl_ext.routing.choices import (
    ExpertTopK,
    check_replayable,
    expert_counts,
    find_choices,
    probe_choices,
)

IDS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(3))


class Tap:
    """Intercepts a model: records the choices of its layers, and replaces them."""

    def __init__(self, model):
        self.model, self.seen, self.forced, self.on = model, {}, {}, True
        self.points = find_choices(model)
        for index, point in enumerate(self.points):
            point.intercept(*expert_counts(model.config), lambda index=index: self.choice(index) if self.on else None)

    def choice(self, index):
        def choose(scores, ids):
            self.seen.setdefault(index, []).append(ids)
            return self.forced.get(index, ids)

        return choose

    def force_another(self, ids):
        """Runs the model once; from then on, each layer uses experts outside its choice."""
        with torch.no_grad():
            self.model(ids)
        self.forced = {index: another_choice(seen[0]) for index, seen in self.seen.items()}


def another_choice(ids):
    """[N, K] experts, at least one of them outside the given choice."""
    shift = torch.randint(1, EXPERTS - 1, (len(ids), 1), generator=torch.Generator().manual_seed(5))
    return (ids + shift) % EXPERTS


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_are_those_that_reach_the_experts(family):
    model = build(family)
    tap = Tap(model)
    with torch.no_grad(), experts_inputs(model) as given:
        model(IDS)
    assert [point.layer for point in tap.points] == moe_layers(family)
    assert len(given) == len(tap.points)
    for index, (ids, _) in enumerate(given):
        (seen,) = tap.seen[index]
        assert seen.shape == (IDS.numel(), TOP_K)
        assert torch.equal(seen.sort().values, ids.sort().values)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_own_choice_is_bitwise_the_same_and_another_choice_reaches_the_experts(family):
    model = build(family)
    with torch.no_grad():
        before = model(IDS).logits
        tap = Tap(model)
        model(IDS)
        tap.forced = {index: seen[0].clone() for index, seen in tap.seen.items()}
        assert torch.equal(model(IDS).logits, before)
        tap.forced = {index: another_choice(ids) for index, ids in tap.forced.items()}
        with experts_inputs(model) as given:
            replayed = model(IDS).logits
    for index, (ids, _) in enumerate(given):
        assert torch.equal(ids, tap.forced[index])
    assert (replayed - before).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_outside_the_routers_own_choice_keep_weight_and_gradient(family):
    model = build(family)
    tap = Tap(model)
    tap.force_another(IDS)
    with experts_inputs(model) as given:
        model(IDS).logits.square().sum().backward()
    for index, (_, weights) in enumerate(given):
        drifted = ~(tap.forced[index].unsqueeze(2) == tap.seen[index][0].unsqueeze(1)).any(2)
        assert drifted.any()
        assert (weights[drifted].detach() > 0).all()
    for point in tap.points:
        router = next(p for n, p in model.named_parameters() if n.startswith(point.name) and n.endswith(ROUTER))
        assert router.grad.abs().sum() > 0


ROUTER = ("gate.weight", "router.weight", "mlp.gate.weight")


def weights_by_formula(family, model, point, hidden, ids):
    """[N, K] combine weights of the experts `ids`, in float64, as the family's paper has them."""
    weight = next(p for n, p in model.named_parameters() if n.startswith(point.name) and n.endswith(ROUTER))
    logits = hidden.double() @ weight.detach().double().T
    if family == "gpt_oss":  # softmax over the chosen alone
        bias = point.module.bias.detach().double()
        return (logits + bias).gather(1, ids).softmax(-1)
    if family in ("deepseek_v3", "glm4_moe"):  # sigmoid without the bias, normalised, scaled
        chosen = logits.sigmoid().gather(1, ids)
        return chosen / chosen.sum(-1, keepdim=True) * model.config.routed_scaling_factor
    chosen = logits.softmax(-1).gather(1, ids)
    normalised = family == "mixtral" or model.config.norm_topk_prob
    return chosen / chosen.sum(-1, keepdim=True) if normalised else chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_replayed_experts_come_from_the_routers_own_scores(family):
    model = build(family)
    tap = Tap(model)
    tap.force_another(IDS)
    with torch.no_grad():
        hidden = []
        block = model.get_submodule(f"model.layers.{tap.points[-1].layer}.mlp")
        block.register_forward_pre_hook(lambda _, args: hidden.append(args[0].flatten(0, 1)))
        with experts_inputs(model) as given:
            model(IDS)
    last = len(tap.points) - 1
    expected = weights_by_formula(family, model, tap.points[-1], hidden[0], tap.forced[last])
    close(given[-1][1], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_replays_the_same_experts_in_its_recomputation(family):
    plain, checkpointed = build(family), build(family)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients, calls = [], []
    for model in (plain, checkpointed):
        tap = Tap(model.train())
        tap.force_another(IDS)
        with experts_inputs(model) as given:
            model(IDS).logits.square().sum().backward()
        layers = len(tap.points)
        for index, (ids, _) in enumerate(given):  # the backward pass runs the layers again, the last one first
            layer = index if index < layers else 2 * layers - 1 - index
            assert torch.equal(ids, tap.forced[layer])
        calls.append(len(given))
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert calls == [len(moe_layers(family)), 2 * len(moe_layers(family))]
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, name=name)


def test_layers_for_multi_token_prediction_and_dense_layers_do_not_shift_the_numbers():
    model = build("deepseek_v3")
    model.mtp = nn.ModuleDict({"layers": nn.ModuleList([build("deepseek_v3").model.layers[1]])})
    assert [(p.name, p.layer) for p in find_choices(model)] == [("model.layers.1.mlp", 1), ("model.layers.2.mlp", 2)]


def test_a_wrapped_model_has_the_same_layers():
    model = build("qwen3_moe")
    wrapped = nn.ModuleDict({"_fsdp_wrapped_module": nn.ModuleDict({"base_model": model})})
    assert [p.layer for p in find_choices(wrapped)] == [0, 1, 2]


def test_a_dense_model_is_an_error_that_names_the_settings():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(HookError, match=r"no router was found in LlamaForCausalLM.*router_agreement=false.*disabled"):
        find_choices(LlamaForCausalLM(config))


ALSO_READABLE = {
    "deepseek_v2": {"n_routed_experts": 8, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "exaone_moe": {},
    "glm_moe_dsa": {"num_hidden_layers": 4},
    "jamba": {},
    "llama4_text": {"intermediate_size_mlp": 32, "num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 8},
    "qwen3_5_moe_text": {},
    "qwen3_next": {"num_experts": 8},
}


@pytest.mark.parametrize("family", [*FAMILIES, *ALSO_READABLE])
def test_routers_of_these_families_are_proven_readable_before_the_run(family):
    fields = SMALL | (FAMILIES | ALSO_READABLE)[family]
    if family in ALSO_READABLE:
        del fields["attn_implementation"]
    probe_choices(AutoConfig.for_model(fields.pop("model_type", family), **fields))


def test_a_router_that_does_not_choose_by_topk_is_refused_before_the_run():
    with pytest.raises(HookError, match=r"cannot read router PhimoeTopKRouter, which takes 0 top-2 of 8"):
        probe_choices(AutoConfig.for_model("phimoe", **SMALL, num_local_experts=8))


def limited_by_groups(method):
    groups = {"topk_method": method, "n_group": 4, "topk_group": 2, "n_routed_experts": EXPERTS}
    return AutoConfig.for_model("deepseek_v2", **SMALL, **groups, first_k_dense_replace=1)


def test_a_router_that_cannot_run_is_refused_before_the_run():
    """In transformers 5.10 the router of DeepSeek-V2 lacks `num_experts`."""
    with pytest.raises(HookError, match=r"cannot read router DeepseekV2Moe, which does not run .*num_experts"):
        probe_choices(limited_by_groups("group_limited_greedy"))


def test_replay_is_refused_where_experts_outside_the_routers_groups_weigh_nothing():
    config = limited_by_groups("group_limited_greedy")
    with pytest.raises(HookError, match=r"topk_method=group_limited_greedy.*; set .*router_replay.mode=disabled$"):
        check_replayable(config)
    check_replayable(limited_by_groups("greedy"))


def test_the_router_that_is_refused_does_weigh_them_with_0():
    block = DeepseekV2Moe(limited_by_groups("group_limited_greedy"))
    block.num_experts = EXPERTS  # which transformers 5.10 forgot
    scores = torch.rand(1, 5, EXPERTS, generator=torch.Generator().manual_seed(3))
    (chosen, _), lost = block.route_tokens_to_experts(scores), 0
    for expert in range(EXPERTS):
        with ExpertTopK(EXPERTS, TOP_K, lambda _, ids, expert=expert: torch.full_like(ids, expert)):
            _, weights = block.route_tokens_to_experts(scores)
        lost += (weights[:, 0] == 0).sum()
    assert lost == len(chosen) * EXPERTS // 2, "two of four groups are out of reach"


def test_a_config_without_the_number_of_experts_is_an_error_that_says_what_was_looked_for():
    with pytest.raises(HookError, match=r"LlamaConfig does not say how many experts.*num_local_experts"):
        expert_counts(LlamaConfig())
