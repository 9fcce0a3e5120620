"""The generated parts of the documentation are those of the code: `python tools/pages.py` writes them."""

import re

import pytest

from tests import ROOT
from tools.pages import MADE, filled
from verl_ext.base.changes import TABLE
from verl_ext.base.metrics import METRICS
from verl_ext.cpu import changes as cpu
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.diagnosis.findings.registry import RULES
from verl_ext.doctor.checks import CHECKS

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
GENERATED = [name for name, text in PAGES.items() if MADE.search(text)]


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_parts_are_current(name):
    assert filled(PAGES[name]) == PAGES[name], "python tools/pages.py"


def test_pages_with_generated_parts():
    assert {*GENERATED} == {"diagnosis", "doctor", "field-guide", "metrics", "plan", "settings", "upstream"}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("metrics", METRICS),
        ("diagnosis", [*CAUSES, *RULES]),
        ("doctor", CHECKS),
        ("upstream", [change.name for change in (*TABLE, *cpu.TABLE)]),
    ],
)
def test_a_table_has_every_name(page, names):
    shown = re.findall(r"^\| (?:`([^`]+)`|\[(\w+)\])", PAGES[page], flags=re.MULTILINE)
    assert {*names} <= {code or link for code, link in shown}
