"""All that the pages name exists: links, files, tests, options, launches, and settings with their defaults."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from verl_ext.base.methods import defaults
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.filters import BATCH_FILTERS
from verl_ext.features.settings import SyncCheckSettings
from verl_ext.features.stability import default_node

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
ROOMS = "verl_ext|configs|docs|recipes|requirements|tests|tools"
NAMED = re.compile(rf"`(?!\S*NAME)((?:{ROOMS})/[\w/.-]+\.\w+)(?:::(\w+))?")
MODULE = re.compile(r"python -m (verl_ext[\w.]*)")
OPTION = re.compile(r"\b(stability|recipe|precision)=(?!NAME)(\w+)")
NO_SUBJECT = re.compile(r"\s*(?:Of|By|With|As|And|Where)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BLOCK = re.compile(r"^```(?:bash|diff)\n.*?^```", flags=re.DOTALL | re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", read(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def launches(page: Path) -> list[list[str]]:
    """The overrides of each launch in a block of code, without what the reader has to fill in."""
    code = "".join(BLOCK.findall(read(page))).replace("\\\n", "")
    commands = re.findall(r"python -m verl_ext\.main_ppo (.+)", code)
    return [[word for word in shlex.split(command) if word != "..."] for command in commands]


def test_the_front_page_is_read_in_three_minutes():
    assert len(read(ROOT / "README.md").splitlines()) <= 110


@each_page
def test_files_and_tests_that_a_page_names_exist(page):
    for link, anchor in LINK.findall(read(page)):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    for file, test in NAMED.findall(read(page)):
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in read(ROOT / file), f"{file}::{test}"


@each_page
def test_modules_and_options_that_a_page_names_exist(page):
    for module in MODULE.findall(read(page)):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), module
    for group, name in OPTION.findall(read(page)):
        assert (ROOT / "configs" / group / f"{name}.yaml").exists(), f"{group}={name}"


@pytest.mark.parametrize("page", filter(launches, PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_launches_compose(page, compose):
    for overrides in launches(page):
        compose(*overrides)


def leaves(node: dict, prefix: str, none: str = "null") -> dict[str, str]:
    """Returns name -> default, as in YAML, of every setting; `none` if it has no default."""
    words = {"None": none, "True": "true", "False": "false"}
    found = {}
    for key, value in node.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        name = f"{prefix}.{key}"
        found |= leaves(value, name, none) if isinstance(value, dict) else {name: words.get(shown, shown)}
    return found


def test_the_settings_page_has_every_setting_with_its_default():
    rows = re.findall(r"^\| `(stability\.[\w.]+)` \| (\S+) \|", read(ROOT / "docs" / "settings.md"), flags=re.MULTILINE)
    corrections, filters = (
        {name: defaults(method.settings) for name, method in methods.items()}
        for methods in (CORRECTIONS, BATCH_FILTERS)
    )
    settings = leaves(default_node(), "stability") | leaves(corrections, "stability", none="-")
    settings |= leaves(filters, "stability.filters", none="-")
    settings |= leaves(defaults(SyncCheckSettings), "stability.sync_check")  # null by default
    assert dict(rows) == settings, "python tools/pages.py"
    assert len(rows) == len(dict(rows))


def test_the_page_of_checks_names_every_benchmark():
    page = read(ROOT / "docs" / "checks.md")
    assert [file.name for file in (ROOT / "tools").glob("bench_*.py") if f"tools/{file.name}" not in page] == []


def test_docstrings_open_with_a_noun_or_a_verb():
    tracked = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [file for file in tracked.stdout.split("\0") if file and (ROOT / file).exists()]
    assert len(files) > 100, "git lists the repository"
    found = []
    for file in files:
        for node in ast.walk(ast.parse(read(ROOT / file))):
            if isinstance(node, DOCUMENTED) and NO_SUBJECT.match(text := ast.get_docstring(node) or ""):
                found.append(f"{file}: {text.splitlines()[0]}")
    assert found == []
