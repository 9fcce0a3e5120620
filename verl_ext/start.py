"""A launch: runs all checks that need no GPU, then verl trains with our task runner.

verl, Ray and torch take seconds to import, so they are imported after the checks that do not need them. A wrong setting
is reported in one or two seconds.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from verl_ext.base import changes
from verl_ext.base.errors import ConfigError, GuardStopError, UserError, errors_of, reason_of
from verl_ext.base.needs import broken, imports, source_of, written_for_others
from verl_ext.base.patching import runs_on_cpu
from verl_ext.features.fit import fit, fit_run
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings, left_out, read_features
from verl_ext.features.verl_config import needs_critic, needs_reference
from verl_ext.launch import command_line, compose
from verl_ext.launch.files import file_problems
from verl_ext.launch.names import unknown_names
from verl_ext.launch.packages import ANY_VERSION, SUPPORTED, package_folder, unsupported
from verl_ext.upstream.sglang_processes import worker_died

STOPPED = 3  # exit code of a run that the guard stopped, for launch scripts that restart runs


def run(config: DictConfig, task_runner: Callable[[], type]) -> None:
    """Runs all checks that need no GPU, then trains.

    Args:
        task_runner: returns the class of the Ray actor that trains. It is called after the checks.
    """
    overrides = HydraConfig.get().overrides.task
    check_versions(config)
    features, problems = fit(config, overrides, read_model=False)
    stopping = errors_of([*unknown_names(config), *problems, *file_problems(config)])
    if stopping or features is None:
        raise ConfigError.of(stopping)

    import ray
    from verl.trainer import main_ppo as verl_main
    from verl.utils.device import auto_set_device

    import verl_ext.plugins.verl  # noqa: F401 (also where VERL_USE_EXTERNAL_PLUGINS leaves it out)

    if features.demands:
        features = fit_run(config, overrides, read_model=True)  # verl may have to fetch the model (VERL_USE_MODELSCOPE)
    for row in left_out(features):
        print(f"verl_ext: {row.name}: {row.setting}, because {row.where}", flush=True)
    if not features.demands:
        print("verl_ext: no stability.* feature is switched on; running verl unchanged", flush=True)
        _validate(config)
        verl_main.main.__wrapped__(config)
        return
    apply_engine_settings(features)
    auto_set_device(config)
    _validate(config)
    verl_main.run_ppo(config, task_runner_class=ray.remote(task_runner()))


def _validate(config: DictConfig) -> None:
    """Refuses what verl's own validation refuses, which verl would do in a Ray actor, with a stack trace."""
    from verl.utils.config import validate_config

    try:
        validate_config(config, use_reference_policy=needs_reference(config), use_critic=needs_critic(config))
    except Exception as error:  # assertions, ValueErrors, and Hydra's wrapping of both
        raise ConfigError(f"verl refuses this config: {reason_of(error)}") from error


def check_versions(config: DictConfig) -> None:
    """Refuses a verl or an engine of this run that verl_ext was not written for; a run without features is verl's own.

    With `stability.any_version=true`, it prints what does not fit instead.
    """
    others = unsupported(config)
    if not others or not _has_features(config):
        return
    found = " and ".join(f"{name} {version}" for name, version in others.items())
    wanted = " and ".join(f"{name}{SUPPORTED[name]}" for name in others)
    said = f"this run would import {found}, and verl_ext was written for {wanted}"
    if not OmegaConf.select(config, ANY_VERSION):
        own_risk = f"set {ANY_VERSION}=true to continue at your own risk"
        raise ConfigError(said, otherwise=f"install {wanted} (docs/install.md), or {own_risk}")
    print(f"verl_ext: {ANY_VERSION}=true: {said}", flush=True)
    for line in _unfit_hooks(others):
        print(f"verl_ext: {line}", flush=True)


def _has_features(config: DictConfig) -> bool:
    try:
        return bool(read_features(config, stability_config(config.stability), read_model=False).demands)
    except Exception:  # perhaps because of the other version, whose config lacks a setting
        return True


def _unfit_hooks(others: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each hook that does not fit one of these versions, or was written for others."""
    table, hooks = changes.TABLE, [*changes.TABLE, *changes.HOOKS, *imports()]
    if runs_on_cpu():
        from verl_ext.cpu import changes as cpu

        table, hooks = table + cpu.TABLE, [*hooks, *cpu.TABLE, *cpu.HOOKS]
    else:
        hooks = [hook for hook in hooks if not hook.file.startswith("cpu/")]
    if "verl" in others and (folder := package_folder("verl")):
        lacking = broken(source_of(folder), hooks)
        yield from (f"{name} does not fit verl {others['verl']}: {'; '.join(lacks)}" for name, lacks in lacking.items())
    engines = {name: version for name, version in others.items() if name != "verl"}
    for (name, wanted), those in written_for_others(table, engines).items():
        yield from (f"{one} was written for {name}{wanted}, not {engines[name]}" for one in those)


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
    """Ends the process with one line for each problem instead of a stack trace."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()
    for problem in error.problems:
        print(f"verl_ext: error: {' '.join(str(problem).split())}", file=sys.stderr, flush=True)
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
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors, instead of printing pages
    try:
        entry()
    except HydraException:
        if problems := command_line.compose(sys.argv[1:], trust=True).problems:
            stop(ConfigError.of(problems))
        raise
