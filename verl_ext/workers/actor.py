"""The worker classes that the trainer puts in its role mapping when a worker-stage feature is on.

`LOSS_WORKERS` take our loss; `ROUTING_WORKERS` capture the routing of compute_log_prob as well. Both are verl's worker
classes until `configure_loss` is called, but that the ranks of a model replica share what routing they fetch.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

from verl_ext.base.errors import HookError
from verl_ext.core.recorder import Recorder
from verl_ext.features.losses import LOSSES
from verl_ext.routing.engines import ENGINES
from verl_ext.routing.router_shift import MegatronShiftRecorder, ShiftRecorder
from verl_ext.workers.gate import Gate
from verl_ext.workers.head import HeadReader, HeadUse
from verl_ext.workers.replica_fetch import share_fetches
from verl_ext.workers.versions import VersionsMixin
from verl_ext.workers.worker_loss import LossSettings, install_loss


class SharingTrainingWorker(TrainingWorker):
    """verl's training worker, whose ranks share what they fetch."""

    def __init__(self, config: TrainingWorkerConfig):
        super().__init__(config)
        share_fetches(self.engine)


class LossMixin:
    """Puts our loss in the place of verl's."""

    actor_worker_cls: type[TrainingWorker] = SharingTrainingWorker
    actor: Any
    loss_fn: partial
    shift: ShiftRecorder | None = None
    gate: Gate | None = None
    head: HeadReader | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure_loss(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Install the worker's loss; after init_model, and again whenever a setting changes.

        Args:
            settings: fields of LossSettings; what is left out is off.

        Returns what is active on this rank: `policy_loss`, `corrections`, `kl`, `mini_batch`, `first_pass`, `centers`,
        `undo`, `after_update` (see `install_loss`); `router_shift`, how many routers are hooked, or None; `head`,
        whether the sampler's heads are read.

        Raises:
            ConfigError: a setting cannot work.
            HookError: verl's loss is another than ppo_loss (distillation), or router_shift finds no router.
        """
        if self.loss_fn.func is not ppo_loss:
            raise HookError(
                f"the workers' loss wraps verl's ppo_loss, but this run's loss is {self.loss_fn.func.__name__}"
            )
        wanted = LossSettings.from_dict(settings)
        if self.gate is None:
            self.gate = Gate(self.actor)
        active = install_loss(self.gate, self.loss_fn.keywords["config"], wanted)
        ours = LOSSES.get(active["policy_loss"]["loss_mode"])
        shifts = ours is not None and "router_deviation" in ours.reads
        if shifts and self.shift is None:
            megatron = self.actor.engine.engine_config.strategy == "megatron"
            self.shift = (MegatronShiftRecorder if megatron else ShiftRecorder)(self.actor.engine)
        if self.shift is not None:
            self.shift.enabled = shifts
        if wanted.head is not None and self.head is None:
            self.head = HeadReader(self.actor.engine)
        if self.head is not None:
            self.head.use = wanted.head or HeadUse()
        routers = len(self.shift.routers) if shifts and self.shift else None
        return active | {"router_shift": routers, "head": wanted.head is not None}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_back(self, after: int) -> int | None:
        """See `verl_ext.workers.gate.Gate.take_back`."""
        return self.gate.take_back(after) if self.gate is not None else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record_states(self, begin: bool) -> dict[str, Tensor]:
        """Begin to record this rank's hidden states, or end it; see `verl_ext.core.recorder`."""
        if begin:
            self.recorder = Recorder(self.actor.engine.module)
            return {}
        return self.recorder.close()


class RoutingTrainingWorker(SharingTrainingWorker):
    """verl's training worker, with the routing captured in `compute_log_prob` and replayed where asked."""

    def __init__(self, config: TrainingWorkerConfig):
        self.routing = ENGINES[config.engine_config.strategy].load_adapter()(config)
        super().__init__(self.routing.config)

    def reset(self) -> None:
        super().reset()
        self.routing.prepare(self.engine)

    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        return self.routing.compute(super().infer_batch, data)


class RoutingMixin(LossMixin):
    """Adds capture and replay to an actor worker class of verl."""

    actor_worker_cls = RoutingTrainingWorker
    config: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # verl sets it for Megatron and VeOmni; it makes compute_log_prob and update_actor tell the engine to replay.
        if OmegaConf.select(self.config.actor, "fsdp_config.router_replay.mode") in ("R2", "R3"):
            self.enable_routing_replay = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def routing_hooks(self) -> tuple[str, int]:
        """(class that chooses experts, how many are hooked) on this rank."""
        return self.actor.routing.hooks()


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
