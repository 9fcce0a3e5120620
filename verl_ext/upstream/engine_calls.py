"""Calls functions of ours in the processes that hold a rollout engine's model: vLLM's workers and SGLang's schedulers.

vLLM calls a method of its workers by name, and this module adds one. SGLang passes a request for its internal state
unchanged to each scheduler; a request with our mark names the function. Without the plugin the mark has no effect.

Each function takes the process's model runner first.
"""

import asyncio
import pkgutil
from collections.abc import Callable
from typing import Any

from wrapt import register_post_import_hook

from verl_ext.base.errors import HookError
from verl_ext.base.patching import Undo, expect, patch, wrap

CALL = "verl_ext_call"  # the method of vLLM's workers; the mark of a request to SGLang, and of its answer


def call(server_handle: Any, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Calls a function of ours in the processes behind one of verl's server actors.

    Returns the answer of each of vLLM's workers, or of one SGLang scheduler per rank of data parallelism.

    Raises:
        HookError: no answer in time, or an engine that does not know the call: the plugin is not loaded there.
    """
    import ray

    path, failed = f"{function.__module__}:{function.__qualname__}", None
    try:
        answers = ray.get(server_handle.__ray_call__.remote(_ask, path, arguments, timeout_s))
    except ray.exceptions.RayTaskError as error:
        answers, failed = [None], error
    if None in answers:
        why = f" ({failed.cause!r})" if failed else ""
        raise HookError(
            f"the rollout engine does not answer {path}{why}: is verl_ext installed on the rollout's nodes, and do "
            "VLLM_PLUGINS and VERL_USE_EXTERNAL_PLUGINS, where set, name verl_ext?"
        ) from failed
    return [answer for (answer,) in answers]


def _ask(server: Any, path: str, arguments: tuple[Any, ...], timeout_s: float) -> list[tuple[Any] | None]:
    """Runs inside verl 0.9.1's vLLMHttpServer or SGLangHttpServer, outside of the actor's event loop, which is that of
    verl's HTTP server task. verl's own `collective_rpc` throws the answers away."""
    if hasattr(server, "tokenizer_manager"):
        asked = ask_schedulers(server.tokenizer_manager, path, *arguments)
    else:
        asked = _ask_workers(server.engine, path, *arguments)
    return asyncio.run_coroutine_threadsafe(asked, server._server_task.get_loop()).result(timeout_s)


async def _ask_workers(engine: Any, path: str, *arguments: Any) -> list[tuple[Any] | None]:
    return [(answer,) for answer in await engine.collective_rpc(CALL, args=(path, *arguments))]


async def ask_schedulers(tokenizer_manager: Any, path: str, *arguments: Any) -> list[tuple[Any] | None]:
    """Returns the answers of SGLang's schedulers in tuples, one per rank of data parallelism; None if one lacks our
    change."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    request = GetInternalStateReq()
    vars(request)[CALL] = (path, *arguments)
    tokenizer_manager.auto_create_handle_loop()
    return [
        answer.internal_state.get(CALL) for answer in await tokenizer_manager.get_internal_state_communicator(request)
    ]


# In the processes that hold the model


def answer_in_workers() -> None:
    """Makes every vLLM worker of this process answer `call`."""
    register_post_import_hook(add_call, "vllm.v1.worker.worker_base")


def add_call(worker_base: Any) -> Undo:
    worker = expect("engine_calls", worker_base, "WorkerBase")
    return patch("engine_calls", worker, CALL, lambda self, *asked: _answer_of(self.model_runner, *asked), new=True)


def answer_in_scheduler(scheduler_module: Any) -> Undo:
    """Makes the scheduler that this process will create answer `call`."""
    scheduler = expect("sglang_calls", scheduler_module, "Scheduler")
    return wrap("sglang_calls", scheduler, "get_internal_state", _answer, "self, recv_req")


def _answer(sglangs: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    if (asked := getattr(request, CALL, None)) is None:
        return sglangs(scheduler, request)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    return GetInternalStateReqOutput(internal_state={CALL: (_answer_of(scheduler.tp_worker.model_runner, *asked),)})


def _answer_of(model_runner: Any, path: str, *arguments: Any) -> Any:
    return pkgutil.resolve_name(path)(model_runner, *arguments)
