"""Shapes of models by name and by config.json, against the sizes on their cards and transformers' own models."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config, Gemma2Config, GptOssConfig

from tests.unit.recipes.test_cluster_recipes import PUBLISHED
from verl_ext.base.errors import ConfigError
from verl_ext.launch.models import ALIASES, FAMILIES, read_shape, shape_of

# Billions of parameters on the model's card on Hugging Face.
CARDS = {
    **{"Qwen2.5-0.5B": 0.49, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.61, "Qwen2.5-14B": 14.7},
    **{"Qwen2.5-32B": 32.5, "Qwen2.5-72B": 72.7, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2},
    **{"Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Llama-3.2-1B": 1.23, "Llama-3.2-3B": 3.21, "Llama-3.1-8B": 8.03},
    **{"Llama-3.1-70B": 70.6, "Gemma-2-2B": 2.61, "Qwen3.5-9B": 8.95, "Qwen3.5-27B": 27, "Qwen3.5-35B-A3B": 35},
    **{"GLM-4.5": 355, "gpt-oss-120b": 116.8},
}


@pytest.mark.parametrize("name", CARDS)
def test_a_familys_model_has_the_parameters_on_its_card(name):
    assert FAMILIES[name].parameters / 1e9 == pytest.approx(CARDS[name], rel=0.015)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-Math-7B", "Qwen2.5-7B"),
        ("/data/Qwen2.5-Coder-32B-Instruct", "Qwen2.5-32B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B"),
        ("Qwen3-VL-8B-Instruct", "Qwen3-8B"),
        ("/data/Qwen3.6-27B", "Qwen3.5-27B"),
        ("/data/GLM-4.5-Air-Base", "GLM-4.5-Air"),
        ("zai-org/GLM-4.5", "GLM-4.5"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B"),
        ("google/gemma-2-2b-it", "Gemma-2-2B"),
    ],
)
def test_a_model_is_found_by_the_longest_beginning_of_its_name(path, name):
    assert shape_of(path) is FAMILIES[name]


def test_aliases_are_of_known_models_and_unknown_names_stay_unknown():
    assert FAMILIES.keys() == CARDS.keys() | PUBLISHED.keys()
    assert set(ALIASES.values()) <= FAMILIES.keys() and not ALIASES.keys() & FAMILIES.keys()
    for name in ("Qwen2.5", "DeepSeek-V2-Lite", "model"):
        with pytest.raises(ConfigError):
            shape_of(name)


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED = {"shared_expert_intermediate_size": 24, **EXPERTS, **LINEAR}
CONFIGS = [
    ("mistral", {"intermediate_size": 80}),
    ("gemma2", {"intermediate_size": 80, "head_dim": 16}),
    ("glm4_moe", {"intermediate_size": 80, "head_dim": 16, "n_routed_experts": 8, **EXPERTS}),
    ("gpt_oss", {"intermediate_size": 24, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen3_next", {"head_dim": 16, **SHARED}),
    ("qwen3_5_text", {"intermediate_size": 80, "head_dim": 16, **LINEAR}),
    ("qwen3_5_moe_text", {"head_dim": 16, **SHARED}),
    ("deepseek_v3", {"intermediate_size": 80, "n_routed_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16, **EXPERTS}),
]


@pytest.mark.parametrize(("kind", "sizes"), CONFIGS, ids=[kind for kind, _ in CONFIGS])
def test_a_config_gives_the_parameters_of_transformers_model(kind, sizes):
    config = CONFIG_MAPPING[kind](**SMALL, **sizes, vocab_size=96)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(json.loads(config.to_json_string()))
    assert shape is not None
    counted = sum(
        weight.numel() for name, weight in model.named_parameters() if weight.dim() > 1 and "bias" not in name
    )
    assert shape.parameters == pytest.approx(counted, rel=2e-3)
    nested = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}.get(kind)
    if nested:
        assert read_shape({"model_type": nested, "text_config": json.loads(config.to_json_string())}) == shape


def test_the_cache_of_a_config_is_that_of_the_model_by_name():
    for name, config in (("DeepSeek-V3", DeepseekV3Config()), ("Gemma-2-2B", Gemma2Config())):
        assert read_shape(config.to_dict()).cached_numbers(1) == FAMILIES[name].cached_numbers(1)
    assert read_shape(GptOssConfig().to_dict()).cached_numbers(4) == FAMILIES["gpt-oss-120b"].cached_numbers(4)


@pytest.mark.parametrize(
    "found", [{}, {"text_config": None}, {"text_config": {}}, {"text_config": {"model_type": "x"}}]
)
def test_a_config_of_a_vision_model_without_its_decoder_gives_no_shape(found):
    assert read_shape({"model_type": "qwen3_vl", **found}) is None
