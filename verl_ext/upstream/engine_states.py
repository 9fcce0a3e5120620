"""Records the hidden states of prompts in a running rollout engine: in vLLM's workers and SGLang's schedulers."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl_ext.base.patching import wrap
from verl_ext.upstream.engine_calls import call

if TYPE_CHECKING:
    from verl_ext.routing.recorder import Passes, StatePoint

TIMEOUT_S = 600.0
FUSED = ("enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion")  # arguments of SGLang


def begin_states(server_handle: Any) -> None:
    """Records hidden states in all processes behind one of verl's server actors, until `end_states`.

    Raises:
        HookError: the processes do not answer.
    """
    call(server_handle, begin, timeout_s=TIMEOUT_S)


def end_states(server_handle: Any) -> "Passes":
    """Returns the states that the first process recorded; one is enough, because they are whole on each rank.

    Returns {} for an SGLang with data parallelism, because each of its schedulers has only some of the sequences.

    Raises:
        HookError: as `begin_states`.
    """
    return read_states(call(server_handle, end, timeout_s=TIMEOUT_S)[0])


def read_states(ended: bytes) -> "Passes":
    """Returns the states in an answer of `end`."""
    import torch

    return torch.load(io.BytesIO(ended))


# In a process of the engine


def begin(model_runner: Any) -> None:
    from verl_ext.routing.recorder import Recorder, named_points

    if hasattr(model_runner, "server_args"):
        model_runner.verl_ext_recording = SGLangRecording(model_runner)
    else:
        model_runner.verl_ext_recording = Recorder(named_points(model_runner.model))


def end(model_runner: Any) -> bytes:
    import torch

    passes, written = model_runner.verl_ext_recording.close(), io.BytesIO()
    torch.save(passes, written)
    return written.getvalue()


class SGLangRecording:
    """Records the passes over prompts in the model of a scheduler.

    SGLang's overlap schedule computes the next token of a request before it knows that the request has ended. Such a
    pass is left out.
    """

    def __init__(self, runner: Any) -> None:
        from verl_ext.routing.recorder import Recorder

        self._reads_prompt, self._whole = False, runner.server_args.dp_size == 1
        self._recorder = Recorder(_points_of(runner), takes=lambda: self._reads_prompt)
        self._undo = wrap("sglang_states", runner, "forward", self._forward, "forward_batch, ...")

    def close(self) -> "Passes":
        self._undo()
        passes = self._recorder.close()
        return passes if self._whole else {}

    def _forward(self, sglangs: Callable[..., Any], forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._reads_prompt = forward_batch.forward_mode.is_extend()
        return sglangs(forward_batch, *args, **kwargs)


def _points_of(runner: Any) -> "list[StatePoint]":
    """Returns all points; with tensor parallelism, only those whose states are whole on each rank.

    SGLang sums the ranks' parts of attention and experts outside of these modules. With a fused all-reduce it sums
    their parts of a layer in the norm of the next layer (`LayerCommunicator` of srt/layers/communicator.py).
    """
    from verl_ext.base.names import ROUTER
    from verl_ext.routing.recorder import ENDS, named_points

    points = named_points(runner.model)
    if runner.tp_size == 1:
        return points
    fused = any(getattr(runner.server_args, name, False) for name in FUSED)
    whole = (ROUTER,) if fused else (ROUTER, ".layer")
    return [point for point in points if point.name in ENDS or point.name.endswith(whole)]
