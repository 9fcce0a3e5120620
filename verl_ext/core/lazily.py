"""torch, imported when it is first used.

A method's settings stand beside its function. `verl-ext plan` and doctor read the settings without ever computing, and
do without the seconds that importing torch takes.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

Result = TypeVar("Result")


def no_grad(function: Callable[..., Result]) -> Callable[..., Result]:
    """`torch.no_grad()` as a decorator, which torch's own would import it for."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
