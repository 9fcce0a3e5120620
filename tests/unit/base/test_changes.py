"""The table of changes to foreign code: against the source that makes them, the tests that it names, and the page."""

import ast
import subprocess
import sys

import pytest

from tests import ROOT
from verl_ext.base import changes
from verl_ext.base.changes import CHANGES
from verl_ext.cpu import changes as cpu

TABLE = (*changes.TABLE, *cpu.TABLE)
PACKAGE = ROOT / "verl_ext"
PATCHING = PACKAGE / "base" / "patching.py"


def calls(*functions: str) -> list[tuple[str, ast.Call]]:
    """(file within the package, call) of each call of these functions, but in patching.py itself."""
    return [
        (file.relative_to(PACKAGE).as_posix(), node)
        for file in sorted({*PACKAGE.rglob("*.py")} - {PATCHING})
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions
    ]


def test_every_change_in_the_source_is_in_the_table_and_every_entry_is_made():
    made = {(file, ast.literal_eval(call.args[0])) for file, call in calls("patch", "wrap")}
    assert made == {(change.file, change.name) for change in TABLE}
    assert len(CHANGES) == len(TABLE), "no name stands for two"


def test_the_table_names_what_the_source_changes():
    for _, call in calls("patch", "wrap"):
        change, _, attribute, *_ = call.args
        if isinstance(attribute, ast.Constant):
            assert f"{attribute.value}`" in CHANGES[ast.literal_eval(change)].target


def test_nothing_but_the_two_helpers_sets_an_attribute_by_its_name():
    assert calls("setattr", "delattr") == []


@pytest.mark.parametrize("change", TABLE, ids=lambda change: change.name)
def test_the_test_that_would_notice_exists(change):
    file, _, test = change.test.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_table_is_read_without_what_it_changes():
    code = "import sys, verl_ext.base.patching; print(*{'verl', 'vllm', 'torch', 'ray'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []
