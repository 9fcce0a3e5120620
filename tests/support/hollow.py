"""Packages that SGLang imports at its top and needs on a GPU alone, as modules in which every name is a mock."""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar
from unittest import mock

PACKAGES = {
    *("sgl_kernel", "flashinfer", "torch_memory_saver", "torchvision", "IPython"),
    *("blobfile", "outlines", "timm", "soundfile"),
}


class _Hollow(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so it finds what is not installed."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in PACKAGES else None

    def create_module(self, spec):
        return _Hollow(spec.name)

    def exec_module(self, module):
        pass


def let_sglang_import() -> None:
    """For the rest of the process, and only where SGLang is installed."""
    if importlib.util.find_spec("sglang") and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
