"""The parts of a composed config that the plan needs: the run's sizes, and its use of the plugin."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.arguments import similar_names
from verl_ext.base.errors import ConfigError, Problem, Problems, UserError, errors_of
from verl_ext.features.verl_config import ACTOR, ROLLOUT, ROLLOUTS, is_asynchronous, replay_mode
from verl_ext.launch.gpus import GPUS, DataSheet, named
from verl_ext.launch.models import ModelShape, shape_of
from verl_ext.launch.sizes import size_problems, ulysses_size, world_size

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "bf16": 2, "fp16": 2, "fp32": 4}
CACHE_BYTES = {**BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
LARGEST = 10**12  # the largest value of a setting, so that products of several settings still fit a float
# Settings that the checks of sizes divide by.
BATCH = "data.train_batch_size"
COUNTED = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    BATCH,
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.expert_parallel_size",
)
UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
BACKEND = "transfer_queue.backend.storage_backend"
# verl's estimators that may give the tokens of one trajectory advantages of different signs.
BY_TOKEN = ("gae", "reinforce_plus_plus")
WORKERS = f"{ROLLOUT}.agent.num_workers"
USUAL_UNITS, USUAL_WORKERS = 8, 8  # verl's defaults
USUAL_TOP_TOKENS = 32  # per place, if the config asks for none
GUESSED_MEAN = 1 / 6  # of the limit, if a mean length is not given: the middle of docs/published_runs.csv
FULL = "full"  # recomputation of whole layers


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run, of its model and of its GPUs.

    Attributes:
        gpus: GPUs that train; rollout_gpus: GPUs that generate, the same GPUs unless the run is separate_async.
        shared: whether they are the same GPUs.
        engine: the rollout engine's proper name.
        recompute: Megatron's recompute_modules; FULL for whole layers, with either engine.
        fused: whether log-probabilities are computed without keeping logits (`use_fused_kernels`).
        shards: GPUs that share a copy of FSDP's weights.
        micro_tokens: maximum number of tokens in one micro-batch on one training rank.
        micro_rows: sequences of a micro-batch; 0 if its number of tokens is fixed instead.
        sequences: trajectories of a batch; updates: optimizer steps for it; epochs: how often it is used.
        mean_prompt, mean_response: mean numbers of tokens; prompt, response: their limits.
        rollout_tensor: ranks that share the attention of a sequence.
        rollout_data: groups of these ranks, each with its own sequences, that share the experts.
        cache_bytes: bytes of a number in the KV cache.
        float32_head: whether training computes logits in float32 (`stability.float32_head`).
        per_node: GPUs per machine.
    """

    shape: ModelShape
    gpu: DataSheet
    gpus: int
    rollout_gpus: int
    shared: bool
    megatron: bool
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    ulysses: int
    param_offload: bool
    optimizer_offload: bool
    cpu_adam: float
    recompute: tuple[str, ...]
    fused: bool
    float32_head: bool
    compute_bytes: int
    shards: int
    micro_tokens: int
    micro_rows: int
    prompt: int
    response: int
    mean_prompt: float
    mean_response: float
    sequences: int
    updates: int
    epochs: int
    reference: bool
    rollout_tensor: int
    rollout_data: int
    rollout_bytes: int
    cache_bytes: int
    utilization: float
    max_num_seqs: int
    engine: str = "vLLM"
    per_node: int = 8

    @property
    def nodes(self) -> int:
        """Number of machines, including those that only generate."""
        return -(-(self.gpus if self.shared else self.gpus + self.rollout_gpus) // self.per_node)

    @property
    def kv_bytes(self) -> int:
        """Bytes per token in the KV cache of one GPU."""
        return self.cache_bytes * self.shape.cached_numbers(self.rollout_tensor)

    @property
    def replica_ranks(self) -> int:
        """Number of training ranks that work on the same trajectories; each of them fetches them."""
        return self.tensor * self.pipeline * self.context if self.megatron else self.ulysses


@dataclass(frozen=True)
class Usage:
    """The parts of the plugin that a config switches on and that cost something.

    Attributes:
        measures, weighs, guards, compares, has_top_tokens: the parts of the plugin that are on.
        filters: whether tokens are taken out of the loss's mask.
        splits: whether the gap is split by the sign of the advantages.
        signs: whether advantages may differ in sign within a trajectory.
        top_tokens: number of the sampler's top tokens per place, or the usual number.
        top_token_reads: number of stages that read them.
        agreement_share: share of the trajectories whose expert ids are sent for router agreement.
        replay: `disabled`, R2 or R3, by verl or by us.
        lag: whether the age of each token's weights is sent with its weight.
        simple: whether TransferQueue uses its own storage units; units: their number.
        workers: number of agent loops.
        scored_again: feature -> trajectories that the training ranks score again, every how many steps, and with how
            many versions of the weights.
        undoes: whether the state before each update is kept, to undo it; versions: number of old weights kept.
        one_pass: whether compute_log_prob does not run.
        checked_every: steps from one checked weight sync to the next, 0 if only the first is checked; None without.
    """

    measures: bool = False
    weighs: bool = False
    guards: bool = False
    compares: bool = False
    has_top_tokens: bool = False
    filters: bool = False
    splits: bool = False
    signs: bool = False
    top_tokens: int = USUAL_TOP_TOKENS
    top_token_reads: int = 1
    agreement_share: float = 1.0
    replay: str = "disabled"
    lag: bool = False
    simple: bool = True
    units: int = USUAL_UNITS
    workers: int = USUAL_WORKERS
    scored_again: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    undoes: bool = False
    versions: int = 0
    one_pass: bool = False
    checked_every: int | None = None


def read_sizes(
    config: DictConfig,
    gpu: str,
    nodes: int | None = None,
    model: str | None = None,
    *,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
) -> Sizes:
    """Reads the sizes of a composed config, and writes `nodes` into it if given.

    Args:
        mean_prompt, mean_response: tokens; None for GUESSED_MEAN of the limits.

    Raises:
        ConfigError: the GPU or the model is not in the tables, or the sizes contradict each other (`size_problems`).
    """
    spec, shape = planned_gpu(gpu)[1], _model_shape(config, model)
    if nodes is not None:
        if nodes < 1:
            raise ConfigError(f"--nodes={nodes} must be above 0")
        with open_dict(config):
            config.trainer.nnodes = nodes
    if errors := errors_of(problems_of_sizes(config, shape)):
        raise ConfigError.of(errors)
    means = {"prompt": mean_prompt, "response": mean_response}
    with as_config_errors():
        return _sizes_of(config, spec, shape, {part: _mean(config, part, given) for part, given in means.items()})


def _mean(config: DictConfig, part: str, given: float | None) -> float:
    limit = config.data[f"max_{part}_length"]
    if given is None:
        return float(limit * GUESSED_MEAN)
    if not 0 < given <= limit:
        raise ConfigError(f"--mean-{part}={given:g} must be above 0 and at most data.max_{part}_length={limit}")
    return given


def read_usage(config: DictConfig) -> Usage:
    """Reads the use of the plugin from a composed config.

    Raises:
        ConfigError: its `stability` node is wrong, or the setting for storage units or agent loops is not a number.
    """
    from verl_ext.features.feature import Need
    from verl_ext.features.reuse import measured_late
    from verl_ext.features.stability import stability_config
    from verl_ext.features.sync_canary import canary_settings
    from verl_ext.features.table import read_features
    from verl_ext.features.top_tokens import top_token_count

    stability = stability_config(config.stability)
    run = read_features(config, stability)
    rescoring, canary = stability.rescoring, canary_settings(run)
    late = Need.MEASURED_IN_UPDATE in run.needs  # the workers measure and weigh, not the controller
    with as_config_errors():
        units, workers = whole_number(config, UNITS, USUAL_UNITS), whole_number(config, WORKERS, USUAL_WORKERS)
    return Usage(
        measures=Need.MEASURED_BATCHES in run.needs,
        weighs=Need.TOKEN_WEIGHTS in run.needs and not late,
        guards=Need.RULES in run.needs,
        compares=Need.COMPARED_ROUTERS in run.needs,
        has_top_tokens=Need.TOP_TOKENS in run.needs,
        filters=Need.LOSS_MASK in run.needs,
        splits=stability.breakdown and not late,
        signs=stability.breakdown and not late and config.algorithm.adv_estimator in BY_TOKEN,
        top_tokens=top_token_count(run) or USUAL_TOP_TOKENS,
        top_token_reads=2 if Need.TOP_TOKENS_IN_UPDATE in run.needs else 1,
        agreement_share=stability.router_agreement_share,
        replay=replay_mode(config),
        lag=Need.OUR_LOSS in run.needs and is_asynchronous(config),
        simple=OmegaConf.select(config, BACKEND) in (None, "SimpleStorage"),
        units=units,
        workers=workers,
        scored_again={
            "rescoring": (rescoring.trajectories, rescoring.every, rescoring.versions),
            "sync canary": (canary.trajectories or 0, canary.every, 1),
            "scores after the update": (stability.guard.after_update.trajectories, 1, 1),
        },
        undoes=any(rule.action == "undo" for rule in stability.rules),
        versions=rescoring.versions if rescoring.every else 0,
        one_pass=measured_late(run),
        checked_every=stability.sync_check.every if stability.sync_check else None,
    )


def planned_gpu(given: str) -> tuple[str, DataSheet]:
    """Returns the name and the data sheet of a GPU.

    Raises:
        ConfigError: the GPU has no data sheet.
    """
    gpu = named(given)
    if gpu is None or gpu.sheet is None:
        known = planned_gpus()
        near = similar_names(given.upper(), known)
        raise ConfigError(f"--gpu={given} is not known; choose one of: {', '.join(known)}{near}")
    return gpu.name, gpu.sheet


def planned_gpus() -> list[str]:
    """Returns the names of the GPUs with a data sheet."""
    return [name for name, gpu in GPUS.items() if gpu.sheet]


def problems_of_sizes(config: DictConfig, shape: ModelShape | None) -> list[Problem]:
    """Returns what `size_problems` finds in a config that may have any values.

    Raises:
        ConfigError: the sizes cannot be read; MissingSizeError if one is not set.
    """
    problems = Problems()
    with as_config_errors():
        for key in COUNTED:
            with problems:
                whole_number(config, key, fix=_mini_batches(config) if key == BATCH else ())
        problems.raise_any()
        return [*size_problems(config, shape)]


def whole_number(config: DictConfig, key: str, usual: int | None = None, fix: tuple[str, ...] = ()) -> int:
    """Returns the number at `key`, or `usual` if there is none.

    Args:
        fix: the overrides that mend a value below 1.

    Raises:
        ConfigError: the value is not a whole number above 0, or too large.
    """
    value = OmegaConf.select(config, key)
    if value is None and usual is not None:
        return usual
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}={value} must be a whole number above 0", fix=fix)
    if value > LARGEST:
        raise ConfigError(f"{key} has {len(str(value))} digits: too large to plan with")
    return value


def _mini_batches(config: DictConfig) -> tuple[str, ...]:
    """Returns the batch of a launch for verl's old asynchronous entry point, whose batch is 0: verl 0.9.1 syncs after a
    whole number of mini-batches, which make a batch (`step` of trainer_base.py)."""
    mini = OmegaConf.select(config, f"{ACTOR}.ppo_mini_batch_size")
    updates = OmegaConf.select(config, "trainer.v1.separate_async.parameter_sync_step", default=1)
    is_old = OmegaConf.select(config, BATCH) == 0 and type(mini) is type(updates) is int and mini > 0 < updates
    return (f"{BATCH}={mini * updates}",) if is_old else ()


def _fraction(config: DictConfig, key: str) -> float:
    value = OmegaConf.select(config, key)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must be a number from 0 to 1")
    return float(value)


@contextlib.contextmanager
def as_config_errors() -> Iterator[None]:
    """Turns every error of an unchecked config into a one-line ConfigError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"the sizes of this run cannot be read: {' '.join(str(error).split())}") from error


def _model_shape(config: DictConfig, model: str | None) -> ModelShape:
    path = str(config.actor_rollout_ref.model.path)
    if model:
        return shape_of(model, "--model")
    try:
        return shape_of(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; name a model of the same shape with --model") from None


def _sizes_of(config: DictConfig, gpu: DataSheet, shape: ModelShape, means: dict[str, float]) -> Sizes:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    megatron = actor.strategy == "megatron"
    engine = actor.megatron if megatron else actor.fsdp_config

    def parallel_size(key: str, default: int) -> int:
        return default if not megatron or engine.get(key) is None else whole_number(config, f"{ACTOR}.megatron.{key}")

    tensor = parallel_size("tensor_model_parallel_size", 1)
    count = world_size(config)
    shared = config.trainer.v1.trainer_mode != "separate_async"
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    batch, epochs = config.data.train_batch_size, whole_number(config, f"{ACTOR}.ppo_epochs", 1)
    shards = None if megatron else engine.get("fsdp_size")
    micro = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    rows = 1 if actor.get(micro) is None else whole_number(config, f"{ACTOR}.{micro}")
    fraction = "optim.override_optimizer_config.optimizer_offload_fraction"
    offloads = megatron and OmegaConf.select(actor, fraction) is not None
    mixed = None if megatron else OmegaConf.select(engine, "mixed_precision.param_dtype")
    rollout_gpus = (
        count
        if shared
        else whole_number(config, f"{ROLLOUT}.nnodes") * whole_number(config, f"{ROLLOUT}.n_gpus_per_node")
    )
    return Sizes(
        shape=shape,
        gpu=gpu,
        gpus=count,
        rollout_gpus=rollout_gpus,
        shared=shared,
        megatron=megatron,
        tensor=tensor,
        pipeline=parallel_size("pipeline_model_parallel_size", 1),
        context=parallel_size("context_parallel_size", 1),
        expert=parallel_size("expert_model_parallel_size", 1),
        expert_tensor=parallel_size("expert_tensor_parallel_size", tensor),
        ulysses=1 if megatron else ulysses_size(config),
        param_offload=bool(engine.param_offload),
        optimizer_offload=bool(engine.optimizer_offload),
        cpu_adam=_fraction(config, f"{ACTOR}.{fraction}") if offloads else 0.0,
        recompute=_recomputed(config, megatron),
        fused=bool(config.actor_rollout_ref.model.get("use_fused_kernels")),
        float32_head=bool(OmegaConf.select(config, "stability.float32_head")),
        compute_bytes=_bytes(mixed or engine.dtype),
        shards=shards if type(shards) is int and 0 < shards < count else count,
        micro_tokens=rows if actor.use_dynamic_bsz else rows * (prompt + response),
        micro_rows=0 if actor.use_dynamic_bsz else rows,
        prompt=prompt,
        response=response,
        mean_prompt=means["prompt"],
        mean_response=means["response"],
        sequences=batch * rollout.n,
        updates=-(-batch // actor.ppo_mini_batch_size) * epochs,
        epochs=epochs,
        reference=bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
        rollout_tensor=rollout.tensor_model_parallel_size,
        rollout_data=rollout.data_parallel_size,
        rollout_bytes=1 if rollout.get("quantization") == "fp8" else _bytes(rollout.dtype),
        cache_bytes=_cache_bytes(rollout),
        utilization=_fraction(config, f"{ROLLOUT}.gpu_memory_utilization"),
        max_num_seqs=whole_number(config, f"{ROLLOUT}.max_num_seqs"),
        engine=ROLLOUTS.get(rollout.name, "vLLM"),
        per_node=config.trainer.n_gpus_per_node,
    )


def _bytes(dtype: str) -> int:
    if dtype not in BYTES:
        raise ConfigError(f"dtype={dtype} cannot be planned; choose one of: {', '.join(BYTES)}")
    return BYTES[dtype]


def _cache_bytes(rollout: DictConfig) -> int:
    """Returns the bytes of a number in the KV cache, whose dtype is kv_cache_dtype, or else the rollout's."""
    setting = f"engine_kwargs.{rollout.name}.kv_cache_dtype"
    dtype = OmegaConf.select(rollout, setting)
    if dtype in (None, "auto"):
        return _bytes(rollout.dtype)
    if dtype not in CACHE_BYTES:
        known = ", ".join(CACHE_BYTES)
        raise ConfigError(f"{ROLLOUT}.{setting}={dtype} cannot be planned; choose one of: auto, {known}")
    return CACHE_BYTES[dtype]


def _recomputed(config: DictConfig, megatron: bool) -> tuple[str, ...]:
    if not megatron:
        return (FULL,) if config.actor_rollout_ref.model.enable_gradient_checkpointing else ()
    settings = config.actor_rollout_ref.actor.megatron.get("override_transformer_config") or {}
    granularity = settings.get("recompute_granularity")
    if granularity != "selective":
        return (FULL,) if granularity == FULL else ()
    return tuple(settings.get("recompute_modules") or ("core_attn",))  # megatron-core's default
