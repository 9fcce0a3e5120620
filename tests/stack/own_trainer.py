"""A run through our entry point with a trainer class of the test's own, for the modules that change it as it goes."""

from collections.abc import Callable


def main(wrap: Callable[[type], type], wrap_worker: Callable[[type], type] = lambda worker: worker) -> None:
    """`verl_ext.main_ppo` on sys.argv, with `wrap` of our trainer instead of each trainer_mode's.

    And `wrap_worker` of each worker that takes our loss, or captures routing as well.
    """
    from verl_ext import main_ppo
    from verl_ext.trainer import task_runner

    class WrappingTaskRunner(task_runner.StabilityTaskRunner):
        def run(self, config):
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

            from verl_ext.trainer import trainers
            from verl_ext.workers.actor import LOSS_WORKERS, ROUTING_WORKERS

            install = trainers.install_trainers

            def install_wrapped():
                install()
                for mode, trainer in TRAINER_REGISTRY.items():
                    TRAINER_REGISTRY[mode] = wrap(trainer)
                for workers in (LOSS_WORKERS, ROUTING_WORKERS):
                    workers |= {verls: wrap_worker(ours) for verls, ours in workers.items()}

            trainers.install_trainers = install_wrapped
            super().run(config)

    task_runner.StabilityTaskRunner = WrappingTaskRunner
    main_ppo.main()
