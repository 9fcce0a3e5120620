"""The worker classes that the trainer puts in its role mapping when routing is captured."""

from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_ext.workers import routing


class RoutingTrainingWorker(TrainingWorker):
    """verl's training worker, with the routing captured in `compute_log_prob`."""

    routing: routing.RoutingRecorder

    def reset(self) -> None:
        super().reset()
        self.routing = routing.attach(self.engine)


class RoutingMixin:
    """Adds the capture to an actor worker class of verl."""

    actor_worker_cls = RoutingTrainingWorker
    actor: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def routing_hooks(self) -> tuple[str, int]:
        """(router class, how many are hooked) on this rank."""
        routers = self.actor.routing.routers
        return type(next(iter(routers.values()))).__name__, len(routers)


class RoutingActorRolloutRefWorker(RoutingMixin, ActorRolloutRefWorker):
    """For the trainer modes `sync` and `colocate_async`."""


class RoutingDetachActorWorker(RoutingMixin, DetachActorWorker):
    """For the trainer mode `separate_async`."""


ROUTING_WORKERS = {
    ActorRolloutRefWorker: RoutingActorRolloutRefWorker,
    DetachActorWorker: RoutingDetachActorWorker,
}
