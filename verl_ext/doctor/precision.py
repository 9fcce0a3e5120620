"""Number formats of the two engines, quantised rollouts and quantised training."""

from collections.abc import Iterable

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, error, note, ok, warning
from verl_ext.features.feature import Need
from verl_ext.features.float32_head import ARGUMENTS as HEADS
from verl_ext.features.float32_head import SETTING as BOTH_HEADS
from verl_ext.features.guard import published_level
from verl_ext.features.losses import LOSS, reads_k
from verl_ext.features.verl_config import ACTOR, BYPASS, CORRECTION, ROLLOUT, model_json, rollout_format
from verl_ext.guard.levels import OWN_FACTOR, OWN_READINGS
from verl_ext.launch.families import FLOAT32_ROUTERS
from verl_ext.launch.packages import LAYERS

FSDP = f"{ACTOR}.fsdp_config"
PARAM_DTYPE = f"{FSDP}.mixed_precision.param_dtype"
FAKE = "stability.fake_quantization"
QUANTIZATION = f"{ROLLOUT}.quantization"
ROUTER_DTYPE = f"{LAYERS}.moe_router_dtype"
OF_VERL = {"vllm": ("fp8", "torchao", "ascend"), "sglang": ("fp8",)}
DTYPES = BFLOAT16, FLOAT16, FLOAT32 = "bfloat16", "float16", "float32"
# As verl's PrecisionType (verl/utils/torch_dtypes.py) and vLLM's `dtype` argument write them.
NAMES = {
    "bf16": BFLOAT16,
    "fp16": FLOAT16,
    "half": FLOAT16,
    "16": FLOAT16,
    "fp32": FLOAT32,
    "float": FLOAT32,
    "32": FLOAT32,
}


def dtype_name(value: object) -> str:
    return NAMES.get(str(value), str(value))


def training_dtype(context: Context) -> str | None:
    """Returns the dtype of the training engine; None if its code was not read (VeOmni, TorchTitan, Automodel).

    Source: `_build_fsdp_module` of verl/workers/engine/fsdp/transformer_impl.py and `param_dtype` of
    verl/workers/engine/megatron/transformer_impl.py (0.9.1).
    """
    if context.on_fsdp:
        return dtype_name(context.get(PARAM_DTYPE, BFLOAT16))
    if context.on_megatron:
        return dtype_name(context.get(f"{ACTOR}.megatron.dtype", BFLOAT16))
    return None


def _ignored_dtype(context: Context) -> str | None:
    """Returns fsdp_config.dtype if the FSDP engine computes in another; else None."""
    if not context.on_fsdp or context.get(PARAM_DTYPE) is not None:
        return None
    asked = dtype_name(context.get(f"{FSDP}.dtype", BFLOAT16))
    return asked if asked != BFLOAT16 else None


@check("training dtype", needs="config")
def ignored_dtype(context: Context) -> Iterable[Problem]:
    """`fsdp_config.dtype`, which the FSDP engine does not read.

    Source: `_build_fsdp_module` of verl/workers/engine/fsdp/transformer_impl.py (0.9.1) reads
    only mixed_precision.param_dtype, and uses bfloat16 if it is not set.
    """
    if (asked := _ignored_dtype(context)) is None:
        return
    why = "verl's FSDP engine reads its dtype from mixed_precision.param_dtype, and computes in bfloat16 without it"
    fix = (f"++{PARAM_DTYPE}={asked}",) if asked in DTYPES else ()
    yield warning(f"actor.fsdp_config.dtype={asked} has no effect", why, *fix)


@check("dtype of both engines", needs="engine")
def dtypes_differ(context: Context) -> Iterable[Problem]:
    """bf16 on one side and fp16 on the other.

    Source: "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788: rounding causes the mismatch.
    """
    training = training_dtype(context)
    setting, value = context.engine_argument("dtype")
    rollout = dtype_name(value)
    if training is None or rollout not in DTYPES:
        return
    if context.on_megatron and context.get(FSDP):  # `verl's settings` names what to set instead
        return
    wanted = _ignored_dtype(context) or training  # what training computes in once `training dtype` is fixed
    if rollout == wanted:
        yield ok(f"rollout and training in {rollout}")
    elif FLOAT32 in (rollout, wanted):
        yield note(f"rollout in {rollout}, training in {wanted}", "the engines round differently")
    else:
        why = "the engines round differently at every operation, which alone makes a gap"
        fix = (f"{setting}={wanted}",) if wanted in DTYPES else ()
        yield warning(f"rollout in {rollout}, training in {wanted}", why, *fix)


@check("router dtype", needs="model_config")
def router_dtype(context: Context) -> Iterable[Problem]:
    """Megatron's routers in half precision: `moe_router_dtype` is not set, and Megatron-Bridge does not set it for this
    model.

    Source: `TopKRouter.gating` of megatron/core/transformer/moe/router.py (0.16.1) computes in the dtype of its input
    unless `moe_router_dtype` is fp32 or fp64; from 32 experts on, `TransformerConfig` warns about it. FLOAT32_ROUTERS
    are the models for which Megatron-Bridge (0.3.1, 0.5.2) sets it. mbridge is not judged. Megatron-LM PR 5694 changed
    to float32 to agree with the rollout. transformers and vLLM compute the router of Qwen3-MoE in the model's dtype
    (models/qwen3_moe/modeling_qwen3_moe.py of 5.10, model_executor/models/qwen3_moe.py of 0.27); `verl-ext probe` shows
    the dtypes of the running engines.
    """
    model = context.model_config
    if not context.on_megatron or context.get(f"{ACTOR}.megatron.vanilla_mbridge"):
        return
    if not context.experts or training_dtype(context) == FLOAT32:
        return
    if (asked := context.get(ROUTER_DTYPE)) in ("fp32", "fp64"):
        yield ok(f"Megatron's routers compute in {asked}")
    elif model.model_type in FLOAT32_ROUTERS:
        yield ok(f"Megatron-Bridge computes the routers of {model.model_type} in fp32")
    else:
        why = "if scores are closer than half precision can show, rounding chooses the experts, differently per engine"
        found = f"moe_router_dtype is not set: routers in {training_dtype(context)}"
        yield warning(found, why, f"++{ROUTER_DTYPE}=fp32")


def has_float32_head(context: Context) -> bool:
    """Returns True unless the run's vLLM is too old for `stability.float32_head`; 0.27.1 is the oldest tried."""
    return not context.vllm_before(0, 27)


@check("head dtype", needs="engine")
def head_dtype(context: Context) -> Iterable[Problem]:
    """An LM head that is in float32 in the rollout (`hf_overrides.head_dtype`, `enable_fp32_lm_head`) and in half
    precision in training, or float32 logits that this vLLM cannot compute. `stability.float32_head` sets both engines.

    Source: `ModelConfig.head_dtype` of vllm/config/model.py (0.27.1), the model's dtype unless hf_overrides names
    another; vLLM PR 48390, before which models that generate ignore it; `enable_fp32_lm_head` of
    sglang/srt/server_args.py (0.5.12). verl 0.9.1 computes logits in the dtype of training: under autocast with FSDP
    (`forward_step` of workers/engine/fsdp/transformer_impl.py), in params_dtype with Megatron. In bfloat16 logits from
    16 to 32 are 0.125 apart.
    """
    training = training_dtype(context)
    setting, _ = HEADS["vllm" if context.with_vllm else "sglang"]
    given = context.get(setting)
    wide = dtype_name(given) == FLOAT32 if context.with_vllm else bool(given)
    if training is None or training == FLOAT32:
        return
    if context.get(BOTH_HEADS):
        if has_float32_head(context):
            yield ok("both engines compute logits in float32")
        else:
            why = "its generating models have no float32 head, and the run stops when its engines have started"
            yield error(f"{BOTH_HEADS}=true with {context.vllm}", why, f"{BOTH_HEADS}=false")
    elif wide and not has_float32_head(context):
        yield warning(f"{setting} with {context.vllm}", "its generating models ignore it", f"++{setting}=model")
    elif wide:
        why = f"training rounds its logits to {training}: half of the rounding that the gap could lose is still there"
        yield warning(f"LM head of the rollout in float32, of training in {training}", why, f"{BOTH_HEADS}=true")


@check("loss scaling", needs="config")
def loss_scaling(context: Context) -> Iterable[Problem]:
    """Weights in fp16 without a scaled loss.

    Source: `_build_fsdp_module` (0.9.1) makes a ShardedGradScaler only for mixed_precision.param_dtype=fp16;
    verl/utils/megatron/optimizer.py (0.9.1) sets an initial loss scale of 32768 for fp16.
    """
    training = training_dtype(context)
    stored = dtype_name(context.get(f"{FSDP}.model_dtype", FLOAT32))
    if context.on_fsdp and stored == FLOAT16 and training != FLOAT16:
        found = f"actor.fsdp_config.model_dtype=fp16 with computation in {training}"
        why = "weights and gradients are in fp16, but verl scales the loss only if it computes in fp16"
        yield warning(found, why, f"{FSDP}.model_dtype=fp32")
    elif training == FLOAT16:
        yield ok("training in fp16, with verl's loss scaling")


@check("quantized rollout", needs="engine")
def quantized_rollout(context: Context) -> Iterable[Problem]:
    """A rollout with quantised weights or an fp8 KV cache, without a correction.

    Source: `_apply_quantization` of verl/workers/rollout/vllm_rollout/vllm_async_server.py (0.9.1); in verl PR 4415, an
    fp8 rollout with token-level TIS at cap 2 learns like bf16.
    """
    _, weights = context.engine_argument("quantization")
    _, cache = context.engine_argument("kv_cache_dtype")
    quantized = [f"quantization={weights}"] if weights else []
    quantized += [f"kv_cache_dtype={cache}"] if cache and "fp8" in str(cache) else []
    if not quantized:
        return
    found = f"rollout with {' and '.join(quantized)}"
    if corrected(context):
        yield note(found, "the gap to training is larger than in bf16, and the correction acts on more tokens")
    else:
        why = "the rollout samples from a coarser model than the trained one, and nothing corrects the loss for it"
        yield warning(found, why, *context.corrections("stability.correction=tis", dense="tis"))


@check("quantized sync", needs="engine")
def quantized_sync(context: Context) -> Iterable[Problem]:
    """A `rollout.quantization` that verl refuses; torchao's int4 and int8, for which verl 0.9.1 does not prepare weight
    syncs.

    Source: verl 0.9.1. `launch_server` of async_sglang_server.py raises an error for any rollout.quantization except
    fp8. `_apply_quantization` (workers/rollout/vllm_rollout/vllm_async_server.py) accepts the names of OF_VERL,
    quantises to fp8 in blocks (128 x 128, e4m3) and leaves the routers out. `update_weights_from_ipc` (utils.py of the
    same folder) prepares a sync if `is_quantized_model` (utils/vllm/vllm_quant_utils.py) is true: for fp8, but not for
    torchao, whose weights vLLM quantises after loading (`process_weights_after_loading` of
    model_executor/layers/quantization/torchao.py, 0.27). Read, not run.
    """
    asked = context.engine_argument("quantization")[1] if context.with_vllm else context.get(QUANTIZATION)
    accepted = OF_VERL[str(context.get(f"{ROLLOUT}.name"))]
    if not asked:
        return
    if asked not in accepted:
        why = f"verl's server of {context.engine} accepts only {', '.join(accepted)}, and the run would stop"
        yield error(f"rollout.quantization={asked}", why, f"{QUANTIZATION}=fp8")
    elif asked == "torchao":
        why = "verl 0.9.1 prepares a sync only for fp8; here it would load new weights into int4 or int8"
        yield warning("weight syncs with rollout.quantization=torchao", why, f"{QUANTIZATION}=null")
        if context.get(f"{ROLLOUT}.quantization_config_file") is None:
            why = "rollout.quantization_config_file must name a file that chooses torchao's int4 or int8"
            yield warning("rollout.quantization=torchao without a config", why, f"{QUANTIZATION}=null")


@check("quantized training", needs="config")
def quantized_training(context: Context) -> Iterable[Problem]:
    """fp8 tensorwise on Megatron, whose gap grows (verl PR 7519); `qat.mode=w4a4`.

    Source: verl PR 7519 (DAPO, Megatron, 32 steps): `rollout_corr/kl` was 0.0063 to 0.0089 in bf16, 0.0100 to 0.0313 in
    fp8 tensorwise (40 to 50 % more every eight steps), 0.0095 to 0.0087 in mxfp8. xtuner PR 2044: if training rounds
    the float32 weights to fp8 and the rollout gets them in bf16, k3 is 25 times as large after one update; 1.1 times if
    both round to bf16 first. verl 0.9.1 rounds first: under QAT, `QATQuantizer` casts to mixed_precision.param_dtype,
    in which FSDP computes (utils/qat/quantizer.py). `qat.mode`: the comment in trainer/config/engine/fsdp.yaml.
    """
    recipe = str(context.get(f"{LAYERS}.fp8_recipe", "delayed"))
    if context.on_megatron and context.get(f"{LAYERS}.fp8"):
        found = f"training in fp8, fp8_recipe={recipe}"
        if recipe == "tensorwise":
            why = "its gap grew by 40 to 50 % every eight steps, while mxfp8's did not (verl PR 7519)"
            yield warning(found, why)
        else:
            yield note(found, "watch guard/growth_rate: stability=quantized warns of growth")
    qat = f"{ACTOR}.{'megatron' if context.strategy == 'megatron' else 'fsdp_config'}.qat"
    if not context.get(f"{qat}.enable"):
        return
    if context.get(f"{qat}.mode") == "w4a4":
        why = "verl warns that it diverges from the rollout, and recommends w4a16"
        yield warning("qat.mode=w4a4", why, f"{qat}.mode=w4a16")
    else:
        yield ok("quantisation-aware training: both engines quantise weights in the dtype of training")


@check("normal level", needs="config", after=("hooks",))
def normal_level(context: Context) -> Iterable[Problem]:
    """`stability.guard.level=0`; otherwise prints the k3 above which the guard warns, with its source.

    Source: the table of verl_ext/diagnosis/levels.py, which has each level's source.
    """
    features = context.features
    if features is None or Need.MEASURED_BATCHES not in features.needs:
        return
    level, published = features.stability.guard.level, published_level(context.config)
    if level == 0:
        yield note("stability.guard.level=0", "nothing warns of a gap that is large for this model")
    elif level is not None:
        yield ok(f"the guard warns if k3 stays above {level:g} (stability.guard.level)")
    elif published is not None:
        said = f"published for {published.model} in {published.format} ({published.source})"
        yield ok(f"the guard warns if k3 stays above {published.k3:g}, {said}")
    else:
        files = model_json(context.config)
        model = files.get("model_type", "this model") if files else "a model whose config.json is not here"
        missing = f"no level is published for {model} in {rollout_format(context.config)}"
        own = f"{OWN_FACTOR:g} times the mean of the run's first {OWN_READINGS} readings"
        yield ok(f"{missing}: the guard warns above {own}")


@check("fake quantization")
def fake_quantization(context: Context) -> Iterable[Problem]:
    """A note: `stability.fake_quantization` adds a gap on purpose, for an experiment.

    Source: `verl_ext.upstream.fake_quantization`; vLLM computes with the rounded weights at its usual cost.
    """
    if (asked := context.get(f"{FAKE}.format", "none")) != "none":
        why = "it adds a gap between the engines on purpose, for an experiment, and saves neither time nor memory"
        yield note(f"{FAKE}.format={asked}", why)


def corrected(context: Context) -> bool:
    """Returns True if any method weights the loss by the ratio of the engines."""
    ours = context.methods("stability.correction")
    by_loss = reads_k(context.get(f"{LOSS}.loss_mode", ""))
    return bool(ours or by_loss or context.get(f"{CORRECTION}.rollout_is") or context.get(BYPASS))
