"""A dead run is told of in the same words on the terminal, the page and in a comparison; in the run: test_forecast."""

import html
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests import ROOT
from tests.unit.report.made_runs import make
from verl_ext.report.comparison import compare_runs
from verl_ext.report.comparison_text import comparison_table
from verl_ext.report.page import write_report
from verl_ext.report.reward import collapse_of
from verl_ext.report.run import Run
from verl_ext.report.terminal import dashboard
from verl_ext.report.verdict import judge

DATA = ROOT / "tests" / "support" / "data"


def recorded(name: str) -> Run:
    values = {key: each for key, each in json.loads((DATA / f"{name}.json").read_text()).items() if key != "what"}
    return replace(make(values), name=name)


DEAD = recorded("collapsed_lr_1e-2")
WORDS, VERDICT = str(collapse_of(DEAD)), judge(DEAD)


def printed(renderable) -> str:
    """On one line: a terminal wraps."""
    console = Console(width=80, file=io.StringIO())
    console.print(renderable)
    return " ".join(console.file.getvalue().split())


def test_the_terminal():
    text = printed(dashboard(DEAD, VERDICT))
    assert f"collapsed_lr_1e-2, step 100: collapsed The run is dead. {collapse_of(DEAD).remedy} - {WORDS}" in text
    assert "try actor_rollout_ref.actor.optim.lr=1e-06" in text


@pytest.mark.slow
def test_the_page(tmp_path):
    page = write_report(DEAD, VERDICT, tmp_path, pictures=False).read_text()
    said = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert WORDS in said and VERDICT.sentence in said and 'class="verdict collapsed"' in page
    assert re.search(r"\.verdict\.collapsed \{[^}]*--bad", page), "and has a colour"


def test_a_comparison():
    healthy = recorded("noisy_lr_3e-3")
    told = compare_runs([healthy, DEAD])
    assert told.notes[0] == f"collapsed_lr_1e-2 has collapsed: {WORDS}" in printed(comparison_table(told))
    assert not any("noisy_lr_3e-3 has collapsed" in note for note in told.notes)
    assert f"has collapsed: {WORDS}" in compare_runs([make({"own": [1.0] * 20}), DEAD]).notes[0], "of the whole run"
