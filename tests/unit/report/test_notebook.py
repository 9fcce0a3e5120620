import ast
import math
import re
import shutil
import subprocess
import sys

import altair as alt
import numpy as np
import pandas as pd
import pytest

from tests import ROOT
from tests.unit.report.made_files import train, write
from tests.unit.report.made_trajectories import dump, line
from verl_ext.report import compare, load_run, notebook
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.run import ReportError

PAGE = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
KEPT = "recipes/collapse/runs/stale"
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(["altair", "vl_convert", "jinja2", "PIL", "scipy", "torch"])  # an import of them fails
from verl_ext.report import compare, load_run
none, opsm = (load_run(f"recipes/collapse/runs/stale/{arm}/seed0") for arm in ("none", "opsm"))
assert none.verdict.state == "collapsed" and none.verdict.sentence[:30] in str(none) and len(none.frame) == 120
for cell in (lambda: none.figure("reward"), lambda: compare(none, opsm)):
    try:
        cell()
    except ValueError as error:
        print(error)
"""


def shown_by(cells, names):
    """Yields what each of these cells displays: the value of each line that is an expression."""
    for cell in cells:
        for statement in ast.parse(cell).body:
            if isinstance(statement, ast.Expr):
                yield eval(ast.unparse(statement), names)
            else:
                exec(ast.unparse(statement), names)


def rows_of(chart):
    """The rows of data of all layers of a chart."""
    return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


def test_a_row_a_step_and_a_column_a_metric(tmp_path):
    file = write(tmp_path / "run.jsonl", [(1, {"a": 1, "b/c": 2}), (3, {"a": None}), (7, {"a": 1e200, "val/x": 5})])
    found = load_run(file).frame
    assert (found.index.name, found.index.tolist(), found.index.dtype) == ("step", [1, 3, 7], np.int64)
    assert found.columns.tolist() == ["a", "b/c", "val/x"] and (found.dtypes == np.float64).all()
    np.testing.assert_array_equal(found["a"], [1, math.nan, math.inf])
    np.testing.assert_array_equal(found["b/c"], [2, math.nan, math.nan])
    np.testing.assert_array_equal(found["val/x"], [math.nan, math.nan, 5])
    assert found.attrs == {"name": "run", "sources": [str(file)], "notes": []}


def test_no_run_and_a_frame_beyond_memory(tmp_path, monkeypatch):
    with pytest.raises(ReportError, match="no such file or folder"):
        load_run(tmp_path / "nothing")
    monkeypatch.setattr(notebook, "MOST_CELLS", 5)
    run = load_run(write(tmp_path / "run.jsonl", [(1, {"a": 1}), (2, {"b": 1}), (3, {"b": 1})]))
    with pytest.raises(ReportError, match="a frame of 3 steps and 2 metrics has too many cells"):
        _ = run.frame


def test_the_cells_of_the_page(tmp_path, monkeypatch):
    for arm in ("none", "opsm"):
        shutil.copytree(ROOT / KEPT / arm / "seed0", tmp_path / KEPT / arm / "seed0")
    write(tmp_path / ".quickstart" / "metrics.jsonl", train(1, 2, 3))
    dump(tmp_path / ".quickstart", [line(1, "oldest"), line(3, "newest")], "metrics.trajectories.jsonl")
    monkeypatch.chdir(tmp_path)
    *cells, numbers = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len([each for cell in cells for each in cell.splitlines() if each]) <= 10
    names: dict = {}

    none, both, rewards, gap, tokens = shown_by(cells, names)
    text = none._repr_html_()
    assert text.startswith("<pre") and "seed0, step 120: collapsed" in text and "Do this first" in text
    assert "seed0, step 120: collapsed" in repr(none) and "<" not in repr(none)
    assert "+0.445" in both._repr_html_() and "a difference counts" in repr(both)
    assert isinstance(rewards, alt.LayerChart) and isinstance(gap, alt.LayerChart)
    assert {row["label"] for row in rows_of(rewards)} == {"none", "opsm"}
    assert [row["step"] for row in rows_of(gap) if row.get("label") == "k3"][:120] == list(range(1, 121))
    frame = tokens._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "&quot;newest&quot;" in frame and "&quot;oldest&quot;" not in frame

    (state, learning, first), medians, tail, verdicts, listed = shown_by([numbers], names)
    assert state == learning == "collapsed" and first.startswith("stability=moe")
    assert isinstance(medians, pd.Series) and medians.index[-1] == 120 and len(tail.columns) == 2
    assert verdicts["critic/score/mean"] == "better"
    assert [(step, why) for step, why, _ in listed] == [(1, "largest gap"), (3, "largest gap")]


def test_the_page_names_every_figure():
    (row,) = re.findall(r"^\| `\.figure\(key\)` \| (.*?)\. A run", PAGE, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [panel.key for panel in PANELS]


def test_a_comparison_as_a_frame_has_texts_for_every_run():
    none, opsm, exact = (load_run(ROOT / KEPT / arm / "seed0") for arm in ("none", "opsm", "exact"))
    found = compare(none, opsm, exact, extra=["vllm_kl/ess"]).frame
    changes = [(name, part) for name in ("opsm", "exact") for part in ("value", "change", "verdict")]
    assert found.columns.tolist() == [("none", "value"), *changes]
    assert found.index[0] == "critic/score/mean" and found.index[-1] == "vllm_kl/ess"
    with pytest.raises(ReportError, match="two runs"):
        compare(none)


def test_what_is_not_there_is_one_line(tmp_path):
    run = load_run(write(tmp_path / "run.jsonl", train(1, 2, 3)))
    with pytest.raises(ReportError, match=r"no figure 'loss'; choose one of: reward, validation, .*step_time$"):
        run.figure("loss")
    with pytest.raises(ReportError, match=r"^vllm_kl: No log-probabilities .* Add stability\.metrics=true$"):
        run.figure("vllm_kl")
    with pytest.raises(ReportError, match=r"^reward: No critic/score/mean: verl logs it"):
        compare(run, run).figure("reward")
    assert compare(run, run).frame.empty
    with pytest.raises(
        ReportError, match=r"no trajectories next to this file; add stability\.trajectories\.per_step=2"
    ):
        run.tokens()


def test_trajectories_of_another_run_are_not_shown(tmp_path):
    file = write(tmp_path / "run.jsonl", [*train(1, 2, 3), *train(1, 2)])
    dump(tmp_path, [line(1, "own"), line(7, "strange")])
    assert [each.key for each in load_run(file).trajectories] == ["own"]
    with pytest.raises(ReportError, match="has only trajectories of the file's last run, which is not this one"):
        _ = load_run(f"{file}:1").trajectories


def test_a_run_is_read_and_judged_without_the_packages_that_draw():
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "altair is not installed, and this needs it: pip install . in the clone of verl_ext",
        "scipy is not installed, and this needs it: pip install . in the clone of verl_ext",
    ]
