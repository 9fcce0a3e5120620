"""Checks batches, lengths and ranks against each other, the model and the machines."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from verl_ext.base.errors import ConfigError, Problem
from verl_ext.doctor.checks import Context, check, note, ok, unset, warning
from verl_ext.doctor.precision import FLOAT32, FSDP, dtype_name
from verl_ext.features.verl_config import ACTOR, trains_lora
from verl_ext.launch.gpus import named
from verl_ext.launch.sizes import STRATEGIES, MissingSizeError
from verl_ext.plan.memory import plan_memory
from verl_ext.plan.sizes import GIB, problems_of_sizes, read_sizes

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
    batch, mini = context.get("data.train_batch_size"), context.get(f"{ACTOR}.ppo_mini_batch_size")
    if batch % mini:
        why = f"the last one has {batch % mini} prompts and padding, and makes a whole optimizer step"
        yield note(f"data.train_batch_size={batch} is no multiple of ppo_mini_batch_size={mini}", why)
    yield from _too_large(context)
    beside = "" if shape else "; the model's shape is not known, and was left out"
    yield ok(f"batches, lengths and ranks fit each other{beside}")


def _too_large(context: Context) -> Iterator[Problem]:
    """Yields a warning if weights, gradients and Adam's state alone are larger than the GPU, whatever is offloaded
    between the phases. Source: `verl_ext.plan.memory`; `offload_policy` of FSDP2 keeps them in the machine's memory."""
    whole = dtype_name(context.get(f"{FSDP}.model_dtype", FLOAT32)) == FLOAT32
    offloaded = context.get(f"{FSDP}.offload_policy")
    if not context.on_fsdp or not whole or offloaded or trains_lora(context.config) or context.shape is None:
        return
    if context.gpu is None or named(context.gpu.name) is None:
        return
    sizes = read_sizes(context.config, context.gpu.name)
    needed = sum(plan_memory(sizes).update.lines[part] for part in ("weights", "gradients", "optimizer"))
    if needed > sizes.gpu.memory_gib * GIB:
        found = f"{needed / GIB:.0f} GiB of weights, gradients and optimizer per GPU, on a {context.gpu.name}"
        why = f"it has {sizes.gpu.memory_gib:.0f} GiB, and the update runs out of memory: use more GPUs, or a LoRA"
        yield warning(found, why)


@check("gpu")
def gpu(context: Context) -> Iterable[Problem]:
    """A note: `trainer.device=cuda` and no GPU here; give `--gpu`.

    Source: `torch.cuda.is_available`, and --gpu.
    """
    if context.get("trainer.device") == "cuda" and context.gpu is None:
        yield note("trainer.device=cuda, and no GPU is found here", "give --gpu: cascade attention depends on it")


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
