"""What the `verl.plugins` entry point loads, in every process that imports verl.

Most of those processes never compute a loss or build an engine, so nothing is imported here that verl has
not imported already: each registration waits until the module that owns the registry is imported.
"""

import logging
import traceback
from importlib import import_module

from wrapt import register_post_import_hook

from verl_ext.base.patching import runs_on_cpu
from verl_ext.features.advantages import register_estimators
from verl_ext.upstream import agent_loop

logger = logging.getLogger("verl_ext")
MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl"
SGLANG_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"


def load() -> None:
    """Install the hooks; those of the agent loop and of the CPU platform where the environment asks for them."""
    # Importing these registers them; they may be on their way in themselves, having imported verl's registry.
    register_post_import_hook(lambda _: import_module("verl_ext.workers.losses"), "verl.trainer.ppo.core_algos")
    register_post_import_hook(lambda _: register_estimators(), "verl.trainer.ppo.core_algos")
    agent_loop.install_changes()
    register_post_import_hook("verl_ext.upstream.sglang_server:change_server", SGLANG_SERVER)
    register_post_import_hook("verl_ext.upstream.megatron_schedule:load_schedule", MEGATRON_ENGINE)
    if runs_on_cpu():
        from verl_ext.cpu import platform

        platform.install_platform()
    on_gpu = "verl_ext.upstream.sglang_processes:start_processes"
    start_processes = "verl_ext.cpu.sglang:start_cpu_processes" if runs_on_cpu() else on_gpu
    register_post_import_hook(start_processes, SGLANG_SERVER)


try:
    load()
except Exception:
    # verl logs a plugin that fails to load at DEBUG, where nobody sees it.
    logger.error("verl_ext could not be loaded into verl:\n%s", traceback.format_exc())
    raise
