import math
import re

import numpy as np
import pytest

from tests import ROOT
from tests.unit.report.made_files import train, write
from tests.unit.report.made_stores import wandb_run
from verl_ext.report import frame
from verl_ext.report.frame import load_run
from verl_ext.report.run import ReportError


def test_a_row_a_step_and_a_column_a_metric(tmp_path):
    file = write(tmp_path / "run.jsonl", [(1, {"a": 1, "b/c": 2}), (3, {"a": None}), (7, {"a": 1e200, "val/x": 5})])
    found = load_run(file)
    assert (found.index.name, found.index.tolist(), found.index.dtype) == ("step", [1, 3, 7], np.int64)
    assert found.columns.tolist() == ["a", "b/c", "val/x"] and (found.dtypes == np.float64).all()
    np.testing.assert_array_equal(found["a"], [1, math.nan, math.inf])
    np.testing.assert_array_equal(found["b/c"], [2, math.nan, math.nan])
    np.testing.assert_array_equal(found["val/x"], [math.nan, math.nan, 5])
    assert found.attrs == {"name": "run", "sources": [str(file)], "notes": []}


def test_which_run(tmp_path):
    file = write(tmp_path / "run.jsonl", [*train(1, 2, 3), *train(1, 2)])
    assert load_run(str(file)).index.tolist() == [1, 2]
    assert load_run(f"{file}:1").index.tolist() == load_run(file, run=1).index.tolist() == [1, 2, 3]
    assert "the file holds 2 runs" in load_run(file).attrs["notes"][0]


def test_no_run_and_a_frame_beyond_memory(tmp_path, monkeypatch):
    with pytest.raises(ReportError, match="no such file or folder"):
        load_run(tmp_path / "nothing")
    monkeypatch.setattr(frame, "MOST_CELLS", 5)
    with pytest.raises(ReportError, match="a frame of 3 steps and 2 metrics has too many cells"):
        load_run(write(tmp_path / "run.jsonl", [(1, {"a": 1}), (2, {"b": 1}), (3, {"b": 1})]))


def test_the_example_of_the_page(tmp_path, monkeypatch):
    """All but the picture, for which pandas wants a package more."""
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    metrics = {"critic/score/mean": 0.5, "actor/entropy": 0.1}
    rows = [(step, {"vllm_kl/k3": step / 100, **metrics}) for step in range(1, 20)]
    wandb_run(tmp_path / "wandb", rows)
    monkeypatch.chdir(tmp_path)
    assert code.count(".plot()") == 1
    found: dict = {}
    exec(code.replace(".plot()", ""), found)
    assert found["run"]["vllm_kl/k3"].rolling(10).median().iloc[-1] == pytest.approx(0.145)
    assert found["run"].index.tolist() == list(range(1, 20))
