"""The example launches of verl 0.9.1, by the settings that one of our checks may look at."""

import json

from tests import ROOT

FILE = ROOT / "tests" / "support" / "data" / "launches.jsonl"
LAUNCHES = {
    launch.pop("launch"): tuple(f"{key}={value}" for key, value in launch.items())
    for launch in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
}
# Launches of verl 0.9.1's examples that verl 0.9.1 itself does not compose: the settings of Megatron without its group.
NOT_COMPOSED = (
    "ascend_extras_grpo_trainer_run_qwen3_235b_256k_megatron",
    "ascend_extras_grpo_trainer_run_qwen3_30b_a3b_megatron",
    "grpo_trainer_run_qwen2-7b_math_megatron_fsdp",
)
# verl 0.9.1 stops at the first scored answer: its reward manager `dapo` reads `overlong_buffer_cfg.log`, which this
# launch does not set.
UNSCORED = "mtp_trainer_run_mimo_7b_mtp_megatron"
# Neither compute_log_prob runs there (bypass mode) nor our loss (distillation): nothing can be measured.
UNMEASURED = "e2e_run_v1_separate_async_opd"
# All engines, trainer modes and kinds of correction.
SAMPLE = (
    "grpo_trainer_run_qwen3_30b_a3b_fsdp",
    "grpo_trainer_run_qwen3_30b_a3b_megatron",
    "grpo_trainer_run_qwen3_30b_veomni",
    "router_replay_run_qwen3_5_35b_a3b_veomni",
    "router_replay_run_qwen3_30b_a3b_megatron",
    "grpo_trainer_run_qwen3_5_35b_fsdp_turbo",
    "e2e_run_ppo_trainer_torchtitan",
    "grpo_trainer_run_qwen3_5_35b_megatron",
    "grpo_trainer_run_hy_v3_megatron",
    "mtp_trainer_run_mimo_7b_mtp_rl_vllm_sgl_megatron",
    "rollout_correction_run_qwen2_5_7b_fsdp",
    "e2e_run_v1_separate_async",
    "ascend_extras_ppo_trainer_run_qwen3_8b_fsdp",
)
