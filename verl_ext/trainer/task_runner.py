"""verl's task runner, the Ray actor that trains, with our trainers instead of verl's.

The entry point imports this after it has checked the config: verl takes seconds to import. It is a separate file,
because the trainers take as long again, and only the actor needs them.
"""

from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1

from verl_ext.base.patching import actor_class


class StabilityTaskRunner(actor_class(TaskRunnerV1)):  # type: ignore[misc]
    """verl's task runner in a process that has our trainers installed."""

    def run(self, config: DictConfig) -> None:
        self.install()
        super().run(config)

    def install(self) -> None:
        from verl_ext.trainer import trainers

        trainers.install_trainers()
