"""SGLang on CPU cores: stand-ins for the parts of a GPU that its engine needs.

Importing this module prepares a process for SGLang: everything waits until SGLang is imported. verl's processes import
it with the plugin. The processes that SGLang spawns import it first, because they call `run_cpu_process`.

Each function that returns an `Undo` is one change of `cpu.changes`.
"""

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from wrapt import register_post_import_hook

from verl_ext.base.patching import Undo, expect, patch, wrap
from verl_ext.upstream import sglang_processes

# SGLang 0.5.12 imports these at the top of its modules; CPU runs call nothing of them.
LEFT_OUT = ("sgl_kernel", "torchvision", "IPython")


def start_cpu_processes(server_module: Any) -> Undo:
    """Runs `upstream.sglang_processes.start_processes`, for processes that import this module first."""
    return sglang_processes.start_processes(server_module, run_cpu_process)


def run_cpu_process(*args: Any, **kwargs: Any) -> None:
    sglang_processes.run_process(*args, **kwargs)


class BeforeSGLang:
    """The first of Python's finders. It finds nothing; it sees when SGLang is about to be imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "sglang":
            from verl_ext.cpu.hollow import Finder, Hollow

            sys.meta_path.append(Finder(*LEFT_OUT))
            if isinstance(ipython := importlib.import_module("IPython"), Hollow):
                vars(ipython)["get_ipython"] = lambda: None  # wandb asks whether this is a notebook
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            if transformers := sys.modules.get("transformers"):
                show_torchvision(transformers)


def import_sglang() -> Undo:
    """Installs hollow modules in processes that import SGLang, which imports its kernels at its top."""
    return patch("import_sglang", sys, "meta_path", [BeforeSGLang(), *sys.meta_path])


def show_torchvision(transformers: Any) -> None:
    """Makes transformers forget that there is no torchvision, because SGLang registers with classes that check for
    it."""
    missing = expect("import_sglang", transformers, "_object_missing_backend")
    for name in [name for name, backends in missing.items() if backends == ["torchvision"]]:
        del missing[name]
        vars(transformers).pop(name, None)  # its placeholder, which raises
    for function in ("is_torchvision_available", "is_torchvision_v2_available"):
        expect("import_sglang", transformers, f"utils.import_utils.{function}").cache_clear()


def allocate_unpinned(module: Any) -> Undo:
    """Allocates unpinned memory: SGLang copies through pinned host memory, which torch refuses without an
    accelerator."""
    from verl_ext.cpu.hollow import Torch

    expect("allocate_unpinned", module, "torch")
    return patch("allocate_unpinned", module, "torch", Torch(lambda keywords: keywords.pop("pin_memory", None)))


def copy_captured(module: Any) -> Undo:
    """Copies captured expert ids, which the overlap schedule copies to the host while the next forward pass overwrites
    them.

    On a CPU, `.to("cpu")` copies nothing: without this, routing is silently wrong.
    """
    return wrap("copy_captured", module.TopkCaptureOutput, "copy_to_cpu", _copy_and_clone, "self")


def _copy_and_clone(copy_to_cpu: Callable[[Any], None], output: Any) -> None:
    copy_to_cpu(output)
    output.topk = output.topk.clone()


def pickle_by_value(module: Any) -> Undo:
    """Sends weights to SGLang by value, not as handles of GPU memory; handles of CPU tensors need a common parent
    process."""
    expect("pickle_by_value", module, "ForkingPickler")
    return patch("pickle_by_value", module, "ForkingPickler", ByValue)


class ByValue(pickle.Pickler):
    """A pickler that writes a part of a storage by itself. Megatron's weights are parts of one buffer, and a tensor is
    pickled with all of its storage."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.detach().clone(memory_format=torch.contiguous_format).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


import_sglang()
register_post_import_hook(allocate_unpinned, "sglang.srt.layers.logits_processor")
register_post_import_hook(allocate_unpinned, "sglang.srt.state_capturer.base")
register_post_import_hook(copy_captured, "sglang.srt.state_capturer.base")
register_post_import_hook(pickle_by_value, "sglang.srt.utils.common")
