"""What the packages of this installation contain, read from their files: importing verl or vLLM takes seconds."""

import ast
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def package_folder(name: str) -> Path | None:
    """Where a package lies; None where it is not installed."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def has_module(name: str) -> bool:
    """Whether a module can be found; of `a.b`, `a` is imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def verl_pins() -> dict[str, dict[str, str]]:
    """Extra of verl -> package -> what it asks for, as pip takes it; {} where verl is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("verl") or []
    except metadata.PackageNotFoundError:
        return {}
    asked = [Requirement(line) for line in lines]
    extras = metadata.metadata("verl").get_all("Provides-Extra") or []
    return {extra: _asked_by(extra, asked) for extra in extras}


def _asked_by(extra: str, asked: list["Requirement"]) -> dict[str, str]:
    """What an extra asks for, through the extras of verl that it names."""
    found: dict[str, str] = {}
    for one in asked:
        if one.marker is None or one.marker.evaluate({"extra": ""}) or not one.marker.evaluate({"extra": extra}):
            continue
        if one.name == "verl":
            for inner in one.extras:
                found |= _asked_by(inner, asked)
        else:
            found[one.name] = f"{one.name}{one.specifier}"
    return found


@cache
def vllm_arguments() -> frozenset[str]:
    """The fields of vLLM's AsyncEngineArgs and of its base, the names that `engine_kwargs.vllm` may use; none where
    vLLM is not installed.

    Source: vllm/engine/arg_utils.py (0.27), two dataclasses.
    """
    return _fields("vllm", "engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")


@cache
def sglang_arguments() -> frozenset[str]:
    """The fields of SGLang's ServerArgs, of `engine_kwargs.sglang`; none where SGLang is not installed.

    Source: sglang/srt/server_args.py (0.5.12), a dataclass, which verl builds of them.
    """
    return _fields("sglang", "srt/server_args.py", "ServerArgs")


def _fields(package: str, path: str, *dataclasses: str) -> frozenset[str]:
    folder = package_folder(package)
    file = folder / path if folder else None
    if file is None or not file.is_file():
        return frozenset()
    classes = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    bodies = (node.body for node in classes if node.name in dataclasses)
    fields = (node for body in bodies for node in body if isinstance(node, ast.AnnAssign))
    return frozenset(ast.unparse(field.target) for field in fields)
