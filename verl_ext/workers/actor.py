"""The worker classes that the trainer puts in its role mapping when a worker-stage feature is on.

`LOSS_WORKERS` take our loss; `ROUTING_WORKERS` capture the routing of compute_log_prob as well. Until `configure_loss`
is called they compute verl's loss. The ranks of a model replica share the routing that they fetch.
"""

import zlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

from verl_ext.base.errors import HookError
from verl_ext.base.names import OWN_ROUTES
from verl_ext.base.patching import Undo, wrap
from verl_ext.core.checksums import SentTensor
from verl_ext.routing.engines import ENGINES, HOOKED
from verl_ext.routing.outputs import check_captured
from verl_ext.routing.recorder import Passes
from verl_ext.upstream.fake_quantization import SentRounding
from verl_ext.upstream.sync_record import Recorded, SentRecord
from verl_ext.workers.float32_head import compute_in_float32
from verl_ext.workers.gate import Gate
from verl_ext.workers.replica_fetch import share_fetches
from verl_ext.workers.top_tokens import TopTokenReader, TopTokenUse
from verl_ext.workers.worker_loss import LossSettings, install_loss

STEP_START = 0  # verl's key of the copy that it makes at the start of a step
SHARDED = ("fsdp2", "veomni")
PROCESSOR = "logits, label, temperature, ..."  # of verl's Megatron engine
ADAPTER_SCALE = 0.02  # as transformers initialises linear layers


class SharingTrainingWorker(TrainingWorker):
    """verl's training worker; the ranks of a model replica share their fetches."""

    def __init__(self, config: TrainingWorkerConfig):
        super().__init__(config)
        share_fetches(self.engine)

    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        """Runs verl's method, without replay if the engine's own routers are to choose."""
        if tu.get_non_tensor_data(data, OWN_ROUTES, default=False):
            tu.assign_non_tensor_data(data, "enable_routing_replay", False)
        self.check_replayed(data)
        return super().infer_batch(data)

    def train_batch(self, data: TensorDict) -> TensorDict:
        self.check_replayed(data)
        return super().train_batch(data)

    def check_replayed(self, data: TensorDict) -> None:
        """Checks the rollout's routes before verl replays them, on Megatron; see `check_captured`."""
        engine = self.engine_config
        if engine.strategy not in HOOKED and engine.router_replay.mode == "R3":
            check_captured(data)


class LossMixin:
    """Replaces verl's loss by ours."""

    actor_worker_cls: type[TrainingWorker] = SharingTrainingWorker
    actor: Any
    config: Any
    loss_fn: partial
    gate: Gate | None = None
    top_tokens: TopTokenReader | None = None
    float32_heads: int | None = None
    rounding: SentRounding | None = None
    sent: SentRecord | None = None
    undo_rounding: Undo

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure_loss(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Installs the worker's loss; called after init_model, and again whenever a setting changes.

        Args:
            settings: fields of LossSettings; features that are left out are off.

        Returns the active settings on this rank: those of `install_loss`; `top_tokens`, whether the sampler's top
        tokens are read; `float32_heads`, the number of heads on this rank that compute in float32, or None.

        Raises:
            ConfigError: a setting cannot work.
            HookError: verl's loss is not ppo_loss (distillation).
        """
        if self.loss_fn.func is not ppo_loss:
            raise HookError(
                f"the workers' loss wraps verl's ppo_loss, but this run's loss is {self.loss_fn.func.__name__}"
            )
        wanted = LossSettings.from_dict(settings)
        if self.gate is None:
            self.gate = Gate(self.actor)
        active = install_loss(self.gate, self.loss_fn.keywords["config"], wanted)
        if wanted.top_tokens is not None and self.top_tokens is None:
            self.top_tokens = TopTokenReader(self.actor.engine)
        if self.top_tokens is not None:
            self.top_tokens.use = wanted.top_tokens or TopTokenUse()
        if wanted.reuses and not self.loss_fn.keywords["config"].entropy_coeff:
            without_entropy_gradient(self.actor.engine)
        if wanted.float32_head and self.float32_heads is None:
            self.float32_heads = compute_in_float32(self.actor.engine)
        return active | {"top_tokens": wanted.top_tokens is not None, "float32_heads": self.float32_heads}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_back(self, after: int) -> int | None:
        """See `verl_ext.workers.gate.Gate.take_back`."""
        return self.gate.take_back(after) if self.gate is not None else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill_adapters(self) -> bool:
        """Fills the B matrices of a LoRA with small random numbers if all are zero, as in a new one; returns True then.

        The numbers depend on the parameter's name, so that ranks with the same shard have the same numbers.
        """
        parameters = self.actor.engine.module.named_parameters() if self.config.actor.strategy != "megatron" else ()
        shards = {name: getattr(each, "_local_tensor", each).data for name, each in parameters if ".lora_B." in name}
        if not shards or any(shard.any() for shard in shards.values()):
            return False
        for name, shard in shards.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            shard.copy_(ADAPTER_SCALE * torch.randn(shard.shape, generator=generator))
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def round_sent(self, group: str | None, format: str) -> dict[str, list[str]]:
        """Rounds a group of weights in all weight syncs from now on: none for "", and None ends it.

        Returns group -> its modules, of all weights that were sent since the first call.
        """
        if self.rounding is None:
            self.rounding = SentRounding()
            self.undo_rounding = wrap("sent_rounding", self.actor.engine, "get_per_tensor_param", self.rounding)
        rounding = self.rounding
        rounding.group, rounding.format = group or "", format
        if group is None:
            self.undo_rounding()
            self.rounding = None
        return rounding.modules

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_sync_record(self) -> None:
        """Records the weights that syncs send from now on, until `end_sync_record`."""
        if self.sent is None:
            self.sent = SentRecord()
            wrap("sent_record", self.actor.engine, "get_per_tensor_param", self.sent)
        self.sent.begin()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_sync_record(self) -> Recorded:
        assert self.sent is not None, "begin_sync_record was not called"
        return self.sent.end()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_tensors(self, ranks: Collection[int]) -> tuple[tuple[SentTensor, ...], tuple[SentTensor, ...]] | None:
        """Returns what these ranks sent in the last recorded sync, and in the one before it; None on other ranks."""
        if self.sent is None or torch.distributed.get_rank() not in ranks:
            return None
        return self.sent.tensors, self.sent.before

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record_states(self, begin: bool) -> Passes:
        """Starts or stops recording hidden states; see `routing.recorder`.

        A stop returns the states of this rank's layers on the first rank of data parallelism, and {} on the others.
        """
        engine = self.actor.engine
        if begin:
            self.recorder = ENGINES[engine.engine_config.strategy].open_recorder(engine)
            return {}
        passes = self.recorder.close()
        return passes if engine.get_data_parallel_rank() == 0 else {}


def without_entropy_gradient(engine: Any) -> None:
    """Has the update compute the entropy as compute_log_prob does, without a graph: no loss reads it.

    The gradient of the logits is then written in their place, as in an update without an entropy, and Megatron's logits
    are not copied. On FSDP and VeOmni for packed tokens only: verl 0.9.1 calls `compute_entropy_from_logits` for no
    others. There the graph is kept, and its gradient is 0.
    """
    if hasattr(engine, "_lm_head_logits_processor"):
        wrap("reuse_log_probs", engine, "_lm_head_logits_processor", partial(_entropy_first, engine), PROCESSOR)
    elif hasattr(engine, "compute_entropy_from_logits"):
        from verl.workers.engine.fsdp import transformer_impl

        wrap("reuse_log_probs", engine, "compute_entropy_from_logits", _without_graph)
        wrap("reuse_log_probs", transformer_impl, "logprobs_from_logits", _in_place, "logits, labels, inplace_backward")


def _entropy_first(
    engine: Any,
    verls: Callable[..., dict[str, torch.Tensor]],
    logits: torch.Tensor,
    label: torch.Tensor,
    temperature: torch.Tensor,
    *,
    calculate_entropy: bool,
    **others: Any,
) -> dict[str, torch.Tensor]:
    """Wraps the function of verl's Megatron engine from logits [1, n, V] to log-probabilities and entropy [1, n]; it
    writes over the logits, and copies them before that if they are read twice. Here the entropy is read first, from
    some rows at a time."""
    from verl.workers.engine.megatron import transformer_impl

    entropy, rows = [], engine.engine_config.entropy_from_logits_chunk_size
    if calculate_entropy:
        with torch.no_grad():
            for part, heat in zip(logits.split(rows, 1), temperature.split(rows, 1), strict=True):
                heat = heat.where(heat > 0, 1e-8).unsqueeze(-1)  # of padding, as verl's function has it
                entropy.append(transformer_impl.vocab_parallel_entropy(part / heat.to(part.dtype)))
    found = verls(logits, label, temperature, calculate_entropy=False, **others)
    return found | ({"entropy": torch.cat(entropy, 1)} if entropy else {})


def _without_graph(verls: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return verls(*args, **kwargs)


def _in_place(
    verls: Callable[..., torch.Tensor], logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    return verls(logits, labels, inplace_backward=True)


class RoutingTrainingWorker(SharingTrainingWorker):
    """verl's training worker, with the routing captured in `compute_log_prob` and replayed if requested."""

    def __init__(self, config: TrainingWorkerConfig):
        self.routing = ENGINES[config.engine_config.strategy].load_adapter()(config)
        super().__init__(self.routing.config)

    def reset(self) -> None:
        super().reset()
        self.routing.prepare(self.engine)

    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        return self.routing.compute(super().infer_batch, data)


class RoutingMixin(LossMixin):
    """Adds capture and replay to one of verl's actor worker classes."""

    actor_worker_cls = RoutingTrainingWorker
    config: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # verl sets this for Megatron and VeOmni; compute_log_prob and update_actor then ask the engine to replay.
        if OmegaConf.select(self.config.actor, "fsdp_config.router_replay.mode") in ("R2", "R3"):
            self.enable_routing_replay = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def routing_hooks(self) -> tuple[str, int]:
        """Returns (class that chooses experts, number of hooked modules) on this rank."""
        return self.actor.routing.hooks()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_expert_load(self) -> dict[str, float]:
        """Returns the load of the experts in this step, `core.expert_load`; {} on ranks that compare no routing."""
        group = self.actor.engine.get_data_parallel_group()
        return self.actor.routing.load.take(partial(torch.distributed.all_reduce, group=group))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def first_expert_load(self, counts: list[list[int]]) -> list[list[int]]:
        """See `ExpertLoad.first`."""
        return self.actor.routing.load.first(counts)


class VersionsMixin(DetachActorWorker):
    """Keeps verl's own copies of the weights of earlier steps in the host's memory, by version, for rescoring.

    Written for verl 0.9.1, whose `separate_async` copies the weights at the start of each step, to compute all of the
    step's l_old with them (`PPOTrainerSeparateAsync._compute_old_log_prob`).
    """

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        """verl's handler of copies. If a shard is on the CPU already, verl's copy would be the shard itself, which
        updates change (`fsdp2_sharded_save_to_cpu` of verl 0.9.1)."""
        copied = super().copy_handler
        if self.config.actor.strategy not in SHARDED:
            return copied

        def apart(module: Any) -> Any:
            shards, spec = copied(module)
            if next(module.parameters()).device.type == "cpu":
                shards = {name: (shard.clone(), its_spec) for name, (shard, its_spec) in shards.items()}
            return shards, spec

        return apart

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_version(self, version: int, oldest: int) -> list[int]:
        """Keeps verl's copy from the last step before verl overwrites it; drops versions older than `oldest`.

        Returns the kept versions, which `use_version` takes.
        """
        saved = self.__dict__.setdefault("cpu_saved_models", {})
        if STEP_START in saved:
            saved[_version_key(version)] = saved[STEP_START]
        kept = self.kept_versions()
        for old in kept:
            if old < oldest:
                self.clear_cpu_model(_version_key(old))
        return [one for one in kept if one >= oldest]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_versions(self) -> list[int]:
        return sorted(key[1] for key in self.__dict__.get("cpu_saved_models", {}) if isinstance(key, tuple))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_version(self, version: int) -> None:
        """Computes with these weights from now on; KeyError if they are not kept."""
        if _version_key(version) not in self.cpu_saved_models:
            raise KeyError(f"the weights of version {version} are not kept")
        self.restore_model_from_cpu(_version_key(version))


def _version_key(version: int) -> tuple[str, int]:
    return ("version", version)


class LossActorRolloutRefWorker(LossMixin, ActorRolloutRefWorker):
    """The worker of the trainer modes `sync` and `colocate_async`."""


class LossDetachActorWorker(VersionsMixin, LossMixin, DetachActorWorker):
    """The worker of the trainer mode `separate_async`."""


class RoutingActorRolloutRefWorker(RoutingMixin, ActorRolloutRefWorker):
    """The worker of the trainer modes `sync` and `colocate_async`."""


class RoutingDetachActorWorker(VersionsMixin, RoutingMixin, DetachActorWorker):
    """The worker of the trainer mode `separate_async`."""


LOSS_WORKERS = {
    ActorRolloutRefWorker: LossActorRolloutRefWorker,
    DetachActorWorker: LossDetachActorWorker,
}
ROUTING_WORKERS = {
    ActorRolloutRefWorker: RoutingActorRolloutRefWorker,
    DetachActorWorker: RoutingDetachActorWorker,
}
