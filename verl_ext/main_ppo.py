"""Drop-in for `verl.trainer.main_ppo`: the same overrides, and the group `stability=`.

    python -m verl_ext.main_ppo stability=icepop <your overrides for verl.trainer.main_ppo>

With nothing of `stability` switched on, it runs verl's own entry point unchanged.
"""

import re
import sys
from collections.abc import Callable
from typing import NoReturn

import hydra
import ray
from omegaconf import DictConfig
from verl.trainer import main_ppo as verl_main
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

import verl_ext.plugin  # noqa: F401 (also where VERL_USE_EXTERNAL_PLUGINS leaves it out)
from verl_ext.errors import GuardStopError, UserError, WorkerDiedError
from verl_ext.launch import compose
from verl_ext.launch.checks import apply_engine_settings, check_run
from verl_ext.launch.features import features
from verl_ext.settings.stability import stability_config
from verl_ext.trainer import startup

STOPPED = 3  # exit code of a run that the guard ended, for launch scripts that would start it again


class StabilityTaskRunner(startup.actor_class(verl_main.TaskRunnerV1)):  # type: ignore[misc]
    """verl's task runner, with our trainers in the place of verl's."""

    def run(self, config: DictConfig) -> None:
        self.install()
        super().run(config)

    def install(self) -> None:
        from verl_ext.trainer import trainers

        trainers.install()


def run(config: DictConfig, task_runner: type) -> None:
    """Check everything that can be checked without a GPU, then train."""
    stability = stability_config(config.stability)
    if not features(config, stability):
        print("verl_ext: nothing of stability.* is switched on; running verl as it is", flush=True)
        verl_main.main.__wrapped__(config)
        return
    check_run(config, stability)
    apply_engine_settings(config, stability)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    verl_main.run_ppo(config, task_runner_class=ray.remote(task_runner))


@hydra.main(version_base=None, config_path=str(compose.VERL_CONFIGS), config_name=compose.PRIMARY)
def hydra_main(config: DictConfig) -> None:
    run_or_stop(config, StabilityTaskRunner)


def run_or_stop(config: DictConfig, task_runner: type) -> None:
    """`run`, which ends with one line where the user has to act."""
    try:
        run(config, task_runner)
    except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError) as error:
        cause = error
        while isinstance(cause, ray.exceptions.RayTaskError):  # raised in a worker, passed on by the trainer
            cause = cause.cause
        if isinstance(cause, ray.exceptions.RayActorError):
            cause = WorkerDiedError(
                f"a worker of the run died: {_who_died(str(cause))}. Checkpoints stand in "
                f"{config.trainer.default_local_dir}: with trainer.resume_mode=auto, the same command goes on from the "
                "last whole one"
            )
        if isinstance(cause, UserError):
            stop(cause)
        raise
    except UserError as error:
        stop(error)


def _who_died(said: str) -> str:
    """Name, process and node, and the cause as far as Ray knows it, from its long message."""
    properties = dict(re.findall(r"^\t(\w+): (.+)$", said, flags=re.MULTILINE))
    who = ", ".join(f"{key} {properties[key]}" for key in ("name", "pid", "ip") if key in properties)
    cause = said.splitlines()[-1].partition(" Some common causes")[0].strip(" .")
    return f"{who} ({cause})" if who else cause


def stop(error: UserError) -> NoReturn:
    """End with the error's one line instead of a stack of frames that are not the user's."""
    ray.shutdown()
    print(f"verl_ext: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(STOPPED if isinstance(error, GuardStopError) else 1)


def start(entry: Callable[[], None]) -> None:
    """Call Hydra's entry point with the arguments that it is to see."""
    try:
        sys.argv[1:] = compose.prepare(sys.argv[1:])
    except UserError as error:
        stop(error)
    entry()


def main() -> None:
    start(hydra_main)


if __name__ == "__main__":
    main()
