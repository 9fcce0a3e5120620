"""A launch: runs all checks that need no GPU, then verl trains with our task runner.

verl, Ray and torch take seconds to import, so they are imported after the checks that do not need them. A wrong setting
is reported in one or two seconds.
"""

import io
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from verl_ext.base.errors import GuardStopError, UserError
from verl_ext.features.fit import fit_run
from verl_ext.features.table import apply_engine_settings, left_out
from verl_ext.launch import compose
from verl_ext.upstream.sglang_processes import worker_died

STOPPED = 3  # exit code of a run that the guard stopped, for launch scripts that restart runs


def run(config: DictConfig, task_runner: Callable[[], type]) -> None:
    """Runs all checks that need no GPU, then trains.

    Args:
        task_runner: returns the class of the Ray actor that trains. It is called after the checks.
    """
    overrides = HydraConfig.get().overrides.task
    features = fit_run(config, overrides, read_model=False)

    import ray
    from verl.trainer import main_ppo as verl_main
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    import verl_ext.plugins.verl  # noqa: F401 (also where VERL_USE_EXTERNAL_PLUGINS leaves it out)

    if features.demands:
        features = fit_run(config, overrides, read_model=True)  # verl may have to fetch the model (VERL_USE_MODELSCOPE)
    for row in left_out(features):
        print(f"verl_ext: {row.name}: {row.setting}, because {row.where}", flush=True)
    if not features.demands:
        print("verl_ext: no stability.* feature is switched on; running verl unchanged", flush=True)
        verl_main.main.__wrapped__(config)
        return
    apply_engine_settings(features)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    verl_main.run_ppo(config, task_runner_class=ray.remote(task_runner()))


def stability_task_runner() -> type:
    from verl_ext.trainer.task_runner import StabilityTaskRunner

    return StabilityTaskRunner


def run_or_stop(config: DictConfig, task_runner: Callable[[], type]) -> None:
    """Calls `run`; ends with a one-line error if the user has to act."""
    try:
        run(config, task_runner)
    except Exception as error:
        cause = _underlying(error, config)
        if isinstance(cause, UserError):
            stop(cause)
        raise


def _underlying(error: Exception, config: DictConfig) -> Exception:
    """Returns the error that ended the run, without Ray's errors around it."""
    if "ray" not in sys.modules:
        return error
    from ray.exceptions import RayActorError, RayTaskError

    cause = error
    while isinstance(cause, RayTaskError):  # raised in a worker, passed on by the trainer
        cause = cause.cause
    if isinstance(cause, RayActorError):
        return worker_died(f"a worker of the run died: {_who_died(str(cause))}", config.trainer.default_local_dir)
    return cause


def _who_died(said: str) -> str:
    """Returns the actor's name, process and node from Ray's long message, and the cause if it has one."""
    properties = dict(re.findall(r"^\t(\w+): (.+)$", said, flags=re.MULTILINE))
    who = ", ".join(f"{key} {properties[key]}" for key in ("name", "pid", "ip") if key in properties)
    cause = said.splitlines()[-1].partition(" Some common causes")[0].strip(" .")
    return f"{who} ({cause})" if who else cause


def stop(error: UserError) -> NoReturn:
    """Ends the process with a one-line error instead of a stack trace."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()
    print(f"verl_ext: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(STOPPED if isinstance(error, GuardStopError) else 1)


def start(entry: Callable[[], None]) -> None:
    """Calls Hydra's entry point with our changes to the arguments.

    Flushes each line at once: Python buffers lines that go into a file or a pipe, the workers' too, which Ray's driver
    prints (`ray._private.worker.print_worker_logs`). The last lines of a hanging run would be missing.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        sys.argv[1:] = compose.prepare(sys.argv[1:])
    except UserError as error:
        stop(error)
    entry()
