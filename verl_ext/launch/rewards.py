"""The parameters of a reward function of the user's own, and verl's call of it. Nothing is imported."""

import ast
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.base.errors import Problem
from verl_ext.features.verl_config import value_of
from verl_ext.launch.names import MANAGER, SOURCE
from verl_ext.launch.packages import module_file, package_folder

FUNCTION = "reward.custom_reward_function"
OF_VERL = re.compile(r"\bverl/utils/reward_score/\w+\.py$")


def reward_function_problems(config: DictConfig) -> Iterator[Problem]:
    """Yields a problem if the reward function does not take the keywords of its manager's call, or needs others."""
    path, name, manager = (str(value_of(config, one)) for one in (f"{FUNCTION}.path", f"{FUNCTION}.name", MANAGER))
    keywords = _keywords(manager) if value_of(config, SOURCE) == "register" else []
    signature = _signature(path.removeprefix("file://"), name)
    if not keywords or signature is None:
        return
    try:
        signature.bind(**dict.fromkeys([*keywords, *(value_of(config, f"{FUNCTION}.reward_kwargs") or ())]))
    except TypeError as error:
        why = f"the reward manager {manager} calls it with {', '.join(keywords)}: {error}"
        yield Problem(f"{FUNCTION}.path={path}: verl cannot call {name}{signature}", why)


def _signature(path: str, name: str) -> inspect.Signature | None:
    """Returns a function's parameters, with None as defaults; None if the file does not define it, or decorates it. If
    the file is not here, and is one of verl's by its path, the installed one is read."""
    file: Path | None = Path(os.path.expanduser(path))
    if file is not None and not file.is_file():
        of_verl = OF_VERL.search(path)
        file = module_file(of_verl[0]) if of_verl else None
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body if file else []
    except (SyntaxError, ValueError):  # the run reports it
        return None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    *_, found = (None, *(each for each in body if isinstance(each, kinds) and each.name == name))
    if found is None or found.decorator_list or _is_bound_again(body, found):
        return None
    none, given = ast.Constant(None), found.args
    given.defaults, given.kw_defaults = [none] * len(given.defaults), [one and none for one in given.kw_defaults]
    bare = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, none)))  # without the file's own expressions
    return inspect.signature(eval(compile(bare, path, "eval"), {}))


def _is_bound_again(body: Sequence[ast.stmt], found: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns True if a file gives a function's name to something else too, wherever that stands."""
    nodes = [node for each in body for node in ast.walk(each) if node is not found]
    names = [getattr(node, "name", None) for node in nodes if not isinstance(node, ast.alias)]
    names += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
    return found.name in names


def _keywords(manager: str) -> list[str]:
    """Returns the keywords with which one of verl's reward managers calls a reward function; [] if it has none such."""
    folder = package_folder("verl")
    for file in folder.glob("experimental/reward_loop/reward_manager/*.py") if folder else ():
        if f'("{manager}")' in (text := file.read_text(encoding="utf-8")):
            calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
            called = (each.keywords for each in calls if "compute_score" in ast.unparse(each.func))
            return [*dict.fromkeys(one.arg for keywords in called for one in keywords if one.arg)]
    return []
