"""What of a composed config the plan computes with."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigError, UserError
from verl_ext.launch.gpus import GPUS, DataSheet, named
from verl_ext.launch.models import SHAPES, ModelShape, shape_of
from verl_ext.launch.rollouts import ROLLOUTS
from verl_ext.launch.sizes import check_recipe, ulysses_size, world_size

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "bf16": 2, "fp16": 2, "fp32": 4}
LARGEST = 10**12  # of any number that is counted: products of several are still floats
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# What the checks of sizes divide by.
COUNTED = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.expert_parallel_size",
)


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    gpus: that train; rollout_gpus: that generate, the same ones unless the run is separate_async.
    shared: whether they are the same ones.
    engine: of the rollout, as it calls itself.
    micro_tokens: of one micro-batch on one training rank, at the most.
    per_node: GPUs of a machine.
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
    recompute: bool
    compute_bytes: int
    micro_tokens: int
    prompt: int
    response: int
    sequences: int
    reference: bool
    rollout_tensor: int
    rollout_expert: int
    rollout_bytes: int
    utilization: float
    max_num_seqs: int
    engine: str = "vLLM"
    per_node: int = 8

    @property
    def nodes(self) -> int:
        """Machines, those that generate alone among them."""
        return -(-(self.gpus if self.shared else self.gpus + self.rollout_gpus) // self.per_node)

    @property
    def replica_ranks(self) -> int:
        """Training ranks that work on the same trajectories, each of which fetches them."""
        return self.tensor * self.pipeline * self.context if self.megatron else self.ulysses


def planned_gpu(given: str) -> tuple[str, DataSheet]:
    """Name and data sheet of the GPU `given`.

    Raises:
        ConfigError: there is no data sheet of it.
    """
    gpu = named(given)
    if gpu is None or gpu.sheet is None:
        raise ConfigError(f"--gpu={given} is not known; choose one of: {', '.join(planned_gpus())}")
    return gpu.name, gpu.sheet


def planned_gpus() -> list[str]:
    """The names of those with a data sheet."""
    return [name for name, gpu in GPUS.items() if gpu.sheet]


def check_sizes(config: DictConfig, shape: ModelShape | None) -> None:
    """`check_recipe`, for a config of which nothing is known yet.

    Raises:
        ConfigError: the sizes contradict each other, or cannot be read.
    """
    with readable():
        for key in COUNTED:
            whole(config, key)
        check_recipe(config, shape)


def whole(config: DictConfig, key: str) -> int:
    """The number at `key`.

    Raises:
        ConfigError: it is none, or none to plan with.
    """
    value = OmegaConf.select(config, key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}={value} must be a whole number above 0")
    if value > LARGEST:
        raise ConfigError(f"{key} has {len(str(value))} digits: too large to plan with")
    return value


def _share(config: DictConfig, key: str) -> float:
    value = OmegaConf.select(config, key)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must be a number from 0 to 1")
    return float(value)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What a config of which nothing is known may raise becomes a ConfigError of one line."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"the sizes of this run cannot be read: {' '.join(str(error).split())}") from error


def _shape(config: DictConfig, model: str | None) -> ModelShape:
    path = str(config.actor_rollout_ref.model.path)
    try:
        return shape_of(model or path)
    except ConfigError:
        said = f"--model={model}" if model else f"actor_rollout_ref.model.path={path}"
        remedy = "" if model else "; name the one of the same shape by --model"
        known = f"{said} is none of the models of verl_ext/launch/models.py: {', '.join(SHAPES)}"
        raise ConfigError(f"{known}{remedy}") from None


def read_sizes(config: DictConfig, gpu: str, nodes: int | None = None, model: str | None = None) -> Sizes:
    """From a composed config.

    Raises:
        ConfigError: the GPU or the model is not in the tables, or the sizes contradict each other (`check_recipe`).
    """
    spec, shape = planned_gpu(gpu)[1], _shape(config, model)
    if nodes is not None:
        if nodes < 1:
            raise ConfigError(f"--nodes={nodes} must be above 0")
        with open_dict(config):
            config.trainer.nnodes = nodes
    check_sizes(config, shape)
    with readable():
        return _read(config, spec, shape)


def _read(config: DictConfig, gpu: DataSheet, shape: ModelShape) -> Sizes:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    megatron = actor.strategy == "megatron"
    engine = actor.megatron if megatron else actor.fsdp_config

    def of(key: str, default: int) -> int:
        return default if not megatron or engine.get(key) is None else whole(config, f"{ACTOR}.megatron.{key}")

    tensor = of("tensor_model_parallel_size", 1)
    count = world_size(config)
    shared = config.trainer.v1.trainer_mode != "separate_async"
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    micro = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    rows = 1 if actor.get(micro) is None else whole(config, f"{ACTOR}.{micro}")
    fraction = "optim.override_optimizer_config.optimizer_offload_fraction"
    offloads = megatron and OmegaConf.select(actor, fraction) is not None
    mixed = None if megatron else OmegaConf.select(engine, "mixed_precision.param_dtype")
    return Sizes(
        shape=shape,
        gpu=gpu,
        gpus=count,
        rollout_gpus=count
        if shared
        else whole(config, f"{ROLLOUT}.nnodes") * whole(config, f"{ROLLOUT}.n_gpus_per_node"),
        shared=shared,
        megatron=megatron,
        tensor=tensor,
        pipeline=of("pipeline_model_parallel_size", 1),
        context=of("context_parallel_size", 1),
        expert=of("expert_model_parallel_size", 1),
        expert_tensor=of("expert_tensor_parallel_size", tensor),
        ulysses=1 if megatron else ulysses_size(config),
        param_offload=bool(engine.param_offload),
        optimizer_offload=bool(engine.optimizer_offload),
        cpu_adam=_share(config, f"{ACTOR}.{fraction}") if offloads else 0.0,
        recompute=_recomputes(config, megatron),
        compute_bytes=_bytes(mixed or engine.dtype),
        micro_tokens=rows if actor.use_dynamic_bsz else rows * (prompt + response),
        prompt=prompt,
        response=response,
        sequences=config.data.train_batch_size * rollout.n,
        reference=bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
        rollout_tensor=rollout.tensor_model_parallel_size,
        rollout_expert=rollout.expert_parallel_size,
        rollout_bytes=1 if rollout.get("quantization") == "fp8" else _bytes(rollout.dtype),
        utilization=_share(config, f"{ROLLOUT}.gpu_memory_utilization"),
        max_num_seqs=whole(config, f"{ROLLOUT}.max_num_seqs"),
        engine=ROLLOUTS.get(rollout.name, "vLLM"),
        per_node=config.trainer.n_gpus_per_node,
    )


def _bytes(dtype: str) -> int:
    if dtype not in BYTES:
        raise ConfigError(f"dtype={dtype} cannot be planned; choose one of: {', '.join(BYTES)}")
    return BYTES[dtype]


def _recomputes(config: DictConfig, megatron: bool) -> bool:
    if megatron:
        settings = config.actor_rollout_ref.actor.megatron.get("override_transformer_config") or {}
        return settings.get("recompute_granularity") == "full"
    return bool(config.actor_rollout_ref.model.enable_gradient_checkpointing)
