"""A metric has one value now in the whole report, the median of its last five readings, and each number says what it
is of."""

import json
import re
from statistics import median

import pytest

from tests import ROOT
from tests.unit.report.made_runs import event, full, make
from tests.unit.report.shown import printed
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.load import read_run
from verl_ext.report.run import Run
from verl_ext.report.terminal import Dashboard, dashboard_rows
from verl_ext.report.verdict import REASONS, judge_run

REWARD, K3, AGREEMENT = "critic/score/mean", "vllm_kl/k3", "router/agreement"
NUMBER = r"(-?\d[\d.]*(?:e[+-]\d+)?)"
RECORDED = sorted((ROOT / "tests" / "support" / "data").glob("*.json"))
FOLDERS = sorted((ROOT / "recipes" / "collapse" / "runs").glob("*/*/seed0"))
FIELD = [ROOT / "tests" / "cases" / "field" / f"{name}.csv" for name in ("C01-metrics60", "C10", "L10", "R15", "R40")]


def recorded(file) -> Run:
    return make({name: values for name, values in json.loads(file.read_text()).items() if name != "what"})


def report(run: Run) -> str:
    return printed(Dashboard(run, judge_run(run)), 200)


def said(run: Run) -> list[str]:
    """The sentence and the facts."""
    verdict = judge_run(run)
    return [verdict.sentence, *(fact.text for fact in verdict.facts)]


@pytest.mark.parametrize(
    "run",
    [*map(recorded, RECORDED), *map(read_run, [*FOLDERS, *FIELD]), full()],
    ids=[*(file.stem for file in [*RECORDED, *FOLDERS, *FIELD]), "made"],
)
def test_sentence_table_and_figure_have_the_same_numbers_of_first_and_now(run):
    text = " ".join(said(run))
    rows = {row.metric: row for row in dashboard_rows(run)}
    for metric, words in ((REWARD, "the reward"), (K3, "k3")):
        series = run.get(metric)
        if series is None:
            continue
        values = series.values.tolist()
        count = min(5, max(len(values) // 2, 1))
        now, first = median(values[-count:]), median(values[:count])
        assert (rows[metric].now, rows[metric].first) == pytest.approx((now, first))
        (panel,) = [panel for panel in PANELS if panel.metric == metric]
        assert float(re.search(f": now {NUMBER} ", panel.facts(run))[1]) == pytest.approx(now, rel=0.006, abs=6e-4)
        last = re.findall(rf"\b{words} (?:is|holds at|stands at) {NUMBER} \(median of the last", text)
        last += re.findall(rf"{words} rose[^;]* to {NUMBER} \(median of the last", text)
        assert [float(each) for each in last] == pytest.approx([now] * len(last), rel=0.06)
        began = re.findall(rf"{words} rose[^;]* from {NUMBER} \(median of the first", text)
        assert [float(each) for each in began] == pytest.approx([first] * len(began), rel=0.06)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 40])
def test_a_number_says_of_how_many_readings_it_is(count):
    values = [1e-3 * 1.1**place for place in range(count)]
    run = make({K3: values, AGREEMENT: [0.9 + value for value in values], REWARD: [0.5 + value for value in values]})
    label = "the last reading" if count < 4 else f"median of the last {min(count // 2, 5)}"
    found = [text for text in said(run) if re.search(rf"k3 is {NUMBER}|engines agree on", text)]
    assert found and all(label in text for text in found)
    assert all(f"({label})" in panel.facts(run) for panel in PANELS if panel.metric in (K3, AGREEMENT, REWARD))


@pytest.mark.parametrize(
    "metrics",
    [
        {"vllm_kl/prob_diff_mean": [0.07, 0.09] * 8},
        {"correction/dropped": [0.08, 0.2] * 8},
        {"guard/level": [1e-4] * 16},
        {"guard/boundary": [1e-4] * 16},
        {K3: [2e-2, 3e-2] * 8},
        {AGREEMENT: [0.9, 0.91] * 8},
    ],
)
def test_every_kind_of_trouble_says_what_its_numbers_are_of(metrics):
    plain = said(make({K3: [1e-3, 2e-3] * 8}))
    new = [text for text in said(make({K3: [1e-3, 2e-3] * 8} | metrics)) if text not in plain]
    assert new and any(re.search(rf"{NUMBER}.*median of the last 5", text) for text in new)


def test_the_reasons_of_a_cause_say_what_their_numbers_are_of():
    """They are means over more readings than the numbers of the table."""
    run = full()
    assert judge_run(run).suspects and REASONS in " ".join(report(run).split())
    assert REASONS not in report(make({REWARD: [0.2 + 0.01 * step for step in range(40)]}))


def test_one_odd_reading_moves_no_number_of_now():
    odd = [1e-3] * 39 + [5e-3]
    assert said(make({K3: odd})) == said(make({K3: [1e-3] * 40}))


# Steps with several updates: verl logs the mean over them, so guard/skipped is a share.


def refusing(pattern: list[int], steps: int = 40) -> list[float]:
    """Shares of each step's updates, of which `pattern` repeats: 1 is an update that was refused."""
    updates = pattern * 4 * steps
    return [sum(updates[4 * step : 4 * step + 4]) / 4 for step in range(steps)]


@pytest.mark.parametrize(
    ("pattern", "share"),
    [([0, 0, 0, 1], 25), ([0, 1, 0, 1], 50), ([1, 1, 0, 1], 75), ([1], 100), ([0, 0, 0, 0, 0, 0, 0, 1], 12.5)],
)
def test_shares_of_skipped_updates_are_summed_and_never_counted_as_whole(pattern, share):
    run = make({K3: [1e-3] * 40, "guard/skipped": refusing(pattern)})
    verdict = judge_run(run)
    assert (verdict.state == "past the boundary") == (share > 50)
    told = {fact.name: fact.text for fact in verdict.facts}
    numbers = [float(found[1]) for text in told.values() for found in re.finditer(r"([\d.]+) % of the updates", text)]
    assert numbers == [share] and ("hardly learns" in told["updates_skipped"]) == (share > 50)
    (note,) = [line for line in report(run).splitlines() if "guard/skipped" in line]
    assert f" {share:g} % " in note and " 40 steps" in note


def test_a_mark_of_the_figure_says_which_share_of_its_step_was_skipped():
    run = make({K3: [1e-3] * 40, "guard/skipped": [0.0] * 20 + [0.25] + [0.0] * 18 + [1.0]}, [event(40, "skip", "why")])
    (panel,) = [panel for panel in PANELS if panel.metric == K3]
    drawn = json.dumps(panel.chart(run).to_dict())
    assert "25 % of this step's updates" in drawn and "100 % of" not in drawn


def test_no_skipped_update_is_no_fact():
    run = make({K3: [1e-3] * 40, "guard/skipped": [0.0] * 40})
    assert not any("skipped" in fact.name for fact in judge_run(run).facts)
