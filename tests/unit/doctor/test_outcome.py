"""Faults that public issues of June to November 2026 describe: each is told, its own fix mends it, a sound twin is told
nothing."""

import pytest

from verl_ext.launch.gpus import named

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
MEGATRON, FSDP = "model_engine=megatron", f"{ACTOR}.fsdp_config"
LAYERS = f"+{ACTOR}.megatron.override_transformer_config"
TURNS, TOOLS = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"
LORA = f"{MODEL}.lora_rank=8"
RATE = f"{ACTOR}.optim.lr=2e-5"
MOE = f"{MODEL}.path={{models}}/moe"
QWEN, SMALL = f"{MODEL}.path=Qwen/Qwen3-8B", f"{MODEL}.path=Qwen/Qwen3-30B-A3B"
CODER, QWEN_27B = f"{MODEL}.path=Qwen/Qwen3-Coder-30B-A3B-Instruct", f"{MODEL}.path=Qwen/Qwen3.5-27B"
GPT_OSS = f"{MODEL}.path=openai/gpt-oss-20b"
LOADED = f"{ACTOR}.checkpoint.load_contents"
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm.gpu_memory_utilization"
LENGTHS = "data.max_prompt_length=512 data.max_response_length"
GROUPS = "algorithm.filter_groups.enable=True algorithm.filter_groups.metric"
PENALTY = "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True"
DISTILLED = "distillation.distillation_loss"
DISTILS = f"distillation.enabled=True {DISTILLED}.loss_mode=forward_kl_topk {DISTILLED}.use_policy_gradient"
BATCHES = f"data.train_batch_size=96 {ACTOR}.ppo_mini_batch_size=64 {ROLLOUT}.n=8"
BY_ANSWER = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
FP8, TENSOR = f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.tensor_model_parallel_size"
ON_H100 = {"gpu": named("H100")}
TWO, EIGHT = "trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node=8"
BUCKET = (
    f"{ROLLOUT}.checkpoint_engine.backend=mooncake {ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=2048"
)

# check, overrides, level or None for nothing, fields of the context
CASES = [
    ("adapter", LORA, "warning", {}),
    ("adapter", f"{LORA} {RATE}", None, {}),
    ("adapter", f"{MODEL}.lora.rank=8 {RATE}", "error", {}),
    ("adapter", f"{LORA} {RATE} {MEGATRON}", "error", {}),
    ("adapter", f"{MODEL}.lora.rank=8 {RATE} {MEGATRON}", None, {}),
    ("adapter", f"{LORA} model_engine=veomni", "error", {}),
    ("adapter", f"{LORA} {RATE} {MOE}", "warning", {}),
    ("adapter", f"{LORA} {RATE} {MOE} ++{MODEL}.lora.merge=true", None, {}),
    ("adapter", f"{LORA} {RATE} {MOE} {MODEL}.target_modules=[q_proj]", None, {}),
    ("checkpoints", "trainer.save_freq=-1", "note", {}),
    ("checkpoints", "trainer.save_freq=20", None, {}),
    ("checkpoints", f"trainer.save_freq=20 {ACTOR}.checkpoint.save_contents=[hf_model]", "warning", {}),
    (
        "checkpoints",
        f"trainer.save_freq=20 {ACTOR}.checkpoint.save_contents=[hf_model] trainer.resume_mode=disable",
        None,
        {},
    ),
    ("checkpoints", f"trainer.save_freq=20 {LOADED}=[optimizer]", "warning", {}),
    ("checkpoints", f"trainer.save_freq=20 {LOADED}=[hf_model,optimizer] {MEGATRON}", None, {}),
    ("checkpoints", "trainer.val_only=true trainer.val_before_train=false", "error", {}),
    ("checkpoints", "trainer.val_only=true trainer.val_before_train=true", None, {}),
    ("room for an answer", f"{TOOLS} {TURNS}.max_tool_response_length=4096 {LENGTHS}=1024", "warning", {}),
    ("room for an answer", f"{TOOLS} {TURNS}.max_tool_response_length=512 {LENGTHS}=1024", None, {}),
    ("room for an answer", f"{QWEN} {LENGTHS}=1024", "note", {}),
    ("room for an answer", f"{QWEN} {LENGTHS}=1024 +data.apply_chat_template_kwargs.enable_thinking=False", None, {}),
    ("room for an answer", f"{QWEN}-Base {LENGTHS}=1024", None, {}),
    ("room for an answer", "data.filter_overlong_prompts=False data.truncation=right", "warning", {}),
    ("room for an answer", "data.filter_overlong_prompts=True data.truncation=right", None, {}),
    ("tool calls", f"{TOOLS} {CODER}", "warning", {}),
    ("tool calls", f"{TOOLS} {CODER} {TURNS}.format=qwen3_coder", None, {}),
    ("tool calls", f"{TOOLS} {QWEN}", None, {}),
    ("tool calls", CODER, None, {}),
    ("tool calls", f"{TOOLS} {CODER} {TURNS}.format=mine", None, {}),
    ("tool calls", f"{TOOLS} {CODER} {ROLLOUT}.agent.default_agent_loop=mine", None, {}),
    ("tool calls", f"{TOOLS} {MODEL}.path=THUDM/glm-4-9b-chat", None, {}),
    ("tool calls", f"{TOOLS} {TURNS}.max_assistant_turns=1", "warning", {}),
    ("recomputation", f"{MEGATRON} {LAYERS}.recompute_granularity=full", "error", {}),
    ("recomputation", f"{MEGATRON} {LAYERS}.recompute_granularity=selective", None, {}),
    ("terms", f"{ACTOR}.use_kl_loss=True algorithm.use_kl_in_reward=True", "warning", {}),
    ("terms", f"{ACTOR}.use_kl_loss=True", None, {}),
    ("terms", f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0 algorithm.use_kl_in_reward=True", None, {}),
    ("terms", f"algorithm.adv_estimator=gae algorithm.gamma=0.99 {LENGTHS}=8192", "warning", {}),
    ("terms", f"algorithm.adv_estimator=gae algorithm.gamma=0.99 {LENGTHS}=128", None, {}),
    ("terms", f"algorithm.gamma=0.99 {LENGTHS}=8192", None, {}),  # GRPO reads no gamma
    ("terms", f"{GROUPS}=seq_final_reward", "error", {}),
    ("terms", f"{GROUPS}=seq_final_reward trainer.v1.sampler.custom_sampler.path=a.py", None, {}),
    ("terms", f"{GROUPS}=reward {PENALTY}", "warning", {}),
    ("terms", f"{GROUPS}=reward {PENALTY} reward.custom_reward_function.path=a.py", "warning", {}),
    ("terms", f"{GROUPS}=reward {PENALTY} reward.reward_manager.name=naive", None, {}),
    ("terms", f"{GROUPS}=acc {PENALTY}", None, {}),
    ("terms", f"{GROUPS}=acc reward.reward_model.enable=True", "error", {}),
    ("terms", f"{DISTILS}=True", "warning", {}),
    ("terms", f"{DISTILS}=False", None, {}),
    ("estimator", "algorithm.adv_estimator=gae", "error", {}),
    ("estimator", "algorithm.adv_estimator=gae critic.model.path=a/model", None, {}),
    ("sizes", f"{BATCHES} {BY_ANSWER}", "warning", {}),
    ("sizes", BATCHES, "note", {}),
    ("sizes", f"data.train_max_samples=32 data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=64", "error", {}),
    ("sizes", f"{EIGHT} {SMALL} {FP8} {TENSOR}=4 data.train_batch_size=256", "error", {}),
    ("sizes", f"{EIGHT} {SMALL} {FP8} {TENSOR}=2 data.train_batch_size=256", None, {}),
    ("sizes", f"{EIGHT} {GPT_OSS} {FP8} {TENSOR}=4 data.train_batch_size=256", "error", {}),
    ("sizes", f"{EIGHT} {QWEN_27B} {MODEL}.use_remove_padding=false {BUCKET} data.train_batch_size=256", "error", {}),
    ("rollout at its start", f"{TWO} {QWEN} {ROLLOUT}.gpu_memory_utilization=0.9", "error", ON_H100),
    ("rollout at its start", f"{TWO} {QWEN} {ROLLOUT}.gpu_memory_utilization=0.5", None, ON_H100),
    (
        "rollout at its start",
        f"{TWO} {QWEN} {ROLLOUT}.gpu_memory_utilization=0.85 {FSDP}.model_dtype=bf16",
        None,
        ON_H100,
    ),
    ("rollout at its start", f"{TWO} {QWEN} {ROLLOUT}.gpu_memory_utilization=0.9 {VLLM}=0.4", None, ON_H100),
    (
        "rollout at its start",
        f"{TWO} {QWEN} {ROLLOUT}.gpu_memory_utilization=0.9 {FSDP}.param_offload=true",
        None,
        ON_H100,
    ),
]


@pytest.mark.parametrize(("name", "overrides", "level", "fields"), CASES)
def test_it_is_told_and_its_fix_mends_it(findings, models, name, overrides, level, fields):
    given = overrides.replace("{models}", str(models)).split()
    found = findings(name, *given, **fields)
    assert {finding.level for finding in found} - {"ok"} == ({level} if level else set())
    fix = [override for finding in found for override in finding.fix]
    if fix:
        assert {finding.level for finding in findings(name, *given, *fix, **fields)} <= {"ok"}
