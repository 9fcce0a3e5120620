"""The plugin that the `vllm.general_plugins` entry point calls, in every vLLM process."""

from wrapt import register_post_import_hook

from verl_ext.base.patching import runs_on_cpu
from verl_ext.upstream import engine_calls

QUEUES = "vllm.distributed.device_communicators.shm_broadcast"


def register() -> None:
    """Installs our engine calls, a load format and, on CPU cores, the patches of `cpu.vllm`.

    Each waits for the module that it changes or needs. Only vLLM's worker processes import these modules (except vLLM's
    config, which is patched on CPU cores), so a front-end process has no cost. A patch that no longer fits the
    installed vLLM raises a `PatchError` from that import, so that no engine starts without it. A second call in a
    process changes nothing.
    """
    engine_calls.answer_in_workers()
    register_post_import_hook(
        "verl_ext.upstream.fake_quantization:register_load_format", "vllm.model_executor.model_loader"
    )
    if runs_on_cpu():
        register_post_import_hook("verl_ext.cpu.vllm:on_import", "vllm.v1.worker.cpu_model_runner")
        register_post_import_hook("verl_ext.cpu.vllm:allow_delivery", "vllm.config.vllm")
        register_post_import_hook("verl_ext.cpu.vllm:sleep_in_queues", QUEUES)
