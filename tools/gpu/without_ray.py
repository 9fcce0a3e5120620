"""A stand-in for Ray on a machine without it. verl imports Ray everywhere; an engine on one GPU never calls it.

Its names can be imported, derived from, and used as annotations; whatever is called raises.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn


class AbsentName(type):
    """A name of Ray's: a class, so that it can be used in an annotation or be derived from."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"ray.{cls.__name__} was called, and Ray is not installed here: this is a stand-in for it")


class AbsentRay(ModuleType):
    """The module that `import ray` finds."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentName(name, (), {})


def install() -> None:
    """Lets this process import Ray if it is not installed."""
    if find_spec("ray") is None:
        sys.modules["ray"] = AbsentRay("ray")
        sys.modules["ray"].__spec__ = ModuleSpec("ray", loader=None)


def is_installed() -> bool:
    """Checks whether the stand-in is what this process imports."""
    return isinstance(sys.modules.get("ray"), AbsentRay)
