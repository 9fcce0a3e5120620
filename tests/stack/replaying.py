"""A run that changes how it replays routing after every few steps, so that all ways share one start of the stack.

    python -m tests.stack.replaying <overrides of the run, router_replay.mode=R3 among them>

It starts with the settings of R3, which include those of the others; SCHEDULE has the replay of each step. In one step,
every second token of the rollout has the same expert twice. The last two steps are in verl's bypass mode; in the last,
the routes of a trajectory are shifted by a token after their capture, which ends the run.
"""

from verl_ext.features.verl_config import BYPASS, FSDP_REPLAY

STEPS = 3
BROKEN = "R3, broken"
BYPASSED = "R3, bypass"
MOVED = f"{BYPASSED}, moved"
SCHEDULE = [*(mode for mode in ("disabled", "R2", "R3") for _ in range(STEPS)), BROKEN, BYPASSED, MOVED]


def settings_of(entry: str) -> dict[str, object]:
    """Returns the settings that a step with this entry changes in the run's config."""
    return {FSDP_REPLAY: entry.partition(",")[0], BYPASS: entry.startswith(BYPASSED)}


def replaying(trainer_class: type) -> type:
    """Returns a subclass of `trainer_class` that takes SCHEDULE's next entry before each step, as do its workers."""
    import torch
    from omegaconf import OmegaConf

    from verl_ext.base.names import ROLLOUT_ROUTES, ROUTE_SUM
    from verl_ext.core.tokens import jagged
    from verl_ext.features.table import loss_settings, read_features
    from verl_ext.trainer.queue import get_fields, put_fields

    class ReplayingTrainer(trainer_class):
        def step(self, metrics, timing_raw):
            changed, stability = settings_of(SCHEDULE[self.global_steps - 1]), self.stability_run.features.stability
            for name, value in changed.items():
                OmegaConf.update(self.config, name, value)
            self.stability_run.features = features = read_features(self.config, stability)
            if changed[BYPASS]:
                self.actor_rollout_wg.configure_loss(loss_settings(features))
            self.actor_rollout_wg.set_replay(changed[FSDP_REPLAY])
            return super().step(metrics, timing_raw)

        def _compute_old_log_prob(self, batch, metrics):
            if SCHEDULE[self.global_steps - 1] == BROKEN:
                routes = get_fields(batch, [ROLLOUT_ROUTES])[ROLLOUT_ROUTES]
                broken = routes.values().clone()
                broken[::2, :, 1] = broken[::2, :, 0]
                sums = torch.zeros_like(get_fields(batch, [ROUTE_SUM])[ROUTE_SUM])  # as if the engine had captured them
                put_fields(batch, {ROLLOUT_ROUTES: jagged(broken, routes.offsets()), ROUTE_SUM: sums})
            if SCHEDULE[self.global_steps - 1] == MOVED:
                first, *others = get_fields(batch, [ROLLOUT_ROUTES])[ROLLOUT_ROUTES].unbind()
                moved = torch.nested.as_nested_tensor([first.roll(1, 0), *others], layout=torch.jagged)
                put_fields(batch, {ROLLOUT_ROUTES: moved})
            return super()._compute_old_log_prob(batch, metrics)

    return ReplayingTrainer


def replaying_worker(worker_class: type) -> type:
    from verl.single_controller.base.decorator import Dispatch, register

    class ReplayingWorker(worker_class):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def set_replay(self, mode):
            self.actor.routing.mode = mode

    return ReplayingWorker


if __name__ == "__main__":
    from tests.stack import own_trainer

    own_trainer.main(replaying, replaying_worker)
