"""A run that replays the routing otherwise after every few steps, so that the ways share one start of the stack.

    python -m tests.stack.replaying <overrides of the run, router_replay.mode=R3 among them>

It starts with what R3 needs, which is all that any of them needs; SCHEDULE says how each step replays.
"""

STEPS = 3
SCHEDULE = [mode for mode in ("disabled", "R2", "R3") for _ in range(STEPS)]


def replaying(trainer_class: type) -> type:
    """`trainer_class`, setting itself and its workers to SCHEDULE's next entry before each step."""
    from omegaconf import OmegaConf

    from verl_ext.launch.routing_checks import replay_setting

    class ReplayingTrainer(trainer_class):
        def step(self, metrics, timing_raw):
            mode = SCHEDULE[self.global_steps - 1]
            OmegaConf.update(self.config, replay_setting(self.config), mode)
            self.stability_run.use(self.config, self.stability_run.active.stability)
            self.actor_rollout_wg.set_replay(mode)
            return super().step(metrics, timing_raw)

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
