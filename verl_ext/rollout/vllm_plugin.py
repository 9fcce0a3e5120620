"""What the `vllm.general_plugins` entry point calls, in every vLLM process."""

from wrapt import register_post_import_hook

from verl_ext import platform
from verl_ext.rollout import engine_report


def register() -> None:
    """Install the engine's report and, where verl runs on CPU cores, the patches of `vllm_cpu`.

    Both wait for the module they change, which only vLLM's worker processes import; a front-end process pays for
    nothing. A patch that no longer fits the installed vLLM raises a `PatchError` out of that import, so that no
    engine starts without it. A second call in a process changes nothing.
    """
    engine_report.install()
    if platform.requested():
        register_post_import_hook("verl_ext.rollout.vllm_cpu:on_import", "vllm.v1.worker.cpu_model_runner")
