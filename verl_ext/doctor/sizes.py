"""Checks batches, lengths and ranks against each other, the model and the machines."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from verl_ext.base.errors import ConfigError, Problem
from verl_ext.doctor.checks import Context, check, error, note, ok, unset, warning
from verl_ext.doctor.precision import FLOAT32, FSDP, dtype_name
from verl_ext.features.verl_config import ACTOR, HYBRID, ROLLOUT, trains_lora
from verl_ext.launch.gpus import named
from verl_ext.launch.sizes import STRATEGIES, MissingSizeError
from verl_ext.plan.memory import plan_memory
from verl_ext.plan.sizes import GIB, Sizes, problems_of_sizes, read_sizes

FP8_BLOCK = 128
LARGE = 0.01  # nats; 1% in every ratio, if the model has not learnt to avoid the ids of the padding


@check("sizes", needs="engine")
def sizes(context: Context) -> Iterable[Problem]:
    """Batches, lengths and ranks that contradict each other, or the model if its shape is known from config.json or
    `verl_ext/launch/models.py`. A note: a size that is not set, or a strategy other than `fsdp`, `fsdp2` and
    `megatron`, whose sizes are not known. A warning: training in float32 on FSDP that does not fit the GPUs.

    Source: the comments in verl_ext/launch/sizes.py, on verl 0.9.1, megatron-core 0.16, transformers and vLLM 0.27.
    """
    if context.strategy not in STRATEGIES:
        why = f"batches, lengths and ranks were not checked: sizes are known only for {', '.join(STRATEGIES)}"
        yield note(f"{ACTOR}.strategy={context.strategy}", why)
        return
    shape = context.shape
    try:
        problems = problems_of_sizes(context.config, shape)
    except MissingSizeError as failure:
        yield note(str(failure), "batches, lengths and ranks were not checked")
        return
    except ConfigError as failure:
        problems = [*failure.problems]
    for problem in problems:
        why = problem.why or "the workers would stop, or part of the machines would be idle"
        found = str(replace(problem, why=""))
        yield replace(problem, found=found, why=why, fix=unset(context.config, problem.fix))
    if problems:
        return
    own = [*_batches(context), *_too_large(context), *_whole_tensors(context)]
    yield from own
    if not own and not _refused_by_verl(context):
        beside = "" if shape else "; the model's shape is not known, and was left out"
        yield ok(f"batches, lengths and ranks fit each other{beside}")


def _batches(context: Context) -> Iterator[Problem]:
    """Yields a last mini-batch that is smaller than the others, and an epoch without a batch.

    Source: `_balance_batch` of v1/trainer_base.py fills the last mini-batch; `agg_loss` of core_algos.py divides by the
    number of answers of a whole one.
    """
    batch, mini = context.get("data.train_batch_size"), context.get(f"{ACTOR}.ppo_mini_batch_size")
    if batch % mini and not _refused_by_verl(context):
        which = "last" if batch > mini else "only"
        why = f"the {which} one has {batch % mini} prompts and padding, and makes a whole optimizer step"
        found = f"data.train_batch_size={batch} is no multiple of ppo_mini_batch_size={mini}"
        if str(context.get(f"{ACTOR}.loss_agg_mode")).startswith("seq-mean"):
            why = f"{why}; a mean over answers divides its gradient by {mini / (batch % mini):.2g}"
            yield warning(found, why, f"data.train_batch_size={max(batch - batch % mini, mini)}")
        else:
            yield note(found, why)
    if 0 < (samples := context.get("data.train_max_samples", -1)) < batch:
        why = "an epoch has no whole batch, and the trainer ends with a division by zero"
        found = f"data.train_max_samples={samples}, data.train_batch_size={batch}"
        yield error(found, why, "data.train_max_samples=-1")


def _refused_by_verl(context: Context) -> bool:
    """Returns True for a batch below a mini-batch, if `verl's validation` refuses it (`ActorConfig.validate`)."""
    below = context.get("data.train_batch_size") < context.get(f"{ACTOR}.ppo_mini_batch_size")
    return below and not context.get(f"{ACTOR}.use_dynamic_bsz")


def _too_large(context: Context) -> Iterator[Problem]:
    """Yields a warning if weights, gradients and Adam's state alone are larger than the GPU, whatever is offloaded
    between the phases. Source: `verl_ext.plan.memory`; `offload_policy` of FSDP2 keeps them in the machine's memory."""
    if context.gpu is None or trains_lora(context.config) or (sizes := _sizes_in_float32(context)) is None:
        return
    needed = sum(plan_memory(sizes).update.lines[part] for part in ("weights", "gradients", "optimizer"))
    if needed > sizes.gpu.memory_gib * GIB:
        found = f"{needed / GIB:.0f} GiB of weights, gradients and optimizer per GPU, on a {context.gpu.name}"
        why = f"it has {sizes.gpu.memory_gib:.0f} GiB, and the update runs out of memory: use more GPUs, or a LoRA"
        yield warning(found, why)


def _sizes_in_float32(context: Context) -> Sizes | None:
    """Returns the plan's sizes, if FSDP keeps float32 weights on a known GPU and the model's shape is known."""
    gpu, whole = context.gpu, dtype_name(context.get(f"{FSDP}.model_dtype", FLOAT32)) == FLOAT32
    if not context.on_fsdp or not whole or context.get(f"{FSDP}.offload_policy"):
        return None
    if gpu is None or named(gpu.name) is None or context.shape is None:
        return None
    return read_sizes(context.config, gpu.name)


def _whole_tensors(context: Context) -> Iterator[Problem]:
    """Yields what a tensor of the model is too small or too large for: fp8's blocks, of which a GPU's part of an expert
    has no whole number; the bucket of a transfer that does not split a weight.

    Source: `weight_block_size` of vllm_async_server.py (0.9.1), layers/quantization/fp8.py of vLLM 0.27; the assert of
    verl's mooncake_checkpoint_engine.py (verl issue 5779).
    """
    shape, ranks = context.shape, context.get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    if shape is None:
        return
    width, experts = shape.moe_intermediate, context.get(f"{ROLLOUT}.expert_parallel_size", 1)
    if context.get(f"{ROLLOUT}.quantization") == "fp8" and width and experts == 1 and width % (FP8_BLOCK * ranks):
        why = f"{width} / {ranks} of an expert is no multiple of fp8's blocks of {FP8_BLOCK}, and vLLM stops"
        parallel = f"{ROLLOUT}.tensor_model_parallel_size"
        fits = [each for each in range(ranks, 0, -1) if width % (FP8_BLOCK * each) == 0 and ranks % each == 0]
        yield error(f"quantization=fp8 with {parallel}={ranks}", why, *(f"{parallel}={each}" for each in fits[:1]))
    bucket, sends = (f"{ROLLOUT}.checkpoint_engine.{name}" for name in ("update_weights_bucket_megabytes", "backend"))
    largest = shape.vocabulary * shape.hidden * 2 / 2**20
    if context.get(sends) == "mooncake" and largest > context.get(bucket, math.inf):
        why = f"the embedding has {largest:.0f} MB in bfloat16, and this transfer does not split a weight"
        yield error(f"{bucket}={context.get(bucket)}", why, f"{bucket}={2 ** math.ceil(math.log2(largest))}")


@check("rollout at its start", needs="engine", after=("sizes",))
def rollout_at_its_start(context: Context) -> Iterable[Problem]:
    """A share of the GPU for the rollout that is not free beside the weights of training, so that vLLM does not start.

    Source: `_setup` of v1/trainer_base.py makes the actor before the rollout (verl issue 4229, PR 5384); vLLM compares
    what is free with gpu_memory_utilization of the whole (v1/worker/gpu_worker.py).
    """
    if not context.with_vllm or not context.get(HYBRID, True) or context.get(f"{FSDP}.param_offload"):
        return
    if (sizes := _sizes_in_float32(context)) is None:
        return
    weights, card = plan_memory(sizes).update.lines["weights"], sizes.gpu.memory_gib * GIB
    setting, share = context.engine_argument("gpu_memory_utilization")
    if isinstance(share, float) and weights + share * card > card:
        why = f"{weights / GIB:.0f} of {card / GIB:.0f} GiB have the weights of training when the rollout starts"
        yield error(f"{setting}={share:g}", f"{why}, and vLLM stops", f"{FSDP}.param_offload=true")


@check("gpu")
def gpu(context: Context) -> Iterable[Problem]:
    """A note: `trainer.device=cuda` and no GPU here; give `--gpu`.

    Source: `torch.cuda.is_available`, and --gpu.
    """
    if context.get("trainer.device") == "cuda" and context.gpu is None:
        yield note("trainer.device=cuda, and no GPU is found here", "give --gpu: memory and kernels are judged by it")


@check("vocabulary", needs="with_vllm")
def vocabulary(context: Context) -> Iterable[Problem]:
    """Ids above the tokenizer's length, which verl masks in the rollout but not in training.

    Source: `monkey_patch_compute_logits` of verl/workers/rollout/vllm_rollout/utils.py (0.9.1) masks ids from
    `len(tokenizer)` on in vLLM; verl/workers/engine/fsdp/transformer_impl.py has no such mask. Training's log-probs are
    lower by the probability of those ids: log(vocab_size / len(tokenizer)) if they are as likely as any other (0.24 was
    measured for 128 rows and 101 tokens, with random weights), almost 0 if the model has learnt to avoid them.
    """
    if context.model_config is None or context.tokenizer_length is None:
        return
    rows = getattr(context.model_config.get_text_config(), "vocab_size", None)
    tokens = context.tokenizer_length
    if rows is None:
        return
    found = f"vocab_size={rows}, len(tokenizer)={tokens}"
    if rows < tokens:
        yield warning(found, "ids above the vocabulary have no embedding; use the model's own tokenizer")
    elif rows == tokens:
        yield ok(f"vocab_size={rows}, equal to len(tokenizer)")
    else:
        log_k = math.log(rows / tokens)
        why = f"verl masks the extra ids in vLLM but not in training: about {log_k:.2g} nats in every log-ratio"
        level = warning if log_k > LARGE else note
        yield level(found, f"{why}, for a model that has not learnt to avoid them")
