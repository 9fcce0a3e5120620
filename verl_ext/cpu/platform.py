"""The `cpu` platform of verl 0.9.1, chosen with VERL_PLATFORM=cpu."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from wrapt import register_post_import_hook

from verl_ext.cpu import (
    patches,
    sglang,  # noqa: F401  importing it prepares this process for SGLang
)

ENGINES = "verl.workers.engine"


class Nothing:
    """A stream or an event on a device where everything runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *error: object) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., "Nothing"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def _resident_bytes(*args: Any) -> int:
    """Returns this process's resident memory, which on a CPU stands for memory allocated on the device."""
    return psutil.Process().memory_info().rss


def stand_ins() -> dict[str, Any]:
    """Returns functions of torch.cuda by name: streams and events, waits, random state, and the current device.

    Each name has an object of its own, because torch.compile's table of torch's functions does not take one twice.
    """
    waits = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")
    return {
        **{name: type(name, (Nothing,), {}) for name in ("Stream", "Event")},
        **{name: partial(Nothing) for name in ("stream", "current_stream", "default_stream")},
        **{name: partial(_do_nothing) for name in waits},
        "current_device": lambda: torch.device("cpu"),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }


def cpu_device_module() -> types.ModuleType:
    """Returns a stand-in for torch.cuda with the functions that verl calls on `get_torch_device()`."""
    module = types.ModuleType("verl_ext.cpu.device")
    memory = psutil.virtual_memory
    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    vars(module).update(
        stand_ins(),
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_name=lambda *args: "cpu",
        ipc_collect=_do_nothing,
        set_per_process_memory_fraction=_do_nothing,
        manual_seed_all=torch.manual_seed,
        mem_get_info=lambda *args: (memory().available, memory().total),
        **dict.fromkeys(sizes, _resident_bytes),
    )
    return module


class PlatformCPU(PlatformBase):
    """One CPU "device" per process; Ray counts it as a GPU, which is a logical resource there."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = cpu_device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never auto-detected: a GPU machine must not fall back to its CPU silently

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl passes it to Module.to(), where an index means an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its "GPU" resource

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def install_platform() -> None:
    """Registers the platform and the changes to verl and torch; an engine's changes wait until it is imported."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    patches.collapse_duplicate_gloo()
    patches.answer_for_vllm_cpu()
    register_post_import_hook("verl_ext.cpu.patches:adapt_fsdp", f"{ENGINES}.fsdp.transformer_impl")
    register_post_import_hook("verl_ext.cpu.megatron:adapt_engine", f"{ENGINES}.megatron.transformer_impl")
    register_post_import_hook("verl_ext.cpu.patches:adapt_veomni", f"{ENGINES}.veomni.transformer_impl")
    register_post_import_hook("verl_ext.cpu.megatron:allow_float32", "verl.workers.config.engine")
