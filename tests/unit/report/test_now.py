"""A metric has one value now in the whole report, the median of its last five readings, and each number says what it
is of."""

import html
import io
import json
import re
from statistics import median

import pytest
from rich.console import Console

from tests import ROOT
from tests.unit.report.made_runs import event, full, make
from verl_ext.report.figures.panels import PANELS, facts
from verl_ext.report.load import read_run
from verl_ext.report.page import write_report
from verl_ext.report.run import Run
from verl_ext.report.terminal import Dashboard
from verl_ext.report.verdict import judge_run

REWARD, K3, AGREEMENT = "critic/score/mean", "vllm_kl/k3", "router/agreement"
NUMBER = r"(-?[\d.]+(?:e[+-]\d+)?)"
DATA = ROOT / "tests" / "support" / "data"
RECORDED = sorted(DATA.glob("*.json"))
COLLAPSE = ROOT / "recipes" / "collapse" / "runs"
FOLDERS = [
    COLLAPSE / regime / arm / "seed0" for regime, arm in (("stale", "none"), ("stale", "moe"), ("quantized", "none"))
]


def recorded(file) -> Run:
    return make({name: values for name, values in json.loads(file.read_text()).items() if name != "what"})


def oracle(run: Run, name: str) -> float:
    return median(run.get(name).values[-5:].tolist())


def printed(run: Run) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(Dashboard(run, judge_run(run)))
    return console.file.getvalue()


def sentences(run: Run) -> tuple[str, ...]:
    verdict = judge_run(run)
    return (verdict.sentence, *verdict.why, *verdict.evidence)


@pytest.mark.parametrize(
    "run",
    [*map(recorded, RECORDED), *map(read_run, FOLDERS), full()],
    ids=[*(file.stem for file in RECORDED), *("-".join(folder.parts[-3:-1]) for folder in FOLDERS), "made"],
)
def test_verdict_table_and_figure_have_the_same_k3_and_reward(run):
    now = oracle(run, K3)
    (row,) = [line for line in printed(run).splitlines() if line.startswith(" engine KL, k3")]
    assert float(row.split()[4]) == pytest.approx(now, rel=0.06)  # two digits, behind three words and the first value
    (panel,) = [panel for panel in PANELS if panel.metric == K3]
    assert float(re.match(f"Now {NUMBER} ", facts(panel, run))[1]) == pytest.approx(now, rel=0.006)
    found = [match[1] for text in sentences(run) for match in re.finditer(rf"\bk3 is {NUMBER}(?![\d.]| times)", text)]
    found += [match[1] for text in sentences(run) for match in re.finditer(rf"\) to {NUMBER} \(", text)]
    assert found and [float(each) for each in found] == pytest.approx([now] * len(found), rel=0.06)
    if run.get(REWARD) is not None:
        (row,) = [line for line in printed(run).splitlines() if line.startswith(" reward ")]
        assert float(row.split()[2]) == pytest.approx(oracle(run, REWARD), abs=6e-4)
        told = [text for text in sentences(run) if "reward" in text and "median of the last" in text]
        values = [float(match[1]) for text in told for match in re.finditer(rf"{NUMBER} \(median of the last", text)]
        assert not told or values[0] == pytest.approx(oracle(run, REWARD), rel=0.06)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 40])
def test_a_number_says_of_how_many_readings_it_is(count):
    values = [1e-3 * 1.1**place for place in range(count)]
    run = make({K3: values, AGREEMENT: [0.9 + value for value in values], REWARD: [0.5 + value for value in values]})
    label = "the last reading" if count == 1 else f"median of the last {min(count, 5)}"
    said = [text for text in sentences(run) if re.search(rf"k3 is {NUMBER}|engines agree on|reward is {NUMBER}", text)]
    assert said and all(label in text for text in said)
    assert all(f"({label})" in facts(panel, run) for panel in PANELS if panel.metric in (K3, AGREEMENT, REWARD))


@pytest.mark.parametrize(
    "metrics",
    [
        {"vllm_kl/prob_diff_mean": [0.07, 0.09] * 8},
        {"correction/dropped": [0.08, 0.2] * 8},
        {"guard/level": [1e-4] * 16},
        {"training/off_policy/trajectory_staleness/mean": [2.0, 3.0] * 8},
        {"guard/boundary": [1e-4] * 16},
        {K3: [2e-2, 3e-2] * 8},
        {K3: [1e-4] * 30 + [0.09] * 16},
    ],
)
def test_every_kind_of_trouble_says_what_its_numbers_are_of(metrics):
    plain = make({K3: [1e-3, 2e-3] * 8})
    new = [text for text in sentences(make({K3: [1e-3, 2e-3] * 8} | metrics)) if text not in sentences(plain)]
    new = [text for text in new if re.search(r"\d", text)]
    assert new and all("median of the last 5" in text or "per step" in text for text in new)


def test_one_odd_reading_moves_no_number_of_now():
    values = [1e-3] * 40
    values[-1] = 0.5
    assert sentences(make({K3: values})) == sentences(make({K3: [1e-3] * 40}))


def test_terminal_and_page_say_what_the_numbers_of_the_causes_are_of(tmp_path):
    run = full()
    assert judge_run(run).suspects
    text = printed(run)
    page = write_report(run, judge_run(run), tmp_path, pictures=False).read_text()
    for shown in (text, html.unescape(page)):
        assert "numbers of the causes are means over the last 20 readings" in shown
    assert "causes" not in printed(make({K3: [1e-3] * 40}))
    assert re.search(r"median of the last 5\), [\d,]+ times below", html.unescape(page))


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
    hardly_learns = share > 50
    assert (judge_run(run).state == "past the boundary") == hardly_learns
    numbers = [float(found[1]) for text in sentences(run) for found in re.finditer(r"([\d.]+) % of the updates", text)]
    assert len(numbers) == 1 + hardly_learns and numbers == [share] * len(numbers)
    (note,) = [line for line in printed(run).splitlines() if "guard/skipped" in line]
    assert f" {share:g} % " in note and " 40 steps" in note


def test_a_mark_of_the_figure_says_which_share_of_its_step_was_skipped():
    run = make({K3: [1e-3] * 40, "guard/skipped": [0.0] * 20 + [0.25] + [0.0] * 18 + [1.0]}, [event(40, "skip", "why")])
    (panel,) = [panel for panel in PANELS if panel.metric == K3]
    drawn = json.dumps(panel.chart(run).to_dict())
    assert "25 % of this step's updates" in drawn and "100 % of" not in drawn


def test_no_skipped_update_is_no_finding():
    run = make({K3: [1e-3] * 40, "guard/skipped": [0.0] * 40})
    assert not any("skipped" in text for text in sentences(run))
