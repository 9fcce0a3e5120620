"""MoEs with the layers of published models, random weights, and fewer layers than those have.

The sizes of a layer are those of Qwen3-30B-A3B, Moonlight-16B-A3B (with DeepSeek-V3's groups) and gpt-oss-20b.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu.attention import ROWS

COMMON = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GROUPS = {
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
}
FULL = {
    "qwen3_moe": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "vocab_size": 163_840,
        "hidden_size": 2048,
        "intermediate_size": 11_264,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        **GROUPS,
        **LATENT,
    },
    "gpt_oss": {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}
TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
SMALLER = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
}


def config_of(family: str, *, tiny: bool, attention: str = ROWS, experts: str | None = None) -> PretrainedConfig:
    """Returns the config of a model of this family.

    Args:
        attention: an implementation of transformers, or ROWS.
        experts: "eager" (a loop over experts) or "grouped_mm"; None takes transformers' choice.
    """
    fields = COMMON | FULL[family] | ((TINY | SMALLER[family]) if tiny else {})
    config = AutoConfig.for_model(family, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]  # verl reads it
    config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    return config


def build(config: PretrainedConfig, dtype: torch.dtype, device: str, seed: int = 0) -> Any:
    """Returns the model, built on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros would have no effect
            nn.init.normal_(buffer, std=0.1)
    return model.to(device, dtype)


def router_of(block: nn.Module) -> nn.Module:
    return block.gate if hasattr(block, "gate") else block.router


def weights_by_hand(config: PretrainedConfig, router: nn.Module, hidden_NH: Tensor, ids_NK: Tensor) -> Tensor:
    """Returns [N, K], the papers' weights for experts `ids_NK`, whoever chose these; with gradient to the router."""
    bias = getattr(router, "bias", None)
    if config.model_type == "gpt_oss":
        return F.linear(hidden_NH, router.weight, bias).gather(1, ids_NK).softmax(-1)
    if config.model_type == "deepseek_v3":
        scores = F.linear(hidden_NH.float(), router.weight.float()).sigmoid()
    else:
        scores = F.linear(hidden_NH, router.weight).float().softmax(-1)
    chosen = scores.gather(1, ids_NK)
    if config.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * getattr(config, "routed_scaling_factor", 1.0)
