"""Mismatch, corrections, filters, losses, routing: only torch, which is imported when it is first used.

Nothing here knows verl, Ray or vLLM. A method's settings are next to its function: `verl-ext plan` and doctor read them
without ever computing, and without the seconds that importing torch takes.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

Result = TypeVar("Result")


def no_grad(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates as `torch.no_grad()` does, without importing torch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
