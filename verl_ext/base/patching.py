"""The two ways in which foreign code is changed, each with an undo: `patch` and `wrap`.

`change` is a name in `changes.py`, which gives the reason and the versions. This module imports none of the changed
code.
"""

import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

from verl_ext.base.changes import CHANGES

Undo = Callable[[], None]


class PatchError(RuntimeError):
    """The code to be changed is not the code that the change was written for."""


def patch(change: str, owner: Any, name: str, value: Any, *, new: bool = False) -> Undo:
    """Replaces an attribute of a module or a class, or an entry of a registry (a dict), with `value`.

    Args:
        new: the attribute need not exist.

    Returns a function that restores the original, or removes the attribute if there was none or it was inherited.

    Raises:
        PatchError: the attribute does not exist.
    """
    registry = isinstance(owner, dict)
    members = owner if registry else vars(owner)
    put, remove = (operator.setitem, operator.delitem) if registry else (setattr, delattr)
    if not (new or name in members or hasattr(owner, name)):
        raise moved(change, f"{_called(owner)} has no {name}")
    own, original = name in members, members.get(name)
    put(owner, name, value)
    return lambda: put(owner, name, original) if own else remove(owner, name)


def wrap(change: str, owner: Any, method: str, around: Callable[..., Any], parameters: str | None = None) -> Undo:
    """Calls `around(original, *args)` instead of `owner.method(*args)`; `owner` is an instance, a class or a module.

    A second call with the same `around` changes nothing, and its undo does nothing. A coroutine function stays one.

    Raises:
        PatchError: as for `expect`.
    """
    original = expect(change, owner, method, parameters)
    if getattr(original, "__verl_ext__", None) == around:
        return lambda: None

    def called(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await around(original, *args, **kwargs)

    wrapped = functools.wraps(original)(awaited if inspect.iscoroutinefunction(original) else called)
    wrapped.__verl_ext__ = around  # type: ignore[attr-defined]
    return patch(change, owner, method, wrapped)


def apply_all(*patches: Callable[[], Undo]) -> Undo:
    """Applies all patches; if one raises, undoes those before it. The result undoes them in reverse order."""
    undos: list[Undo] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for each in patches:
            undos.append(each())
    except BaseException:
        undo()
        raise
    return undo


def once(apply: Callable[[], Undo]) -> Callable[[], Undo]:
    """Decorates a function that changes foreign code: until it is undone, a second call only returns the same undo."""
    applied: list[Undo] = []

    @functools.wraps(apply)
    def called() -> Undo:
        if not applied:
            undo_all = apply()

            def undo() -> None:
                undo_all()
                applied.clear()

            applied.append(undo)
        return applied[0]

    return called


def expect(change: str, owner: Any, name: str, parameters: str | None = None) -> Any:
    """Returns `owner.name`, which must exist and take the parameters, if these are given.

    Args:
        owner: an object, or the name of a module.
        name: may have dots.
        parameters: "self, layer", or "backend, ..." where more may follow.

    Raises:
        PatchError: it is missing, or takes other parameters.
    """
    called = f"{_called(owner)}.{name}"
    try:
        target = importlib.import_module(owner) if isinstance(owner, str) else owner
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise moved(change, f"{called} is missing") from error
    if parameters is not None:
        found = ", ".join(inspect.signature(target).parameters) if callable(target) else "nothing"
        fits = f"{found}, ".startswith(parameters[:-3]) if parameters.endswith("...") else found == parameters
        if not fits:
            raise moved(change, f"{called} takes ({found}), not ({parameters})")
    return target


def expect_lookup(change: str, function: Any, *names: str) -> None:
    """Checks that `function` looks these names up when it is called; otherwise replacing them would have no effect.

    Raises:
        PatchError: it does not look up one of them.
    """
    for name in names:
        if name not in function.__code__.co_names:
            raise moved(change, f"{function.__module__}.{function.__qualname__} no longer looks up {name}")


def moved(change: str, what: str) -> PatchError:
    """Returns an error with the versions that a change was written for, the installed ones, and what differs."""
    entry = CHANGES[change]
    found = " and ".join(filter(None, map(_installed, entry.versions))) or "none of it"
    text = f"patch {change} was written for {entry.written_for}, but {found} is installed: {what}"
    return PatchError(f"{text}; {entry.without}" if entry.without else text)


def _installed(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return ""


def _called(owner: Any) -> str:
    return owner if isinstance(owner, str) else getattr(owner, "__name__", type(owner).__name__)


def runs_on_cpu() -> bool:
    """Returns True if verl runs on CPU cores here, by verl's own switch VERL_PLATFORM=cpu."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def actor_class(remote_class: Any) -> type:
    """Returns the class behind Ray's `ray.remote(cls)`."""
    return remote_class.__ray_metadata__.modified_class.__ray_actor_class__
