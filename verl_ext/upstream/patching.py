"""Replace attributes of foreign code so that it can be undone. No import of what gets patched."""

from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


class PatchError(RuntimeError):
    """What a patch was to change is not what it was written for."""


def replace(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; the result sets it back, or deletes it where it was inherited."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if inherited else setattr(owner, name, original)


def together(*patches: Callable[[], Undo]) -> Undo:
    """Apply all patches; if one raises, undo those before it. The result undoes them in reverse order."""
    undos: list[Undo] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for patch in patches:
            undos.append(patch())
    except BaseException:
        undo()
        raise
    return undo
