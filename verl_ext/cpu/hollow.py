"""Hollow modules for packages of GPU kernels that others import at their top, and a changed `torch` for one module.

A hollow module can be imported and searched for names. Calls that would compute with it raise.
"""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


class MissingType(type):
    """The metaclass of `Missing`: a class has every attribute, such as an enumeration's `Mode.NEAREST`; calls raise."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow(f"{cls.__module__}.{cls.__name__}.{name}")


class Missing(nn.Module, metaclass=MissingType):
    """A class of a missing package: it can be a base class or be looked up, but not be built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{type(self).__module__}.{type(self).__name__} needs a GPU: it has no stand-in on CPU cores"
        )


class Hollow(ModuleType):
    """A module of a missing package: its classes are `Missing`, its functions raise."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            vars(self)[name] = type(name, (Missing,), {"__module__": self.__name__})
            return vars(self)[name]
        return importlib.import_module(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.__name__} needs a GPU: it has no stand-in on CPU cores")


class Finder:
    """The last of Python's finders: it finds these packages if they are not installed."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.packages else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class Torch:
    """`torch` for one module: `change` edits the keyword arguments of its factories."""

    def __init__(self, change: Callable[[dict[str, Any]], None]) -> None:
        self._change = change

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return partial(self._made, found) if name in FACTORIES else found

    def _made(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._change(kwargs)
        return factory(*args, **kwargs)
