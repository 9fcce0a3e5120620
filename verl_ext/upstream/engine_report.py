"""Ask the running vLLM engine what it really runs with.

The vLLM plugin adds one method to vLLM's worker classes; the trainer calls it over verl's server actors. A
setting that vLLM accepted and then ignored shows here (its CPU model runner, for one, never uses cascade
attention, whatever the arguments say).
"""

import asyncio
from typing import Any

from wrapt import register_post_import_hook

from verl_ext.errors import HookError
from verl_ext.upstream.patching import Undo, expect, patch

METHOD = "verl_ext_engine_report"


def engine_report(worker: Any) -> dict[str, Any]:
    """What one vLLM worker runs with; `worker` is vLLM's Worker, seen from inside."""
    # Both import torch, which a front-end process does without.
    from verl_ext.upstream import adapter_report, fake_quantization

    return {
        # vLLM's second model runner (vllm/v1/worker/gpu, seen in 0.27) has no cascade attention and no such attribute.
        "cascade_attention": bool(getattr(worker.model_runner, "cascade_attn_enabled", False)),
        "adapter": adapter_report.report(worker.model_runner),
        "fake_quantization": fake_quantization.report(worker.model_runner.model),
    }


def install() -> None:
    """Make `collective_rpc(METHOD)` answer in every vLLM worker of this process."""
    register_post_import_hook(add_method, "vllm.v1.worker.worker_base")


def add_method(worker_base: Any) -> Undo:
    return patch("engine_report", expect("engine_report", worker_base, "WorkerBase"), METHOD, engine_report, new=True)


def fetch(server_handle: Any) -> list[dict[str, Any]]:
    """The reports of all workers behind one of verl's vLLM server actors; HookError as of `call`."""
    return call(server_handle, METHOD)


def call(server_handle: Any, method: str, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """What a method that this package adds to vLLM's workers returns, on each behind one of verl's server actors.

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

    Ray runs this beside the actor's event loop, not on it; verl's HTTP server task knows the loop.
    """
    answers = server.engine.collective_rpc(method, args=arguments)
    return asyncio.run_coroutine_threadsafe(answers, server._server_task.get_loop()).result(timeout_s)
