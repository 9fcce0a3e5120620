"""Reports as a user reads them, kept as text. VERL_EXT_RENEW_GOLDEN=1 writes them again; read the difference."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from tests import ROOT
from verl_ext.report.load import read_run
from verl_ext.report.terminal import Dashboard
from verl_ext.report.verdict import judge_run

FOLDER = Path(__file__).parent / "golden"
RUNS = {
    "healthy": "C10",
    "collapsed": "C15",
    "broken_engines": "L10",
    "growing_gap": "C01-metrics60",
    "not_a_number": "C25",
    "dead": "C18",
}


def report(case: str) -> str:
    run = read_run(ROOT / "tests" / "cases" / "field" / f"{case}.csv")
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(Dashboard(run, judge_run(run)))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


@pytest.mark.parametrize("name", RUNS)
def test_a_report_reads_as_it_did(name):
    file, said = FOLDER / f"{name}.txt", report(RUNS[name])
    if os.environ.get("VERL_EXT_RENEW_GOLDEN"):
        file.write_text(said, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == said


def test_there_is_no_other_golden_report():
    assert {file.stem for file in FOLDER.glob("*")} == set(RUNS)
