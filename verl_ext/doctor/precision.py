"""Number formats of the two engines."""

from collections.abc import Iterable

from verl_ext.doctor.context import Context
from verl_ext.doctor.findings import Finding, check

ACTOR = "actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"
PARAM_DTYPE = f"{FSDP}.mixed_precision.param_dtype"
TRANSFORMERS = ("fsdp", "fsdp2")
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
    """What the training engine computes in; None where it was not read (VeOmni, TorchTitan, Automodel).

    Source: `_build_fsdp_module` of verl/workers/engine/fsdp/transformer_impl.py and `param_dtype` of
    verl/workers/engine/megatron/transformer_impl.py (0.9.1).
    """
    if context.strategy in TRANSFORMERS:
        return dtype_name(context.get(PARAM_DTYPE, BFLOAT16))
    if context.strategy == "megatron":
        return dtype_name(context.get(f"{ACTOR}.megatron.dtype", BFLOAT16))
    return None


def _ignored_dtype(context: Context) -> str | None:
    """fsdp_config.dtype where it asks for something that the FSDP engine does not do."""
    if context.strategy not in TRANSFORMERS or context.get(PARAM_DTYPE) is not None:
        return None
    asked = dtype_name(context.get(f"{FSDP}.dtype", BFLOAT16))
    return asked if asked != BFLOAT16 else None


@check("training dtype")
def ignored_dtype(context: Context) -> Iterable[Finding]:
    """fsdp_config.dtype, which only the Megatron engine reads under its own name.

    Source: `_build_fsdp_module` of verl/workers/engine/fsdp/transformer_impl.py (0.9.1) reads
    mixed_precision.param_dtype alone, bfloat16 where there is none.
    """
    if context.config is None or (asked := _ignored_dtype(context)) is None:
        return
    yield Finding(
        "warning",
        f"actor.fsdp_config.dtype={asked} has no effect",
        "verl's FSDP engine takes its dtype from mixed_precision.param_dtype, and computes in bfloat16 without one",
        (f"++{PARAM_DTYPE}={asked}",) if asked in DTYPES else (),
    )


@check("dtype of both engines")
def dtypes_differ(context: Context) -> Iterable[Finding]:
    """The rollout's dtype against the training engine's.

    Source: "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788, on rounding as the mismatch's cause.
    """
    training = training_dtype(context)
    setting, value = context.engine_argument("dtype")
    rollout = dtype_name(value)
    if context.engine is None or training is None or rollout not in DTYPES:
        return
    if context.strategy == "megatron" and context.get(FSDP):  # `verl's validation` tells what to set instead
        return
    wanted = _ignored_dtype(context) or training  # what training computes in once `training dtype` is fixed
    if rollout == wanted:
        yield Finding("ok", f"rollout and training in {rollout}")
    elif FLOAT32 in (rollout, wanted):
        yield Finding("note", f"rollout in {rollout}, training in {wanted}", "the engines round differently")
    else:
        why = "the engines round differently at every operation, which is mismatch before anything else is"
        fix = (f"{setting}={wanted}",) if wanted in DTYPES else ()
        yield Finding("warning", f"rollout in {rollout}, training in {wanted}", why, fix)


@check("loss scaling")
def loss_scaling(context: Context) -> Iterable[Finding]:
    """fp16 gradients need a scaled loss.

    Source: `_build_fsdp_module` (0.9.1) makes a ShardedGradScaler for mixed_precision.param_dtype=fp16 only;
    verl/utils/megatron/optimizer.py (0.9.1) sets an initial loss scale of 32768 for fp16.
    """
    if context.config is None:
        return
    training = training_dtype(context)
    stored = dtype_name(context.get(f"{FSDP}.model_dtype", FLOAT32))
    if context.strategy in TRANSFORMERS and stored == FLOAT16 and training != FLOAT16:
        yield Finding(
            "warning",
            f"actor.fsdp_config.model_dtype=fp16 with computation in {training}",
            "weights and gradients are kept in fp16, and verl scales the loss only where it computes in fp16",
            (f"{FSDP}.model_dtype=fp32",),
        )
    elif training == FLOAT16:
        yield Finding("ok", "training in fp16, with verl's loss scaling")


@check("log-prob precision")
def logprob_precision(context: Context) -> Iterable[Finding]:
    """In what the FSDP engine takes log-probabilities and entropy of its half-precision logits.

    Source: `forward_step` of verl/workers/engine/fsdp/transformer_impl.py (0.9.1) takes them under autocast, where
    CUDA's softmax, log_softmax and logsumexp run in float32 (ATen/autocast_mode.h, torch 2.13; read, not run) and
    the CPU's stay in bfloat16 (tried, torch 2.13). With flash-attn, log-probs come from its own kernel, which was not
    read.
    """
    if context.config is None or context.strategy not in TRANSFORMERS or training_dtype(context) == FLOAT32:
        return
    if context.get("trainer.device") == "cpu":
        why = "autocast on CPU leaves log_softmax in bfloat16; mixed_precision.param_dtype=fp32 computes all in float32"
        yield Finding("note", f"training log-probs and entropy in {training_dtype(context)}", why)
    elif "flash-attn" not in context.versions:
        yield Finding("ok", "training log-probs and entropy in float32, under CUDA's autocast")
