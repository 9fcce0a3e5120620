"""Metrics files as verl's file logger writes them."""

import json
import re
from pathlib import Path

import numpy as np

from verl_ext.report.run import Run

Rows = list[tuple[int, dict]]


def write(file: Path, rows: Rows, tail: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows) + tail)
    return file


def train(*steps: int, value: float = 0.0) -> Rows:
    return [(step, {"a": step + value}) for step in steps]


def values(run: Run, name: str = "a") -> dict[int, float]:
    """Returns the readings of a metric by step."""
    series = run.metrics[name]
    assert (np.diff(series.steps) > 0).all()
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def noted(run: Run, *facts: str) -> None:
    """Checks that a run has as many notes, and that each has its fact, a pattern."""
    assert len(run.notes) == len(facts), run.notes
    for note, fact in zip(run.notes, facts, strict=True):
        assert re.search(fact, note), note
