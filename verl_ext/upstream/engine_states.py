"""Have a running vLLM engine tell its hidden states on the tokens of prompts."""

import io
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from verl_ext.upstream import engine_report
from verl_ext.upstream.patching import Undo, expect, patch

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "verl_ext_states"


def states(worker: Any, begin: bool) -> bytes:
    """Begin to record in one vLLM worker, or end it and return what was seen, as `torch.save` writes it."""
    import torch

    from verl_ext.core.recorder import Recorder

    if begin:
        worker.verl_ext_recorder = Recorder(worker.model_runner.model)
        return b""
    written = io.BytesIO()
    torch.save(worker.verl_ext_recorder.close(), written)
    return written.getvalue()


def install() -> None:
    """Make `collective_rpc(METHOD)` answer in every vLLM worker of this process."""
    register_post_import_hook(add_method, "vllm.v1.worker.worker_base")


def add_method(worker_base: Any) -> Undo:
    return patch("engine_states", expect("engine_states", worker_base, "WorkerBase"), METHOD, states, new=True)


def begin(server_handle: Any) -> None:
    """In all workers behind one of verl's vLLM server actors."""
    engine_report.call(server_handle, METHOD, True)


def end(server_handle: Any) -> "dict[str, Tensor]":
    """Point -> [tokens, width], of the first worker: what ranks of tensor parallelism share is whole on each."""
    import torch

    return torch.load(io.BytesIO(engine_report.call(server_handle, METHOD, False)[0]))
