"""A collapsed run is described in the same words and order on the terminal, the page and in a comparison."""

import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from tests import ROOT
from tests.unit.report.made_runs import make
from verl_ext.report.comparison import ComparisonTable, compare_runs
from verl_ext.report.load import read_run
from verl_ext.report.page import write_report
from verl_ext.report.run import Run
from verl_ext.report.signals import fall_of
from verl_ext.report.terminal import Dashboard
from verl_ext.report.verdict import judge_run

DATA = ROOT / "tests" / "support" / "data"


def recorded(name: str) -> Run:
    values = {key: each for key, each in json.loads((DATA / f"{name}.json").read_text()).items() if key != "what"}
    return replace(make(values), name=name)


DEAD = recorded("collapsed_lr_1e-2")
WORDS, VERDICT = str(fall_of(DEAD)), judge_run(DEAD)
ORDER = (WORDS, *VERDICT.why, VERDICT.first.text, VERDICT.first.sentence, *(other.text for other in VERDICT.others))
STALE = read_run(ROOT / "recipes" / "collapse" / "runs" / "stale" / "none" / "seed0")


def printed(renderable) -> str:
    """Returns what a terminal prints, on one line: a terminal wraps."""
    console = Console(width=80, file=io.StringIO())
    console.print(renderable)
    return " ".join(console.file.getvalue().split())


def in_order(text: str, parts: Sequence[str]) -> bool:
    at = [text.find(part) for part in parts]
    return -1 not in at and at == sorted(at)


def test_the_terminal():
    text = printed(Dashboard(DEAD, VERDICT))
    assert f"collapsed_lr_1e-2, step 100: collapsed {WORDS} {VERDICT.why[0]}" in text
    assert in_order(text, ORDER) and "Do this first: start the run again with actor_rollout_ref.actor.optim.lr" in text


def test_the_terminal_on_a_recorded_run():
    """The text starts with the event, the warning, the cause and one action; other causes, evidence, table follow."""
    verdict = judge_run(STALE)
    parts = (
        "seed0, step 120: collapsed The run collapsed at step 81: the reward fell from 0.51 to 0.25",
        "The guard's forecast warned at step 9, and k3 passed 0.1 at step 14: 53 and 48 steps before",
        "The likely cause is the age of the rollouts.",
        "Do this first: start the run again with stability=moe stability.batch_skip.threshold=null trainer.resume_",
        "Then: - trainer.v1.trainer_mode=sync",
        "- stability.metrics=true",
        "Further findings: - k3 is 95 times",
        "step 1 to 120",
    )
    assert in_order(printed(Dashboard(STALE, verdict)), parts)


def test_a_healthy_run_has_nothing_to_do_first():
    healthy = recorded("noisy_lr_3e-3")
    text = printed(Dashboard(healthy, judge_run(healthy)))
    assert "Do this first" not in text and "Worth adding: - stability.metrics=true" in text


@pytest.mark.slow
def test_the_page(tmp_path):
    page = write_report(DEAD, VERDICT, tmp_path, pictures=False).read_text()
    said = " ".join(html.unescape(re.sub(r"<[^>]*>", "", page)).split())
    assert in_order(said, ORDER) and 'class="verdict collapsed"' in page
    assert re.search(r"\.verdict\.collapsed \{[^}]*--bad", page), "and has a colour"


def test_a_comparison():
    healthy = recorded("noisy_lr_3e-3")
    found = compare_runs([healthy, DEAD])
    assert found.notes[0].startswith(f"collapsed_lr_1e-2: {WORDS} Also moved: the gradient norm (0.44 to 0.9, from")
    assert found.notes[0] in printed(ComparisonTable(found))
    assert not any("noisy_lr_3e-3: The run collapsed" in note for note in found.notes)
    assert f": {WORDS}" in compare_runs([make({"own": [1.0] * 20}), DEAD]).notes[0], "of the whole run"
