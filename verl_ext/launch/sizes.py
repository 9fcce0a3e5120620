"""Checks that a run's sizes fit each other and its model, before a cluster starts.

Most rules are asserted by verl 0.9.1, megatron-core 0.16, transformers or vLLM 0.27 once their workers run. The others
prevent wasted work or wrong results that no library checks. The comments name the source.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError, Problem
from verl_ext.features.verl_config import (
    ACTOR,
    BYPASS,
    MODE,
    ROLLOUT,
    ROLLOUTS,
    VIRTUAL_STAGES,
    judged,
    needs_critic,
    needs_reference,
    refers_to_actor,
    repeats_another,
)
from verl_ext.launch.families import RECURRENT
from verl_ext.launch.models import ModelShape
from verl_ext.launch.names import similar
from verl_ext.launch.packages import LAYERS, MEGATRON, engine_arguments, model_type

ARP = "actor_rollout_ref"
# Values of actor.strategy. verl's other engines (veomni, torchtitan, automodel, fsdp_turbo) have their own settings of
# parallelism, which are not read here.
STRATEGIES = ("fsdp", "fsdp2", "megatron")
_get = OmegaConf.select


class MissingSizeError(ConfigError):
    """A config lacks a size, such as Megatron's in a config that was composed for FSDP."""


def size_problems(config: DictConfig, shape: ModelShape | None) -> Iterator[Problem]:
    """Yields what contradicts itself; if `shape` is None, only what needs no model.

    Raises:
        MissingSizeError: a size is not set.
    """
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in STRATEGIES:
        yield Problem(f"{ACTOR}.strategy={strategy}: sizes are known only for {', '.join(STRATEGIES)}")
        return
    of_ranks = _megatron_problems if strategy == "megatron" else _fsdp_problems
    ranks = [*judged(of_ranks(config, shape))]
    yield from ranks
    if not ranks:  # else the number of data-parallel ranks is not known
        yield from judged(_batch_problems(config))
    yield from judged(_length_problems(config))
    yield from judged(_server_problems(config, shape))
    engine = name if (name := _get(config, f"{ROLLOUT}.name")) in ROLLOUTS else "vllm"
    yield from judged(engine_argument_problems(_get(config, f"{ROLLOUT}.engine_kwargs.{engine}") or {}, engine))


def world_size(config: DictConfig) -> int:
    """Returns the number of training workers."""
    return int(config.trainer.nnodes * config.trainer.n_gpus_per_node)


def gpu_pools(config: DictConfig) -> dict[str, tuple[int, int]]:
    """Returns node of settings -> machines, and GPUs per machine, of those with GPUs of their own:
    `_init_resource_pool_mgr` of v1/trainer_base.py, and the rollout of v1/trainer_separate_async.py."""
    used = {
        "trainer": True,
        "reward.reward_model": _get(config, "reward.reward_model.enable_resource_pool"),
        "distillation": _get(config, "distillation.enabled"),
        ROLLOUT: _get(config, "trainer.use_v1") and _get(config, MODE) == "separate_async",
    }
    sizes = {each: (_get(config, f"{each}.nnodes"), _get(config, f"{each}.n_gpus_per_node")) for each in used}
    return {
        each: sizes[each]
        for each in used
        if used[each] and all(isinstance(size, int) and size > 0 for size in sizes[each])
    }


def data_parallel_size(config: DictConfig) -> int:
    """Returns the number of ranks that train on different sequences."""
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return world_size(config) // ulysses_size(config)
    ways = ("tensor_model", "pipeline_model", "context")
    return world_size(config) // math.prod(_size(config, f"{MEGATRON}.{way}_parallel_size") for way in ways)


def pipeline_stages(config: DictConfig, layers: int) -> list[int]:
    """Returns the layers of each pipeline stage, by megatron-core's rules (transformer_config.py)."""
    stages = _size(config, f"{MEGATRON}.pipeline_model_parallel_size")
    first, last = (_get(config, f"{LAYERS}.num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    split = f"{MEGATRON}.pipeline_model_parallel_size={stages}"
    if first is None and last is None:
        accounted = (f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
        extra = [int(bool(_get(config, f"{LAYERS}.{setting}"))) for setting in accounted]
        if (layers + sum(extra)) % stages:
            raise ConfigError(f"{split} must divide the model's {layers} layers plus {sum(extra)} accounted for")
        size = (layers + sum(extra)) // stages
        counts = [size] * stages
        counts[0] -= extra[0]
        counts[-1] -= extra[1]
        return counts
    ends = [count for count in (first, last) if count is not None]
    middle, left = stages - len(ends), layers - sum(ends)
    if (middle == 0) != (left == 0) or left < 0 or (middle and left % middle):
        raise ConfigError(
            f"{split} leaves {left} of {layers} layers to {middle} stages; change {LAYERS}."
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    stages_between = [left // middle] * middle if middle else []
    return [count for count in (first, *stages_between, last) if count is not None]


def engine_argument_problems(given: Iterable[str], engine: str = "vllm") -> Iterator[Problem]:
    """Checks that vLLM's parser, or SGLang's ServerArgs, knows every name; skipped if the engine is not installed."""
    known = engine_arguments(engine)
    for name in given:
        if known and name.replace("-", "_") not in known:
            found = f"{ROLLOUT}.engine_kwargs.{engine}.{name} is not an argument of {ROLLOUTS[engine]}"
            near = ", ".join(similar(name, known))
            yield Problem(found, f"similar: {near}" if near else "leave it out")


def _megatron_problems(config: DictConfig, shape: ModelShape | None) -> Iterator[Problem]:
    world = world_size(config)
    tensor = _size(config, f"{MEGATRON}.tensor_model_parallel_size")
    pipeline = _size(config, f"{MEGATRON}.pipeline_model_parallel_size")
    context = _size(config, f"{MEGATRON}.context_parallel_size")
    expert = _size(config, f"{MEGATRON}.expert_model_parallel_size")
    interleaved = _get(config, VIRTUAL_STAGES)
    expert_tensor = _get(config, f"{MEGATRON}.expert_tensor_parallel_size") or tensor  # null: as tensor parallelism
    gpus = f"trainer.nnodes x n_gpus_per_node={world}"
    setting = f"{MEGATRON}.tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size"
    yield from _indivisible(tensor * pipeline * context, world, f"{setting}={tensor} x {pipeline} x {context}", gpus)
    # megatron/core/parallel_state.py: experts have a grid of their own
    setting = f"{MEGATRON}.expert_tensor_parallel_size x expert_model_parallel_size x pipeline_model_parallel_size"
    whole = (f"{MEGATRON}.expert_tensor_parallel_size=1",) if world % (expert * pipeline) == 0 else ()
    grid = f"{setting}={expert_tensor} x {expert} x {pipeline}"
    yield from _indivisible(expert_tensor * expert * pipeline, world, grid, gpus, whole)
    if interleaved is not None and pipeline == 1:
        yield Problem(f"{VIRTUAL_STAGES}={interleaved} needs a pipeline", fix=(f"{VIRTUAL_STAGES}=null",))
    if shape is None:
        return
    yield from _head_problems(shape, tensor, f"{MEGATRON}.tensor_model_parallel_size={tensor}")
    if shape.routed_experts:
        setting = f"{MEGATRON}.expert_model_parallel_size={expert}"
        yield from _indivisible(expert, shape.routed_experts, setting, f"the model's {shape.routed_experts} experts")
        setting = f"{MEGATRON}.expert_tensor_parallel_size={expert_tensor}"
        width = f"the experts' width of {shape.moe_intermediate}"
        yield from _indivisible(expert_tensor, shape.moe_intermediate, setting, width)
        if tensor > 1 and not _get(config, f"{MEGATRON}.sequence_parallel"):
            setting = f"{MEGATRON}.sequence_parallel"
            why = f"cannot train a mixture of experts at tensor_model_parallel_size={tensor}"
            yield Problem(f"{setting}=false {why}", fix=(f"{setting}=true",))
    elif expert > 1:
        setting = f"{MEGATRON}.expert_model_parallel_size"
        yield Problem(f"{setting}={expert} needs experts", fix=(f"{setting}=1",))
    try:
        stages = pipeline_stages(config, shape.layers)
    except ConfigError as error:
        yield from error.problems
    else:
        for count in stages:
            of_stage = f"{count} layers of a pipeline stage"
            yield from _indivisible(interleaved or 1, count, f"{VIRTUAL_STAGES}={interleaved}", of_stage)
    if shape.linear and config.actor_rollout_ref.model.use_remove_padding:  # which verl gives to the engine's own
        yield Problem(  # megatron/core/ssm/gated_delta_net.py raises on packed sequences
            f"{ARP}.model.use_remove_padding=true packs sequences, which megatron-core 0.16 refuses for linear "
            "attention",
            fix=(f"{ARP}.model.use_remove_padding=false",),
        )


def _fsdp_problems(config: DictConfig, shape: ModelShape | None) -> Iterator[Problem]:
    world, sequence = world_size(config), ulysses_size(config)
    ranks, gpus = f"{ACTOR}.ulysses_sequence_parallel_size={sequence}", f"trainer.nnodes x n_gpus_per_node={world}"
    yield from _indivisible(sequence, world, ranks, gpus)
    size = _size(config, f"{ACTOR}.fsdp_config.fsdp_size")
    if size > 0:
        yield from _indivisible(size, world, f"{ACTOR}.fsdp_config.fsdp_size={size}", gpus)
    packed = config.actor_rollout_ref.model.use_remove_padding
    recurrent = shape is not None and shape.linear and model_type(config) in RECURRENT
    if sequence > 1 and recurrent:
        yield Problem(
            f"{ranks} splits sequences, and this model's linear attention would start from an empty state on each rank",
            fix=(f"{ACTOR}.ulysses_sequence_parallel_size=1", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=1"),
        )
    if sequence > 1 and not packed:
        yield Problem(f"{ranks} needs packed sequences", fix=(f"{ARP}.model.use_remove_padding=true",))
    if shape is None:
        return
    yield from _head_problems(shape, sequence, ranks)
    if recurrent and packed:
        yield Problem(
            f"{ARP}.model.use_remove_padding=true packs sequences, and verl does not pass their ends to this model's "
            "linear attention, so each sequence would continue from the state of the one before it",
            fix=(f"{ARP}.model.use_remove_padding=false",),
        )


def _batch_problems(config: DictConfig) -> Iterator[Problem]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks = data_parallel_size(config)
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    setting = f"{ACTOR}.ppo_mini_batch_size={mini}"
    trajectories = mini * rollout.n
    enough = mini * (ranks // math.gcd(ranks, trajectories))
    fix = (f"{ACTOR}.ppo_mini_batch_size={enough}", f"data.train_batch_size={math.lcm(batch, enough)}")
    if trajectories % ranks:
        yield Problem(f"{ranks} data-parallel ranks must divide {setting} x {ROLLOUT}.n={rollout.n}", fix=fix)
        return
    dynamic, rollouts = f"{ACTOR}.use_dynamic_bsz={actor.use_dynamic_bsz}", f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    if rollout.log_prob_use_dynamic_bsz != actor.use_dynamic_bsz:  # engine_workers.py asserts it
        same = (f"{rollouts}={str(actor.use_dynamic_bsz).lower()}",)
        yield Problem(f"{rollouts}={rollout.log_prob_use_dynamic_bsz} contradicts {dynamic}", fix=same)
    # Log-probs are computed of the whole batch, which verl pads to whole mini-batches, those of a critic that warms up
    # aside; in bypass mode those of the policy are the rollout's (v1/trainer_base.py).
    multiple = math.lcm(mini, config.critic.ppo_mini_batch_size or mini) if needs_critic(config) else mini
    prompts = mini if config.trainer.v1.trainer_mode == "separate_async" else batch
    whole = math.ceil(prompts / multiple) * multiple * rollout.n
    passes = [(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz", trajectories)]
    own = 0 if _get(config, BYPASS) else whole
    passes += [(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz", own)]
    if needs_reference(config) and not refers_to_actor(config):  # else the actor without its adapter
        of_ref = f"{ARP}.ref.log_prob_micro_batch_size_per_gpu"
        passes += [(of_ref, f"{ARP}.ref.log_prob_use_dynamic_bsz", whole)]
    passes = [one for one in passes if not _get(config, one[1])]
    if missing := {where: f"{by_tokens}=true" for where, by_tokens, _ in passes if not _get(config, where)}:
        switches = tuple(dict.fromkeys(missing.values()))
        yield Problem(f"not set: {', '.join(missing)}", fix=switches, otherwise="set what is missing")
        return
    for where, _, rows in passes:
        micro = _get(config, where)
        fitting = (f"{where}={math.gcd(micro, rows // ranks)}",)
        own_rows = f"{rows // ranks} trajectories per rank"
        yield from _indivisible(micro, rows // ranks, f"{where}={micro}", own_rows, fitting)
    if config.trainer.v1.trainer_mode != "separate_async":
        return
    steps = config.trainer.v1.separate_async.parameter_sync_step
    if batch != steps * mini:
        yield Problem(
            f"data.train_batch_size={batch} must be trainer.v1.separate_async.parameter_sync_step={steps} x {setting}"
        )
    if rollout.nnodes < 1:
        yield Problem(f"{ROLLOUT}.nnodes={rollout.nnodes} leaves separate_async without GPUs for the rollout")
    if rollout.checkpoint_engine.backend == "naive":
        backend = f"{ROLLOUT}.checkpoint_engine.backend"
        yield Problem(f"{backend}=naive cannot reach other GPUs", fix=(f"{backend}=nccl",))


def _length_problems(config: DictConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    lengths = f"data.max_prompt_length + max_response_length={longest}"
    limit = config.actor_rollout_ref.rollout.max_model_len
    if limit is not None and limit < longest:
        # `generate` of verl's vllm_async_server.py and async_sglang_server.py: at most max_model_len less the prompt
        why = "answers end at max_model_len less the prompt, and response_length/clip_ratio does not count them as cut"
        whole = (f"{ROLLOUT}.max_model_len={longest}",)
        yield Problem(f"{ROLLOUT}.max_model_len={limit} is below {lengths}", why, whole, level="warning")
    if not actor.use_dynamic_bsz:
        return
    # verl/utils/seqlen_balancing.py asserts it; ranks of sequence or context parallelism share the tokens.
    context = f"{MEGATRON}.context_parallel_size"
    shared = _size(config, context) if actor.strategy == "megatron" else ulysses_size(config)
    limits = [f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
    for where in [*limits, f"{ARP}.ref.log_prob_max_token_len_per_gpu"]:
        tokens = _size(config, where)
        if tokens * shared < longest and not repeats_another(config, where):
            fix = (f"{where}={math.ceil(longest / shared)}",)
            yield Problem(f"{where}={tokens} on {shared} rank(s) cannot hold {lengths}", fix=fix)


def _server_problems(config: DictConfig, shape: ModelShape | None) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    separate = config.trainer.v1.trainer_mode == "separate_async"
    node = rollout.n_gpus_per_node if separate else config.trainer.n_gpus_per_node
    gpus = rollout.nnodes * node if separate else world_size(config)
    tensor, data, expert = rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.expert_parallel_size
    setting = f"{ROLLOUT}.tensor_model_parallel_size={tensor}"
    replica = tensor * data
    yield from _indivisible(replica, gpus, f"{setting} x data_parallel_size={data}", f"the rollout's {gpus} GPUs")
    of_node = f"{setting} x data_parallel_size={data}"
    yield from _indivisible(min(node, replica), replica, f"{node} GPUs of a node", of_node)
    if data > 1:  # verl/workers/rollout/vllm_rollout/vllm_async_server.py
        yield from _indivisible(tensor, node, setting, f"{node} GPUs of a node, with data_parallel_size={data}")
    if expert > 1 and expert != replica:
        parallel = f"{ROLLOUT}.expert_parallel_size"
        whole = f"must be 1 or {setting} x data_parallel_size={data}"
        yield Problem(f"{parallel}={expert} {whole}", fix=(f"{parallel}={replica}",))
    if shape is None:
        return
    yield from _head_problems(shape, tensor, setting)
    if shape.linear:
        heads = f"{shape.linear.key_heads} key heads of linear attention"
        yield from _indivisible(tensor, shape.linear.key_heads, setting, heads)
    if expert > 1:
        name = f"{ROLLOUT}.expert_parallel_size={expert}"
        yield from _indivisible(expert, shape.routed_experts, name, f"the model's {shape.routed_experts} experts")
    elif shape.routed_experts:
        width = f"the experts' width of {shape.moe_intermediate}"
        yield from _indivisible(tensor, shape.moe_intermediate, setting, width)


def _head_problems(shape: ModelShape, ranks: int, setting: str) -> Iterator[Problem]:
    """Checks the attention heads. If there are fewer key-value heads than ranks, they are copied evenly."""
    yield from _indivisible(ranks, shape.heads, setting, f"the model's {shape.heads} attention heads")
    if not shape.mla and shape.kv_heads % ranks and ranks % shape.kv_heads:
        yield Problem(f"{setting} must divide the model's {shape.kv_heads} key-value heads or be a multiple of them")


def _indivisible(divisor: int, number: int, setting: str, what: str, fix: tuple[str, ...] = ()) -> Iterator[Problem]:
    if number % divisor:
        yield Problem(f"{setting} must divide {what}", fix=fix)


def ulysses_size(config: DictConfig) -> int:
    """Returns the size of Ulysses sequence parallelism; verl reads it from either of two settings."""
    places = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    return max(_get(config, f"{ACTOR}.{place}") or 1 for place in places)


def _size(config: DictConfig, name: str) -> Any:
    if (value := _get(config, name)) is None:
        raise MissingSizeError(f"{name} is not set")
    return value
