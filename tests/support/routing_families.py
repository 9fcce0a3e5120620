"""Tiny, randomly initialised models of the families whose routing is tested, and what their experts are given."""

from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, TOP_K = 8, 2
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_implementation": "eager",
}
GROUPED = {"moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 16, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 16},
    # One dense layer first, sigmoid scores with a bias, two of four groups, shared experts.
    "deepseek_v3": {**GROUPED, **LATENT, "first_k_dense_replace": 1},
    "glm4_moe": {**GROUPED, "first_k_dense_replace": 1, "head_dim": 16},
    # Layers 1 and 2 of three are dense or sparse as their configs say.
    "qwen3_moe_mixed": {"model_type": "qwen3_moe", "num_experts": EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
}
MOE_LAYERS = {"deepseek_v3": [1, 2], "glm4_moe": [1, 2], "qwen3_moe_mixed": [0, 2]}


def build(family, **settings):
    """A model in float32, its routers far from undecided."""
    torch.manual_seed(0)
    fields = SMALL | FAMILIES[family] | settings
    config = AutoConfig.for_model(fields.pop("model_type", family), **fields)
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model


def moe_layers(family):
    return MOE_LAYERS.get(family, list(range(SMALL["num_hidden_layers"])))


@contextmanager
def noise(model, size=1e-3, seed=0):
    """Every MLP and MoE block is given hidden states that are off by this share, a thousand times float32's rounding.

    Experts that stay the same under it are those that any CPU, and any layout of the same tokens, chooses.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(module, args):
        hidden, *others = args
        return (hidden * (1 + size * torch.randn(hidden.shape, generator=generator)), *others)

    blocks = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    hooks = [block.register_forward_pre_hook(disturb) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def experts_inputs(model):
    """[(expert ids [N, K], weights [N, K])] as the experts themselves are given them, call after call: the oracle."""
    given = []

    def keep(module, args, kwargs):
        _, ids, weights = (*args, *kwargs.values())
        given.append((ids.detach().clone(), weights))

    hooks = [
        module.register_forward_pre_hook(keep, with_kwargs=True)
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()
