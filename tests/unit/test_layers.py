"""Imports point down: a room of the package imports only rooms below it, inside functions too."""

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT

# Room -> the rooms and modules of verl_ext that it may import in addition to itself.
BELOW: dict[str, set[str]] = {
    "base": set(),
    "core": {"base"},
    "diagnosis": {"base"},
    "guard": {"base", "diagnosis"},
    "routing": {"base", "core"},
    "upstream": {"base", "core", "routing"},
    "cpu": {"base", "upstream"},
    "features": {"base", "core", "diagnosis", "guard", "routing", "upstream"},
    "launch": {"base", "features"},
    "plugins": {"base", "cpu", "features", "upstream", "workers"},
    "workers": {"base", "core", "features", "guard", "routing", "upstream"},
    "trainer": {"base", "core", "diagnosis", "features", "guard", "launch", "plugins", "upstream", "workers"},
    "report": {"__version__", "base", "core", "diagnosis", "guard"},
    "probe": {
        "base",
        "core",
        "diagnosis",
        "features",
        "launch",
        "report",
        "routing",
        "start",
        "trainer",
        "upstream",
        "workers",
    },
    "lab": {"__version__", "base", "core", "diagnosis", "features", "guard", "launch", "report", "trainer", "workers"},
}
ABOVE_TOOLS = {"tests", "recipes"}
ENGINES = {"verl", "ray", "vllm"}
WITHOUT = {
    "core": ENGINES,
    "diagnosis": {*ENGINES, "torch"},
    "guard": {*ENGINES, "torch"},
    "base": {*ENGINES, "torch"},
    "features": {"ray", "vllm"},
    "launch": ENGINES,
    "report": {*ENGINES, "torch"},
    "lab": {"ray", "vllm"},
}


def imports(file: Path) -> set[str]:
    """The modules that a file imports; a name imported from `verl_ext` itself counts as one."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import, which this test does not read"
            inside = node.module == "verl_ext"
            found |= {f"verl_ext.{alias.name}" for alias in node.names} if inside else {node.module or ""}
    return found


def imports_of(room: str) -> set[tuple[str, str]]:
    """(file, module) of a room, the file relative to the package."""
    files = sorted((ROOT / "verl_ext" / room).rglob("*.py"))
    return {(file.relative_to(ROOT / "verl_ext").as_posix(), name) for file in files for name in imports(file)}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_what_is_below_it(room):
    ours = {(file, name.removeprefix("verl_ext.")) for file, name in imports_of(room) if name.startswith("verl_ext.")}
    above = {(file, name) for file, name in ours if name.split(".")[0] not in BELOW[room] | {room}}
    assert above == set()


@pytest.mark.parametrize("room", WITHOUT)
def test_a_room_works_without_the_engines_that_it_need_not_know(room):
    assert not {(file, name) for file, name in imports_of(room) if name.split(".")[0] in WITHOUT[room]}


def test_tools_import_neither_tests_nor_recipes():
    files = sorted((ROOT / "tools").rglob("*.py"))
    assert files and not {
        (file.name, name) for file in files for name in imports(file) if name.split(".")[0] in ABOVE_TOOLS
    }


# Names that several files may have: what every feature's file offers, and entry points.
SHARED = {"needs", "problems", "apply", "lines", "loss_settings", "idle", "main"}


def test_a_name_is_defined_once():
    """A search for the name of a class or function finds one place."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "verl_ext").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(file.relative_to(ROOT).as_posix())
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in SHARED} == {}


POINTER = re.compile(r"`(?:verl_ext\.)?((?:\w+\.)+)(\w+)`")


def named_in(file: Path) -> set[str]:
    """Dotted names in backticks whose first part is a room of the package: `core.tokens.Lag`."""
    rooms = {*BELOW, "doctor", "plan"} - {
        "guard",
        "lab",
        "report",
        "trainer",
    }  # which are nodes of a config, or a file's name
    found = {(path + name) for path, name in POINTER.findall(file.read_text(encoding="utf-8"))}
    return {name for name in found if name.split(".")[0] in rooms}


def is_there(name: str) -> bool:
    """Checks that a dotted name is a folder, a file, or a name that a file defines; members are not checked."""
    path = ROOT / "verl_ext"
    for part in name.split("."):
        if (path / part).is_dir():
            path = path / part
            continue
        if (file := path / f"{part}.py").is_file():
            path = file
            continue
        text = (path if path.is_file() else path / "__init__.py").read_text(encoding="utf-8")
        return re.search(rf"^\s*(?:def |class |@?){part}\b", text, flags=re.MULTILINE) is not None
    return True


@pytest.mark.parametrize(
    "room", ["base", *WITHOUT.keys() - {"base"}, "workers", "trainer", "routing", "upstream", "doctor"]
)
def test_names_that_a_file_points_to_are_there(room):
    files = sorted((ROOT / "verl_ext" / room).rglob("*.py"))
    assert [(file.name, name) for file in files for name in named_in(file) if not is_there(name)] == []
