"""The worker classes that the trainer puts in its role mapping when a worker-stage feature is on.

`LOSS_WORKERS` take our loss; `ROUTING_WORKERS` capture the routing of compute_log_prob as well. Both are verl's worker
classes until `configure_loss` is called.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

from verl_ext.errors import HookError
from verl_ext.workers import routing
from verl_ext.workers.router_shift import ShiftRecorder
from verl_ext.workers.worker_loss import LossSettings, Steps, build_worker_loss


class LossMixin:
    """Puts our loss in the place of verl's."""

    actor: Any
    loss_fn: partial
    shift: ShiftRecorder | None = None
    steps: Steps | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure_loss(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Install the worker's loss; after init_model, and again whenever a setting changes.

        Args:
            settings: fields of LossSettings; what is left out is off.

        Returns what is active on this rank: `policy_loss`, `opsm`, `kl` (see `build_worker_loss`), and
        `router_shift`, how many routers are hooked, or None.

        Raises:
            ConfigError: a setting cannot work.
            HookError: verl's loss is another than ppo_loss (distillation), or router_shift finds no router.
        """
        if self.loss_fn.func is not ppo_loss:
            raise HookError(
                f"the workers' loss wraps verl's ppo_loss, but this run's loss is {self.loss_fn.func.__name__}"
            )
        if self.steps is None:
            self.steps = Steps()
            self.steps.guard(self.actor.engine)
        loss, active = build_worker_loss(self.loss_fn.keywords["config"], LossSettings.from_dict(settings), self.steps)
        rescales = active["policy_loss"]["loss_mode"] == "router_shift"
        if rescales and self.shift is None:
            self.shift = ShiftRecorder(self.actor.engine)
        if self.shift is not None:
            self.shift.enabled = rescales
        self.actor.set_loss_fn(loss)
        return active | {"router_shift": len(self.shift.routers) if rescales and self.shift else None}


class RoutingTrainingWorker(TrainingWorker):
    """verl's training worker, with the routing captured in `compute_log_prob`."""

    routing: routing.RoutingRecorder

    def reset(self) -> None:
        super().reset()
        self.routing = routing.attach(self.engine)


class RoutingMixin(LossMixin):
    """Adds the capture to an actor worker class of verl."""

    actor_worker_cls = RoutingTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def routing_hooks(self) -> tuple[str, int]:
        """(router class, how many are hooked) on this rank."""
        routers = self.actor.routing.routers
        return type(next(iter(routers.values()))).__name__, len(routers)


class LossActorRolloutRefWorker(LossMixin, ActorRolloutRefWorker):
    """For the trainer modes `sync` and `colocate_async`."""


class LossDetachActorWorker(LossMixin, DetachActorWorker):
    """For the trainer mode `separate_async`."""


class RoutingActorRolloutRefWorker(RoutingMixin, ActorRolloutRefWorker):
    """For the trainer modes `sync` and `colocate_async`."""


class RoutingDetachActorWorker(RoutingMixin, DetachActorWorker):
    """For the trainer mode `separate_async`."""


LOSS_WORKERS = {
    ActorRolloutRefWorker: LossActorRolloutRefWorker,
    DetachActorWorker: LossDetachActorWorker,
}
ROUTING_WORKERS = {
    ActorRolloutRefWorker: RoutingActorRolloutRefWorker,
    DetachActorWorker: RoutingDetachActorWorker,
}
