"""What the pages name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
ROOMS = "verl_ext|configs|docs|recipes|requirements|tests|tools"
NAMED = re.compile(rf"`(?!\S*NAME)((?:{ROOMS})/[\w/.-]+\.\w+)(?:::(\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_tests_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    for file, test in NAMED.findall(text):
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
