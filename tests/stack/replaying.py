"""A run that replays the routing otherwise after every few steps, so that the ways share one start of the stack.

    python -m tests.stack.replaying <overrides of the run, router_replay.mode=R3 among them>

It starts with what R3 needs, which is all that any of them needs; SCHEDULE says how each step replays. In one, every
second token of the rollout comes with an expert that is named twice; the last is in verl's bypass mode.
"""

from verl_ext.features.verl_config import BYPASS, FSDP_REPLAY

STEPS = 3
BROKEN = "R3, broken"
BYPASSED = "R3, bypass"
SCHEDULE = [*(mode for mode in ("disabled", "R2", "R3") for _ in range(STEPS)), BROKEN, BYPASSED]


def settings_of(entry: str) -> dict[str, object]:
    """Returns the settings that a step with this entry changes in the run's config."""
    return {FSDP_REPLAY: entry.partition(",")[0], BYPASS: entry == BYPASSED}


def replaying(trainer_class: type) -> type:
    """`trainer_class`, setting itself and its workers to SCHEDULE's next entry before each step."""
    from omegaconf import OmegaConf

    from verl_ext.base.names import ROLLOUT_ROUTES
    from verl_ext.core.tokens import jagged
    from verl_ext.features.table import loss_settings, read_features
    from verl_ext.trainer.queue import get_fields, put_fields

    class ReplayingTrainer(trainer_class):
        def step(self, metrics, timing_raw):
            changed, stability = settings_of(SCHEDULE[self.global_steps - 1]), self.stability_run.features.stability
            for name, value in changed.items():
                OmegaConf.update(self.config, name, value)
            if changed[BYPASS]:
                self.actor_rollout_wg.configure_loss(loss_settings(read_features(self.config, stability)))
            self.stability_run.use(self.config, stability)
            self.actor_rollout_wg.set_replay(changed[FSDP_REPLAY])
            return super().step(metrics, timing_raw)

        def _compute_old_log_prob(self, batch, metrics):
            if SCHEDULE[self.global_steps - 1] == BROKEN:
                routes = get_fields(batch, [ROLLOUT_ROUTES])[ROLLOUT_ROUTES]
                broken = routes.values().clone()
                broken[::2, :, 1] = broken[::2, :, 0]
                put_fields(batch, {ROLLOUT_ROUTES: jagged(broken, routes.offsets())})
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
