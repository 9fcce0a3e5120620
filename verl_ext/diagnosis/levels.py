"""A table of the levels of k3 that published runs stay below, by model family and format of the rollout.

Guard, doctor, report and docs/guard.md read it.

The sources are limits and measurements of other projects, read in November 2026. None of them was measured here.
NeMo-RL's `gen_kl_error` is the k3 of l_infer against l_old, as `vllm_kl/k3` is (`ClippedPGLossFn`,
nemo_rl/algorithms/loss/loss_functions.py, commit 7ea279a); its limits are in tests/test_suites/llm. A new level is an
entry here and its row in docs/guard.md, which a test compares.
"""

from dataclasses import dataclass

# Formats of the rollout's weights. bf16 includes fp16 and fp32; the last two are NVFP4, from quantised training.
BFLOAT16, FP8, W4A16, W4A4 = "bf16", "fp8", "w4a16", "w4a4"


@dataclass(frozen=True)
class Level:
    """A published level.

    Attributes:
        model: the model that it was published for.
        model_type: the model_type of its transformers config.
        format: the format of the rollout's weights.
        k3: published runs stay below it.
        source: the file or page that has it.
        hidden_size: the model's, if other models have the same model_type; None if the level is for all of them.
    """

    model: str
    model_type: str
    format: str
    k3: float
    source: str
    hidden_size: int | None = None


SUPER = "grpo-nemotron3-super-120BA12B-16n4g-megatron"
LEVELS = (
    Level("Qwen3.5-35B-A3B", "qwen3_5_moe", BFLOAT16, 0.002, "grpo-qwen3.5-35ba3b-2n8g-megatron-ep16tp2cp2.sh", 2048),
    Level("Qwen3.5-35B-A3B", "qwen3_5_moe", FP8, 0.005, "docs/guides/models/qwen/qwen3-5.md, the highest step", 2048),
    Level("Qwen3.5-397B-A17B", "qwen3_5_moe", BFLOAT16, 0.004, "grpo-qwen3.5-397ba17b-32n8g-megatron.v2.sh"),
    Level("Qwen3.5-9B", "qwen3_5", BFLOAT16, 0.002, "grpo-qwen3.5-9b-1n8g-megatron.sh"),
    Level("Qwen3.5-9B", "qwen3_5", FP8, 0.003, "grpo-qwen3.5-9b-1n8g-megatron-fp8.sh"),
    Level("gpt-oss-20b", "gpt_oss", BFLOAT16, 0.002, "grpo-gptoss-20b-8n8g-megatron.sh"),
    Level("Moonlight-16B-A3B", "deepseek_v3", BFLOAT16, 0.001, "grpo-moonlight-16b-automodel-1n8g-ep8.sh", 2048),
    Level("GLM-4.7-Flash", "glm4_moe_lite", BFLOAT16, 0.01, "grpo-glm47-flash-4n8g-automodel.sh"),
    Level("GLM-5.1", "glm_moe_dsa", BFLOAT16, 0.01, "grpo-glm5.1-64n8g-megatron.sh"),
    Level("Nemotron-3 Nano and Super", "nemotron_h", BFLOAT16, 0.02, "grpo-nemotron3-super-120BA12B-16n8g-megatron.sh"),
    Level("Nemotron-3 Super", "nemotron_h", W4A16, 0.03, f"{SUPER}-qa-nvfp4-w4a16-real-300step.sh"),
    Level("Nemotron-3 Super", "nemotron_h", W4A4, 0.1, f"{SUPER}-qa-nvfp4-w4a4-real-300step.sh"),
    Level("DeepSeek-V4-Flash", "deepseek_v4", BFLOAT16, 0.015, "prime-rl PR 3543, its bar for a new model"),
)

PUBLISHED = frozenset(level.k3 for level in LEVELS)


def published(model: dict[str, object], rollout_format: str) -> Level | None:
    """Returns the first level of the table that fits a model's config.json and a rollout's format."""
    text = model.get("text_config")
    hidden = model.get("hidden_size") or (text.get("hidden_size") if isinstance(text, dict) else None)
    for level in LEVELS:
        fits = level.model_type == model.get("model_type") and level.format == rollout_format
        if fits and level.hidden_size in (None, hidden):
            return level
    return None
