"""VeOmni's own models: each router chooses by one top-k, which the adapter reads and replaces."""

from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_ext.routing.choices import find_choices, probe_choices

pytest.importorskip("veomni", reason="bash tools/setup_cpu.sh veomni")

# model type -> its class in VeOmni's generated code, and sizes that are small enough to build
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK | {"first_k_dense_replace": 1}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", DEEPSEEK | {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
}


@pytest.mark.shows("router agreement", engine="veomni")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_router_of_veomnis_models_chooses_by_one_top_k(family, monkeypatch):
    name, sizes = FAMILIES[family]
    modeling = import_module(f"veomni.models.transformers.{family}.generated.patched_modeling_{family}_gpu")
    config = AutoConfig.for_model(family, num_hidden_layers=3, **sizes)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, **_: getattr(modeling, name)(config))
    probe_choices(config)
    with torch.device("meta"):
        found = find_choices(getattr(modeling, name)(config))
    assert [point.layer for point in found] == ([1, 2] if "n_group" in sizes else [0, 1, 2])
