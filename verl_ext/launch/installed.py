"""What the packages of this installation contain, read from their files: importing verl or vLLM takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def package_folder(name: str) -> Path | None:
    """Where a package lies; None where it is not installed."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def vllm_arguments() -> frozenset[str]:
    """The fields of vLLM's AsyncEngineArgs and of its base, the names that `engine_kwargs.vllm` may use; none where
    vLLM is not installed.

    Source: vllm/engine/arg_utils.py (0.27), two dataclasses.
    """
    folder = package_folder("vllm")
    file = folder / "engine" / "arg_utils.py" if folder else None
    if file is None or not file.is_file():
        return frozenset()
    classes = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    bodies = (node.body for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs"))
    fields = (node for body in bodies for node in body if isinstance(node, ast.AnnAssign))
    return frozenset(ast.unparse(field.target) for field in fields)
