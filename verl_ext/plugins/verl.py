"""The plugin that the `verl.plugins` entry point loads, in every process that imports verl.

Most of these processes never compute a loss or build an engine, so nothing is imported here that verl has not imported
already. Each registration waits until the module that has the registry is imported.
"""

import logging
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from wrapt import register_post_import_hook

from verl_ext.base.patching import Undo, runs_on_cpu, wrap
from verl_ext.features.advantages import register_estimators
from verl_ext.upstream import agent_loop

logger = logging.getLogger("verl_ext")
MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl"
SGLANG_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"


def load() -> None:
    """Installs the hooks; the hooks of the agent loop and of the CPU platform only if the environment asks for them."""
    # Importing our losses registers them. verl's registry may have begun to import them already.
    register_post_import_hook(lambda _: import_module("verl_ext.workers.losses"), "verl.trainer.ppo.core_algos")
    register_post_import_hook(lambda _: register_estimators(), "verl.trainer.ppo.core_algos")
    agent_loop.install_changes()
    register_post_import_hook("verl_ext.upstream.sglang_server:extend_server", SGLANG_SERVER)
    register_post_import_hook(load_schedule, MEGATRON_ENGINE)
    if runs_on_cpu():
        from verl_ext.cpu import platform

        platform.install_platform()
    on_gpu = "verl_ext.upstream.sglang_processes:start_processes"
    start_processes = "verl_ext.cpu.sglang:start_cpu_processes" if runs_on_cpu() else on_gpu
    register_post_import_hook(start_processes, SGLANG_SERVER)


def load_schedule(transformer_impl: Any) -> Undo:
    """Makes verl's Megatron engines forget the steps of their learning-rate schedule before they load a checkpoint.

    megatron-core's `OptimizerParamScheduler` (0.16.1) adds the steps that it loads to those that it has taken. A
    resumed run loads into a new engine, which has taken none. The guard's rollback loads into a running engine, which
    would continue at the sum of both.
    """
    return wrap("load_schedule", transformer_impl.MegatronEngine, "load_checkpoint", _forget_and_load, "self, ...")


def _forget_and_load(load: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.num_steps = 0
    load(engine, *args, **kwargs)


try:
    load()
except Exception:
    # verl logs a plugin that fails to load at DEBUG, where nobody sees it.
    logger.error("verl_ext could not be loaded into verl:\n%s", traceback.format_exc())
    raise
