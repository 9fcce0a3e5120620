"""Weights that are rounded on their way into vLLM's model, recognised by their names on Hugging Face."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.routing_families import EXPERTS, FAMILIES, build
from verl_ext.base.patching import PatchError
from verl_ext.core.fake_quant import fake_quantized
from verl_ext.upstream.fake_quantization import (
    EVERYTHING,
    HEAD,
    LINEAR,
    ROUTER,
    SentRounding,
    groups_of,
    kind_of,
    module_of,
    report,
    round_while_loading,
)

FP4 = {"format": "fp4", "group": 16, "router": False, "head": False}


def expected_kinds(model):
    """Name -> kind, by the class of the module that has the weight, not by its name."""
    found = {}
    for path, module in model.named_modules():
        kind = None
        if isinstance(module, nn.Linear):
            kind = HEAD if path == "lm_head" else LINEAR
            if module.out_features == 1:  # the gate of Qwen's shared expert
                kind = ROUTER
        elif type(module).__name__.endswith("Router"):
            kind = ROUTER
        elif path.endswith(".experts"):
            kind = LINEAR
        for name, parameter in module.named_parameters(recurse=False):
            found[f"{path}.{name}"] = kind if parameter.ndim > 1 and not name.endswith("bias") else None
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_are_those_of_the_modules_of_each_family(family):
    model = build(family)
    found = {name: kind_of(name, weight) for name, weight in model.named_parameters()}
    assert found == expected_kinds(model)
    assert {LINEAR, ROUTER, HEAD} <= set(found.values())
    assert all(kind_of(name, buffer) is None for name, buffer in model.named_buffers())


# Names of families that transformers does not build here, and of checkpoints with a tensor an expert.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", LINEAR),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", LINEAR),
        ("model.layers.0.block_sparse_moe.gate.weight", ROUTER),
        ("model.layers.0.block_sparse_moe.router.layer.weight", ROUTER),
        ("model.layers.0.mlp.gate.wg.weight", ROUTER),
        ("model.layers.0.mlp.router.classifier.weight", ROUTER),
        ("language_model.model.layers.1.feed_forward.router.weight", ROUTER),
        ("language_model.model.layers.1.feed_forward.experts.gate_up_proj", LINEAR),
        ("model.layers.0.mlp.shared_expert.down_proj.weight", LINEAR),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", LINEAR),
        ("model.layers.0.linear_attn.conv1d.weight", None),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", LINEAR),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", None),
        ("model.layers.61.eh_proj.weight", LINEAR),
        ("model.layers.61.embed_tokens.weight", None),
        ("model.layers.61.shared_head.head.weight", HEAD),
        ("transformer.wte.weight", None),
        ("gpt_neox.embed_out.weight", HEAD),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("backbone.layers.0.mixer.A_log", None),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", None),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", None),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name, torch.zeros(2, 2)) == kind
    assert kind_of(name, torch.zeros(2)) is None
    assert kind_of(name, torch.zeros(2, 2, dtype=torch.uint8)) is None


class Model(nn.Module):
    """Keeps the weights that it was loaded with."""

    def load_weights(self, weights):
        self.loaded = dict(weights)
        return set(self.loaded)


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")
    return {name: torch.randn(EXPERTS, 32, generator=generator) for name in names}


@pytest.mark.parametrize("asked", [{}, {"router": True}, {"head": True}, {"router": True, "head": True}])
def test_a_model_is_given_rounded_weights_of_the_kinds_asked_for(weights, asked):
    model, settings = Model(), FP4 | asked
    before = {name: weight.clone() for name, weight in weights.items()}
    undo = round_while_loading(model, settings)
    for _ in range(2):
        assert model.load_weights(list(weights.items())) == set(weights), "what load_weights returns is passed on"

    rounded = {"layers.0.self_attn.q_proj.weight"}
    rounded |= {"layers.0.mlp.gate.weight"} if "router" in asked else set()
    rounded |= {"lm_head.weight"} if "head" in asked else set()
    for name, weight in before.items():
        expected = fake_quantized(weight, "fp4", 16) if name in rounded else weight
        assert torch.equal(model.loaded[name], expected)
        assert torch.equal(weights[name], weight), "the sender's weights stay"
    counts = {"linear": 1, **({"router": 1} if "router" in asked else {}), **({"head": 1} if "head" in asked else {})}
    assert report(SimpleNamespace(model=model)) == {"settings": settings, "rounded": counts}

    undo()
    model.load_weights(weights.items())
    assert report(SimpleNamespace(model=model)) is None and torch.equal(
        model.loaded["lm_head.weight"], before["lm_head.weight"]
    )


def test_a_weight_that_the_group_does_not_divide_is_named():
    model = Model()
    round_while_loading(model, FP4)
    with pytest.raises(ValueError, match=r"fake_quantization\.group: layers\.0\.o_proj\.weight: groups of 16 inputs"):
        model.load_weights([("layers.0.o_proj.weight", torch.ones(2, 24))])


def test_a_model_that_loads_in_another_way_is_refused():
    class Other(nn.Module):
        def load_weights(self, tensors, weights): ...

    with pytest.raises(PatchError, match=r"fake_quantization was written for .*takes \(tensors, weights\)"):
        round_while_loading(Other(), FP4)
    with pytest.raises(PatchError, match="missing"):
        round_while_loading(nn.Module(), FP4)


@pytest.mark.parametrize(
    ("name", "groups", "module"),
    [
        ("model.layers.3.self_attn.q_proj.weight", ("all attention", "layer 3"), "model.layers.3.self_attn.q_proj"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", ("all experts", "layer 3"), "model.layers.3.mlp.experts"),
        ("model.layers.3.mlp.experts.down_proj", ("all experts", "layer 3"), "model.layers.3.mlp.experts"),
        ("model.layers.12.mlp.up_proj.weight", ("all experts", "layer 12"), "model.layers.12.mlp.up_proj"),
        ("model.layers.3.mlp.gate.weight", None, "model.layers.3.mlp.gate"),
        ("lm_head.weight", None, "lm_head"),
    ],
)
def test_groups_and_modules_by_name(name, groups, module):
    kept = {None: (f"all {kind_of(name, torch.zeros(2, 2))}s",)}
    assert groups_of(name, torch.zeros(2, 2)) == kept.get(groups, (EVERYTHING, *(groups or ())))
    assert module_of(name) == module
    assert groups_of("model.embed_tokens.weight", torch.zeros(2, 2)) == ()


def test_a_sync_sends_one_group_rounded_and_the_others_as_they_are(weights):
    rounding = SentRounding()
    send = partial(rounding, lambda **named: (iter(weights.items()), named))
    sent, named = send(base_sync_done=True)
    assert all(torch.equal(value, weights[name]) for name, value in sent) and named == {"base_sync_done": True}
    for group in [*rounding.modules]:
        rounding.group, rounding.format = group, "fp4"
        for name, value in send()[0]:
            before = weights[name]
            expected = fake_quantized(before, "fp4", "channel") if group in groups_of(name, before) else before
            assert torch.equal(value, expected), (group, name)
