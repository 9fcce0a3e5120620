"""Hazards that cost others weeks: each fires, its own fix makes it go away, and a sound run is told nothing."""

import json

import pytest
from transformers import LlamaConfig

from tests.unit.doctor.conftest import VERSIONS
from verl_ext.doctor import engine
from verl_ext.doctor.checks import CHECKS, run_checks
from verl_ext.launch.gpus import named

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
FSDP, MEGATRON = f"{ACTOR}.fsdp_config", "model_engine=megatron"
LAYERS = f"+{ACTOR}.megatron.override_transformer_config"
VLLM, SGLANG = f"+{ROLLOUT}.engine_kwargs.vllm", f"+{ROLLOUT}.engine_kwargs.sglang"
MOE = f"{MODEL}.path={{models}}/moe"
TENSOR = f"{ACTOR}.megatron.tensor_model_parallel_size=2"
MTP = f"{MODEL}.mtp.enable=true {MODEL}.mtp.enable_rollout=true"
HYBRID = f"{MODEL}.path=nowhere/Nemotron_H-8B"
WHOLE = f"{ACTOR}.megatron.expert_tensor_parallel_size=1"
SPLIT_EXPERTS = f"{ACTOR}.megatron.expert_tensor_parallel_size=2 {ACTOR}.megatron.expert_model_parallel_size=2"
LORA = f"{MODEL}.lora.rank=8"
CAPTURE = f"{ROLLOUT}.enable_rollout_routing_replay=true"
SGLANG_0512 = {"gpu": named("B200"), "versions": VERSIONS | {"sglang": "0.5.12"}}
VLLM_024 = {"versions": VERSIONS | {"vllm": "0.24.0"}}
EIGHT = "trainer.n_gpus_per_node=8"
ULYSSES = f"{FSDP}.ulysses_sequence_parallel_size=2"
OPTIM, TURNS = f"{ACTOR}.optim", f"{ROLLOUT}.multi_turn"
WARM_UP = f"{OPTIM}.lr_warmup_steps=10"
GSPO, BY_ANSWER = f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
CLIPS = f"{ACTOR}.clip_ratio_low=0.4 {ACTOR}.clip_ratio_high=0.4"
COLOCATED = "trainer.v1.trainer_mode=colocate_async"
UPDATES = f"data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=32"
ONE_UPDATE = f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=64"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
LIMIT, DAPO = "+reward.reward_kwargs.max_resp_len", f"reward.reward_manager.name=dapo +{OVERLONG}.enable=True"
BATCHES = "algorithm.filter_groups.max_num_gen_batches=10"
OF_THE_RUN = [name for name, check in CHECKS.items() if not check.__module__.endswith(".installation")]

# check, overrides, level, fields of the context
CASES = [
    ("old reward settings", "reward_model.reward_manager=dapo", "warning", {}),
    ("old reward settings", "+reward_model.reward_kwargs.max_resp_len=512", "warning", {}),
    ("group size", f"{ROLLOUT}.n=1", "warning", {}),
    ("group size", f"{ROLLOUT}.n=2", "note", {}),
    ("group size", f"{ROLLOUT}.n=1 algorithm.adv_estimator=rloo_vectorized", "warning", {}),
    ("group size", f"{ROLLOUT}.n=1 algorithm.adv_estimator=grpo_passk", "error", {}),
    ("estimator", f"{ROLLOUT}.n=4 algorithm.adv_estimator=remax", "error", {}),
    ("estimator", "algorithm.use_pf_ppo=True algorithm.adv_estimator=gae", "warning", {}),
    ("loss normalisation", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "warning", {}),
    ("loss normalisation", f"{ACTOR}.policy_loss.loss_mode=geo_mean", "note", {}),
    ("loss settings", f"{ACTOR}.clip_ratio=0.1", "warning", {}),
    ("loss settings", f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k1", "warning", {}),
    ("names", f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=full", "error", {}),
    ("names", f"{ACTOR}.policy_loss.loss_mode=clip-cov", "error", {}),
    ("warm-up", WARM_UP, "note", {}),
    ("warm-up", f"{WARM_UP} {MEGATRON}", "note", {}),
    ("warm-up", f"{OPTIM}.lr_warmup_steps_ratio=0.1", "note", {}),
    ("step size", UPDATES, "note", {}),
    ("step size", f"{ACTOR}.ppo_epochs=16", "note", {}),
    ("step size", f"{COLOCATED} data.train_batch_size=256 {ACTOR}.ppo_mini_batch_size=64", "note", {}),
    ("step size", CLIPS, "note", {}),
    ("step size", f"{GSPO} {ACTOR}.clip_ratio_high=0.28", "warning", {}),
    ("loss aggregation", f"{GSPO} {BY_ANSWER} {MOE}", "warning", {}),
    ("repeated passes", f"{MEGATRON} {MOE} {LAYERS}.moe_permute_fusion=False", "warning", {}),
    ("repeated passes", f"{ONE_UPDATE} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", "note", {}),
    ("rollout placement", f"{ROLLOUT}.tensor_model_parallel_size=16 {EIGHT}", "warning", {}),
    ("tools", f"{TURNS}.tool_config_path=tools.yaml", "warning", {}),
    ("tools", f"{TURNS}.enable=True", "warning", {}),
    ("tools", f"{TURNS}.enable=True data.custom_cls.path=mine.py", "note", {}),
    ("validation", f"{OPTIM}.lr=0", "note", {}),
    ("unread settings", f"algorithm.filter_groups.enable=True {BATCHES}", "note", {}),
    (
        "loss settings",
        f"{ROLLOUT}.calculate_log_probs=False algorithm.rollout_correction.rollout_is=token",
        "warning",
        {},
    ),
    ("loss settings", "trainer.critic_warmup=10", "warning", {}),
    ("unread settings", f"{ACTOR}.grad_clip=0.5", "warning", {}),
    ("unread settings", f"{ROLLOUT}.over_sample_rate=0.1", "warning", {}),
    ("unread settings", f"+{OVERLONG}.enable=True", "warning", {}),
    ("unread settings", f"{DAPO} +{OVERLONG}.len=64 {LIMIT}=512 data.max_response_length=448", "warning", {}),
    ("old trainer", "trainer.use_v1=False", "note", {}),
    ("config", "+trainer.use_legacy_worker_impl=disable", "warning", {}),
    ("config", "+data.no_such_word_of_verl.path=1", "warning", {}),
    ("config", "+data.no_such_word_of_verl=1 data.custom_cls.path=mine.py", "note", {}),
    ("unread settings", f"+{ROLLOUT}.repetition_penalty=1.1", "warning", {}),
    ("unread settings", f"{FSDP}.strategy=fsdp2", "warning", {}),
    ("old reward settings", "+ray_init.num_cpus=8", "warning", {}),
    ("old reward settings", "+reward_manager.name=dapo", "warning", {}),
    ("names", f"{TURNS}.format=chatml {ROLLOUT}.agent.default_agent_loop=tool_agent", "error", {}),
    ("names", f"{TURNS}.format=chatml", "warning", {}),
    (
        "unread settings",
        "algorithm.norm_adv_by_std_in_grpo=False algorithm.adv_estimator=grpo_vectorized",
        "warning",
        {},
    ),
    ("validation", f"{ROLLOUT}.val_kwargs.n=4", "warning", {}),
    ("validation", f"{ROLLOUT}.val_kwargs.do_sample=True", "warning", {}),
    ("gradient reduction", f"{ACTOR}.strategy=fsdp {FSDP}.fsdp_size=1 {EIGHT}", "warning", {}),
    ("master weights", f"{FSDP}.model_dtype=bf16", "warning", {}),
    ("sharded attention", f"{ULYSSES} +{MODEL}.override_config.attn_implementation=sdpa", "warning", {}),
    ("sharded attention", f"{ULYSSES} {MODEL}.path=openai/gpt-oss-120b", "error", {}),
    ("recurrent layers", HYBRID, "warning", {}),
    ("recurrent layers", f"{HYBRID} {ULYSSES}", "warning", {}),
    ("recurrent layers", f"{HYBRID} {MEGATRON}", "warning", {}),
    (
        "LoRA of experts",
        f"{MEGATRON} {MOE} {TENSOR} {LORA} {LAYERS}.moe_shared_expert_overlap=true {WHOLE}",
        "warning",
        {},
    ),
    ("LoRA of experts", f"{MEGATRON} {MOE} {TENSOR} {LORA} {SPLIT_EXPERTS}", "warning", {}),
    ("training alone", f"{MEGATRON} {LAYERS}.moe_router_force_load_balancing=true", "warning", {}),
    ("training alone", f"{MEGATRON} {LAYERS}.moe_expert_capacity_factor=1.0", "warning", {}),
    ("training alone", f"{MEGATRON} {LAYERS}.moe_z_loss_coeff=0.001", "warning", {}),
    ("training alone", f"{MEGATRON} {LAYERS}.hidden_dropout=0.1", "warning", {}),
    ("training alone", f"{MEGATRON} +{ACTOR}.megatron.override_ddp_config.overlap_param_gather=true", "warning", {}),
    ("ignored optimizer settings", f"{MEGATRON} {ACTOR}.optim.betas=[0.9,0.98]", "warning", {}),
    ("MTP loss", f"{MODEL}.mtp.enable=true {MODEL}.mtp.enable_train=true", "warning", {}),
    ("reference", f"{ACTOR}.use_kl_loss=True +{FSDP}.mixed_precision.param_dtype=fp16", "warning", {}),
    ("reference", f"{ACTOR}.use_kl_loss=True {MODEL}.lora_adapter_path=/a/lora", "note", {}),
    ("checkpoints", f"{ACTOR}.checkpoint.async_save=True", "warning", {}),
    ("sync of experts", MOE, "error", {"gpu": named("B200"), "versions": VERSIONS | {"vllm": "0.24.0"}}),
    ("sync of experts", f"{MOE} {ROLLOUT}.name=sglang", "error", SGLANG_0512),
    ("moved experts", f"{VLLM}.enable_eplb=true", "warning", {}),
    ("drafts of hybrids", f"{HYBRID} {MTP}", "warning", {}),
    ("drafts of hybrids", f"{HYBRID} {MTP} {ROLLOUT}.enable_prefix_caching=False {CAPTURE}", "warning", VLLM_024),
    ("one answer for all", f"{ROLLOUT}.full_determinism=True {ROLLOUT}.n=8", "warning", {}),
    ("flashinfer variable", "", "note", {"environ": {engine.FLASHINFER: "1"}}),
    (
        "flashinfer variable",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{engine.FLASHINFER}='1'",
        "warning",
        {"versions": VERSIONS | {"vllm": "0.23.0"}},
    ),
]


@pytest.mark.parametrize(("name", "overrides", "level", "fields"), CASES)
def test_it_fires_and_its_fix_makes_it_go_away(findings, models, name, overrides, level, fields):
    given = overrides.replace("{models}", str(models)).split()
    fields = {"environ": {}} | fields
    found = findings(name, *given, **fields)
    assert level in {finding.level for finding in found}
    fix = [override for finding in found for override in finding.fix]
    if fix:
        assert not findings(name, *given, *fix, **fields)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("warm-up", ""),
        ("warm-up", f"{WARM_UP} {OPTIM}.lr_scheduler_type=cosine {OPTIM}.zero_indexed_step=False"),
        ("warm-up", f"{WARM_UP} {MEGATRON} {OPTIM}.lr_warmup_init=1e-7"),
        ("warm-up", f"{OPTIM}.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=5"),
        ("step size", f"data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=64"),
        ("step size", f"{COLOCATED} {ONE_UPDATE}"),
        ("step size", f"{GSPO} {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4"),
        ("step size", f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10"),
        ("repeated passes", f"{MEGATRON} {MOE}"),
        ("repeated passes", f"{MEGATRON} {LAYERS}.moe_permute_fusion=False"),  # no experts
        ("repeated passes", f"{UPDATES} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"),
        ("rollout placement", f"{ROLLOUT}.tensor_model_parallel_size=8 {EIGHT}"),
        ("tools", ""),
        ("tools", f"{TURNS}.tool_config_path=t.yaml {ROLLOUT}.agent.default_agent_loop=tool_agent"),
        ("tools", f"{TURNS}.enable=True +{ROLLOUT}.agent.agent_loop_manager_class=mine.Manager"),
        ("validation", f"{OPTIM}.lr=0 +ray_kwargs.ray_init.runtime_env.env_vars.VLLM_BATCH_INVARIANT='1'"),
        ("validation", f"{OPTIM}.lr=0 trainer.val_before_train=False"),
        ("unread settings", BATCHES),  # without filter_groups nothing is filtered
        ("unread settings", f"+{OVERLONG}.enable=True reward.reward_manager.name=dapo"),
        ("unread settings", f"+{OVERLONG}.enable=True reward.reward_manager.name=my_own"),
        ("unread settings", f"+{OVERLONG}.enable=False"),
        ("unread settings", f"{DAPO} +{OVERLONG}.len=64 {LIMIT}=512 data.max_response_length=449"),
        ("config", "+trainer.worker=1"),  # a word of verl's sources
        ("config", f"+{MODEL}.lora.no_such_word_of_verl=1"),  # a node that verl hands to other code
        ("config", f"+{FSDP}.turbo_config.distributed.fsdp_plan.no_such_word_of_verl=[a]"),
        ("config", "+data.apply_chat_template_kwargs.no_such_word_of_verl=1"),  # arguments of other code
        ("old reward settings", "reward_model.enable=False custom_reward_function.name=compute_score"),
    ],
)
def test_a_sound_setting_is_no_hazard(findings, models, name, overrides):
    given = overrides.replace("{models}", str(models)).split()
    assert not findings(name, *given, environ={})


@pytest.mark.parametrize("mends", ["stability=icepop", "algorithm.rollout_correction.rollout_is=token"])
def test_gspo_with_experts_and_a_correction(findings, models, mends):
    overrides = [MOE.replace("{models}", str(models)), GSPO, BY_ANSWER, mends]
    assert {finding.level for finding in findings("loss aggregation", *overrides)} == {"ok"}


@pytest.mark.parametrize("engine", [[], [MEGATRON]])
def test_a_sound_run_is_told_of_no_hazard(context, engine):
    run = context(*engine, f"{ROLLOUT}.n=8", EIGHT, environ={}, gpu=named("H100"))
    assert [finding for finding in run_checks(run, OF_THE_RUN) if finding.level in ("warning", "error")] == []


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (MOE, {"gpu": named("H100")}),
        (MOE, {"gpu": named("B200"), "versions": VERSIONS | {"vllm": "0.31.0"}}),
        (f"{MOE} {VLLM}.moe_backend=triton", {"gpu": named("B200")}),
        (f"{ROLLOUT}.quantization=fp8 {MOE}", {"gpu": named("B200")}),
        ("", {"gpu": named("B200")}),  # a dense model
    ],
)
def test_experts_whose_kernel_takes_new_weights(findings, models, overrides, fields):
    given = overrides.replace("{models}", str(models)).split()
    assert not findings("sync of experts", *given, **fields)


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ("", "warning"),
        ("trainer.n_gpus_per_node=4", "ok"),
        (f"{MODEL}.lora_rank=8", "ok"),
        (f"{FSDP}.model_dtype=bf16", "ok"),
        (f"{ACTOR}.strategy=fsdp2 {FSDP}.offload_policy=True", "ok"),
        (f"{MODEL}.path=Qwen/Qwen2.5-3B", "ok"),
    ],
)
def test_a_model_that_is_larger_than_the_gpus(findings, overrides, level):
    one_gpu = ["trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1"]
    given = [f"{MODEL}.path=Qwen/Qwen2.5-7B", *one_gpu, *overrides.split()]
    found = findings("sizes", *given, gpu=named("H100"))
    assert level in {finding.level for finding in found} <= {level, "ok"}


def test_text_of_the_config_is_never_offered(findings):
    (finding,) = findings("old reward settings", "custom_reward_function.path='/a/$(grader).py'")
    assert finding.fix == () and "reward.custom_reward_function.path" in finding.why
    (finding,) = findings("unread settings", f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=0.3")
    assert finding.fix == (f"{ACTOR}.grad_clip=1.0",)
    (finding,) = findings("unread settings", f"{ACTOR}.freeze_vision_tower=True")  # verl has no other setting for it
    assert finding.fix == ()


def test_old_reward_settings_move_with_what_they_need(findings):
    (finding,) = findings("old reward settings", "custom_reward_function.path=/a/grader.py")
    assert finding.fix[1] == "++reward.custom_reward_function.path=/a/grader.py"
    (finding,) = findings("old reward settings", "reward_model.reward_manager=prime")  # verl has none of this name
    assert finding.fix == ()
    overlong = "+reward_model.overlong_buffer"
    (finding,) = findings("old reward settings", f"{overlong}.enable=True", f"{overlong}.len=64")
    buffer = "++reward.reward_kwargs.overlong_buffer_cfg"
    assert {f"{buffer}.enable=True", f"{buffer}.len=64"} < {*finding.fix}


def test_a_group_of_one_that_the_loss_ignores_is_no_hazard(findings):
    distills = ("distillation.enabled=true", "distillation.distillation_loss.use_task_rewards=False")
    assert not findings("group size", f"{ROLLOUT}.n=1", *distills)


@pytest.mark.parametrize(
    ("rope", "fires"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}, True),
        ({"rope_type": "yarn", "factor": 4.0}, False),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1386294}, False),
        ({"rope_type": "default"}, False),
    ],
)
def test_yarns_factor_of_attention(findings, tmp_path, rope, fires):
    original = {"original_max_position_embeddings": 256} if rope["rope_type"] == "yarn" else {}
    LlamaConfig(max_position_embeddings=1024, vocab_size=16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 1e4, **original, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bool(findings("attention factor", f"{MODEL}.path={tmp_path}")) == fires


def test_settings_that_have_the_effect_of_another_one_are_no_hazard(findings):
    assert not findings("unread settings", f"{FSDP}.strategy=fsdp2", f"{ACTOR}.strategy=fsdp2")
    off = ("trainer.val_before_train=False", "trainer.test_freq=-1", f"{ROLLOUT}.val_kwargs.do_sample=True")
    assert not findings("validation", *off)


@pytest.mark.parametrize(
    ("overrides", "fixes"),
    [
        ("", [("trainer.use_v1=False",), ()]),
        ("+algorithm.gdpo_reward_keys=[a]", [("trainer.use_v1=False",)]),
        ("+algorithm.gdpo_reward_keys=[a] trainer.use_v1=False", []),
        ("+algorithm.gdpo_reward_keys=[a] stability=icepop", [("algorithm.adv_estimator=grpo",)]),
    ],
)
def test_the_fix_of_gdpo_keeps_it(findings, overrides, fixes):
    found = findings("estimator", "algorithm.adv_estimator=gdpo", *overrides.split())
    assert [one.fix for one in found] == fixes
