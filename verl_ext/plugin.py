"""What the `verl.plugins` entry point loads, in every process that imports verl.

Most of those processes never compute a loss or build an engine, so nothing is imported here that verl has
not imported already: each registration waits until the module that owns the registry is imported.
"""

import logging
import traceback

from wrapt import register_post_import_hook

from verl_ext import platform

logger = logging.getLogger("verl_ext")

# When this module is imported -> call this function of ours.
HOOKS = {
    "verl.trainer.ppo.core_algos": "verl_ext.workers.losses:register",
}
CPU_HOOKS = {
    "verl.workers.engine.fsdp.transformer_impl": "verl_ext.platform.patches:register_fsdp_engines",
}


def load() -> None:
    """Install the hooks, and the CPU platform where VERL_PLATFORM=cpu asks for it."""
    for module, hook in HOOKS.items():
        register_post_import_hook(hook, module)
    if platform.requested():
        from verl_ext.platform import cpu

        cpu.install()
        for module, hook in CPU_HOOKS.items():
            register_post_import_hook(hook, module)


try:
    load()
except Exception:
    # verl logs a plugin that fails to load at DEBUG, where nobody sees it.
    logger.error("verl_ext could not be loaded into verl:\n%s", traceback.format_exc())
    raise
