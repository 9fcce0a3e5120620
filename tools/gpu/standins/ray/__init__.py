"""Stands in for Ray. verl imports it everywhere; an engine on one GPU never calls it.

Names can be imported, and used as annotations; whatever is called raises.
"""

from typing import Any, NoReturn

__version__ = "0.0.0"


class Absent(type):
    """A name of Ray's: a class, so that it can be used in an annotation or be derived from."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"ray.{cls.__name__} was called, and Ray is not installed here: this is a stand-in for it")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {})
