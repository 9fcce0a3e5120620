"""Asks the running vLLM engine for its actual settings.

The vLLM plugin adds a method to vLLM's worker classes; the trainer calls it over verl's server actors. The answer shows
settings that vLLM accepted and then ignored. For example, its CPU model runner never uses cascade attention, whatever
the arguments ask for.
"""

import asyncio
from typing import Any

from wrapt import register_post_import_hook

from verl_ext.base.errors import HookError
from verl_ext.base.patching import Undo, expect, patch

REPORT = "verl_ext_engine_report"


def engine_report(worker: Any) -> dict[str, Any]:
    """Returns the settings that one vLLM worker runs with; `worker` is vLLM's Worker, and this runs in its process."""
    from verl_ext.upstream import fake_quantization  # imports torch, which a front-end process does not need

    return {
        # vLLM's second model runner (vllm/v1/worker/gpu, seen in 0.27) has no cascade attention and no such attribute.
        "cascade_attention": bool(getattr(worker.model_runner, "cascade_attn_enabled", False)),
        "adapter": adapter_report(worker.model_runner),
        "fake_quantization": fake_quantization.report(worker.model_runner.model),
    }


def adapter_report(model_runner: Any) -> dict[str, Any] | None:
    """Returns how many adapters a vLLM worker has, how many of their weights it uses, and the names of the others.

    vLLM silently ignores an adapter's weights that match no module of the model: `activate_adapter` of
    vllm/lora/model_manager.py (0.27) looks up the model's modules in the adapter, not the other way round. The rollout
    then samples from another policy than the one trained (vLLM issues 34186 and 48019; SkyRL issue 1776 reports a gap
    that explodes only with a LoRA).

    None if the engine runs without LoRA. Several modules that vLLM keeps as one (q, k and v) count as one: their
    matching weights have its name by now.
    """
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        return None
    adapters, modules = manager._adapter_manager.list_adapters(), manager._adapter_manager.modules
    names = [name for adapter in adapters.values() for name in adapter.loras]
    unused = sorted(name for name in names if name not in modules)
    return {"adapters": len(adapters), "used": len(names) - len(unused), "unused": unused}


def report_from_workers() -> None:
    """Makes every vLLM worker of this process answer `collective_rpc(REPORT)`."""
    register_post_import_hook(add_report, "vllm.v1.worker.worker_base")


def add_report(worker_base: Any) -> Undo:
    worker = expect("engine_report", worker_base, "WorkerBase")
    return patch("engine_report", worker, REPORT, engine_report, new=True)


def fetch_reports(server_handle: Any) -> list[dict[str, Any]]:
    """Returns the reports of all workers behind one of verl's vLLM server actors; raises HookError as `call` does."""
    return call(server_handle, REPORT)


def call(server_handle: Any, method: str, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Calls a method that this package adds to vLLM's workers, on each worker behind one of verl's server actors.

    Raises:
        HookError: no answer in time, or the engine does not know the method (the vLLM plugin is not loaded).
    """
    import ray

    try:
        return ray.get(server_handle.__ray_call__.remote(_ask, method, arguments, timeout_s))
    except ray.exceptions.RayTaskError as error:
        raise HookError(
            f"vLLM does not answer {method} ({error.cause!r}): is verl_ext installed on the rollout's nodes, and does "
            "VLLM_PLUGINS, where set, name verl_ext?"
        ) from error


def _ask(server: Any, method: str, arguments: tuple[Any, ...], timeout_s: float) -> list[Any]:
    """Runs inside verl 0.9.1's vLLMHttpServer, whose own `collective_rpc` throws the answers away.

    Ray runs this outside of the actor's event loop, which is that of verl's HTTP server task.
    """
    answers = server.engine.collective_rpc(method, args=arguments)
    return asyncio.run_coroutine_threadsafe(answers, server._server_task.get_loop()).result(timeout_s)
