"""Reports as a user reads them, kept as text. VERL_EXT_RENEW_GOLDEN=1 writes them again; read the difference."""

import os
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.report.shown import printed
from verl_ext.report.load import read_run
from verl_ext.report.sources import form_rows
from verl_ext.report.terminal import Dashboard
from verl_ext.report.verdict import judge_run

FOLDER = Path(__file__).parent / "golden"
PAGE = ROOT / "docs" / "report.md"
SAMPLE = ROOT / "recipes" / "collapse" / "runs" / "stale" / "none" / "seed0"
RUNS = {
    "healthy": "C10",
    "collapsed": "C15",
    "broken_engines": "L10",
    "growing_gap": "C01-metrics60",
    "not_a_number": "C25",
    "dead": "C18",
}


def report(path: Path) -> str:
    run = read_run(path)
    text = printed(Dashboard(run, judge_run(run)), 100, color_system=None)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def table_of_forms() -> str:
    rows = []
    for title, example, remarks in form_rows():
        examples = ", ".join(f"`{each}`" for each in example.split(", "))
        rows.append(" | ".join([title, examples, remarks.replace("|", "\\|")]))
    return "".join(f"| {row} |\n" for row in rows)


def expect(file: Path, text: str, before: str = "", behind: str = "") -> None:
    """Compares a text with a file, or with the part of it between two texts. Renews the file if that is asked for."""
    kept = file.read_text(encoding="utf-8") if file.exists() else ""
    start = kept.index(before) + len(before)
    end = kept.index(behind, start) if behind else len(kept)
    if os.environ.get("VERL_EXT_RENEW_GOLDEN"):
        file.write_text(kept[:start] + text + kept[end:], encoding="utf-8")
    else:
        assert kept[start:end] == text


@pytest.mark.parametrize("name", RUNS)
def test_a_report_reads_as_it_did(name):
    expect(FOLDER / f"{name}.txt", report(ROOT / "tests" / "cases" / "field" / f"{RUNS[name]}.csv"))


def test_there_is_no_other_golden_report():
    assert {file.stem for file in FOLDER.glob("*")} == set(RUNS)


def test_the_page_of_the_docs_shows_what_the_command_says():
    expect(PAGE, report(SAMPLE), "([recipes/collapse](../recipes/collapse)):\n\n```\n", "```\n")


def test_the_page_of_the_docs_lists_every_form_that_is_read():
    expect(PAGE, table_of_forms(), "| form | RUN | remarks |\n|---|---|---|\n", "| a folder | `.` |")
