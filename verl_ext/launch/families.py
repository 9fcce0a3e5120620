"""The model families that need special checks, by `model_type` of transformers (5.10)."""

DEEPSEEK_V3 = ("deepseek_v3", "deepseek_v4", "kimi_k2", "kimi_k25")
GLM = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
QWEN = ("qwen3_next", "qwen3_vl_moe", "qwen3_5_moe")
MAMBA = ("mamba", "mamba2", "bamba", "jamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid")

# Shared experts that Megatron-Bridge 0.5.2 by default overlaps with the exchange of tokens.
OVERLAPPED = {"deepseek_v2", *DEEPSEEK_V3, *GLM}
# Routers that Megatron-Bridge (0.3.1, 0.5.2) computes in float32: its providers and bridges.
FLOAT32_ROUTERS = OVERLAPPED | {*QWEN, "glm4v_moe", "nemotron_h", "olmoe", "bailing_moe_v2", "ernie4_5_moe"}
# Routers that Megatron-Bridge (0.3.1, 0.5.2) gives a bias, with the rate of megatron-core, 0.001.
BIASED = {
    *DEEPSEEK_V3,
    "glm_moe_dsa",
    "nemotron_h",
    "minimax_m2",
    "mimo_v2_flash",
    "bailing_moe_v2",
    "ernie4_5_moe",
    "sarvam_moe",
}
# Models with recurrent layers, to which verl does not pass the ends of packed sequences on FSDP. It passes them, also
# under Ulysses, only to Qwen3.5 and 3.6 (models/transformers/monkey_patch.py, qwen3_5.py).
RECURRENT = {*MAMBA, "qwen3_next", "lfm2", "lfm2_moe", "minimax", "olmo_hybrid"}
# Models with layers of linear attention or Mamba.
LINEAR = RECURRENT | {"qwen3_5", "qwen3_5_moe"}
# Models whose draft layer has id 0 in vLLM before 0.26.
DRAFTS_FIRST = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "exaone_moe", "mimo_v2"}
