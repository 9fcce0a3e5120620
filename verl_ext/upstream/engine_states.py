"""Records the hidden states of prompts in a running rollout engine: in vLLM's workers, in SGLang's schedulers.

vLLM calls a method of its workers by name, and this module adds one. SGLang passes a request for its internal state
unchanged to each scheduler; a request with our mark begins or ends a recording. Without the plugin the mark has no
effect.
"""

import asyncio
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from verl_ext.base.errors import HookError
from verl_ext.base.patching import Undo, expect, patch, wrap
from verl_ext.upstream.engine_report import call

if TYPE_CHECKING:
    from verl_ext.core.recorder import Passes, StatePoint

STATES = "verl_ext_states"  # a method of vLLM's workers; the mark of a request to SGLang, and of the answer
TIMEOUT_S = 600.0
FUSED = ("enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion")  # arguments of SGLang


def begin_states(server_handle: Any) -> None:
    """Records hidden states in all workers behind one of verl's server actors, until `end_states`.

    Raises:
        HookError: they do not answer.
    """
    _states_of(server_handle, True)


def end_states(server_handle: Any) -> "Passes":
    """Returns the states that the first worker recorded; one is enough, because they are whole on each rank.

    Returns {} for an SGLang with data parallelism, because each of its schedulers has only some of the sequences.

    Raises:
        HookError: as `begin_states`.
    """
    import torch

    answer = _states_of(server_handle, False)
    return torch.load(io.BytesIO(answer)) if answer else {}


def _states_of(server_handle: Any, begin: bool) -> bytes:
    import ray

    if not ray.get(server_handle.__ray_call__.remote(_is_sglang)):
        return call(server_handle, STATES, begin, timeout_s=TIMEOUT_S)[0]
    answers = ray.get(server_handle.__ray_call__.remote(_ask_schedulers, begin))
    if answers[0] is None:
        raise HookError(
            "SGLang's scheduler does not record states: is verl_ext installed on the rollout's nodes, and does "
            "VERL_USE_EXTERNAL_PLUGINS, where set, name verl_ext?"
        )
    return answers[0] if len(answers) == 1 else b""


def _as_bytes(passes: "Passes") -> bytes:
    import torch

    written = io.BytesIO()
    torch.save(passes, written)
    return written.getvalue()


# vLLM


def record_in_workers() -> None:
    """Makes every vLLM worker of this process answer `collective_rpc(STATES)`."""
    register_post_import_hook(add_states, "vllm.v1.worker.worker_base")


def add_states(worker_base: Any) -> Undo:
    worker = expect("engine_states", worker_base, "WorkerBase")
    return patch("engine_states", worker, STATES, hidden_states, new=True)


def hidden_states(worker: Any, begin: bool) -> bytes:
    """Begins to record in one vLLM worker, or ends the recording and returns it."""
    from verl_ext.core.recorder import Recorder, named_points

    if begin:
        worker.verl_ext_recorder = Recorder(named_points(worker.model_runner.model))
        return b""
    return _as_bytes(worker.verl_ext_recorder.close())


# SGLang, in verl's server actor


def _is_sglang(server: Any) -> bool:
    return hasattr(server, "tokenizer_manager")


def _ask_schedulers(server: Any, begin: bool) -> list[bytes | None]:
    """Runs outside of the actor's event loop, which is that of verl's HTTP server task."""
    answers = asyncio.run_coroutine_threadsafe(
        ask_schedulers(server.tokenizer_manager, begin), server._server_task.get_loop()
    )
    return answers.result(TIMEOUT_S)


async def ask_schedulers(tokenizer_manager: Any, begin: bool) -> list[bytes | None]:
    """Returns the answers of an engine's schedulers, one per rank of data parallelism; None if one lacks our change."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    request = GetInternalStateReq()
    vars(request)[STATES] = begin
    tokenizer_manager.auto_create_handle_loop()
    return [
        answer.internal_state.get(STATES) for answer in await tokenizer_manager.get_internal_state_communicator(request)
    ]


# SGLang, in the process of a scheduler


def record_in_scheduler(scheduler_module: Any) -> Undo:
    """Makes the scheduler that this process will create answer `ask_schedulers`."""
    scheduler = expect("sglang_states", scheduler_module, "Scheduler")
    return wrap("sglang_states", scheduler, "get_internal_state", _answer, "self, recv_req")


def _answer(sglangs: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    begin = vars(request).get(STATES)
    if begin is None:
        return sglangs(scheduler, request)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    if begin:
        scheduler.verl_ext_recording = SchedulerRecording(scheduler.tp_worker.model_runner)
        return GetInternalStateReqOutput(internal_state={STATES: b""})
    return GetInternalStateReqOutput(internal_state={STATES: _as_bytes(scheduler.verl_ext_recording.close())})


class SchedulerRecording:
    """Records the passes over prompts in the model of a scheduler.

    SGLang's overlap schedule computes the next token of a request before it knows that the request has ended. Such a
    pass is left out.
    """

    def __init__(self, runner: Any) -> None:
        from verl_ext.core.recorder import Recorder

        self._reads_prompt = False
        self._recorder = Recorder(_points_of(runner), takes=lambda: self._reads_prompt)
        self._undo = wrap("sglang_states", runner, "forward", self._forward, "forward_batch, ...")

    def close(self) -> "Passes":
        self._undo()
        return self._recorder.close()

    def _forward(self, sglangs: Callable[..., Any], forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._reads_prompt = forward_batch.forward_mode.is_extend()
        return sglangs(forward_batch, *args, **kwargs)


def _points_of(runner: Any) -> "list[StatePoint]":
    """Returns all points; with tensor parallelism, only those whose states are whole on each rank.

    SGLang sums the ranks' parts of attention and experts outside of these modules. With a fused all-reduce it sums
    their parts of a layer in the norm of the next layer (`LayerCommunicator` of srt/layers/communicator.py).
    """
    from verl_ext.core.recorder import ENDS, ROUTER, named_points

    points = named_points(runner.model)
    if runner.tp_size == 1:
        return points
    fused = any(getattr(runner.server_args, name, False) for name in FUSED)
    whole = (ROUTER,) if fused else (ROUTER, ".layer")
    return [point for point in points if point.name in ENDS or point.name.endswith(whole)]
