"""A run in a notebook."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ext.report.load import read_run
from verl_ext.report.run import ReportError

if TYPE_CHECKING:
    import pandas as pd

MOST_CELLS = 1 << 28  # 2 GiB; a run of 10,000 steps with 500 metrics has 5 million


def load_run(path: str | Path, run: int | None = None) -> "pd.DataFrame":
    """The metrics of a run as a pandas frame: whatever `verl-ext report` reads, as it is on disk now.

    Args:
        path: a file or folder of verl's file logger, W&B, MLflow or TensorBoard; PATH:N is the Nth of several runs.
        run: that number, counted from 1; the last by default.

    Returns:
        Index `step` (int64, ascending), a column of float64 for each metric, by the name under which it was logged.
        NaN where a step did not log it, or logged no number; infinite beyond 1e100. `attrs` has the `name` of the run,
        its `sources` (files), and `notes`: what was left out of them, and which other runs are there.

    Raises:
        ReportError: there is no run that can be read, or more cells than a frame should have; one line says which.
    """
    import pandas as pd

    found = read_run(Path(path), run)
    if found.steps.size * len(found.metrics) > MOST_CELLS:
        raise ReportError(
            f"{path}: a frame of {found.steps.size} steps and {len(found.metrics)} metrics has too many cells; "
            "verl_ext.report.load.read_run gives each metric with the steps that logged it"
        )
    cells = np.full((len(found.metrics), found.steps.size), np.nan)
    for row, series in zip(cells, found.metrics.values(), strict=True):
        row[np.searchsorted(found.steps, series.steps)] = series.values
    frame = pd.DataFrame(cells.T, index=pd.Index(found.steps, name="step"), columns=list(found.metrics))
    frame.attrs = {"name": found.name, "sources": [str(file) for file in found.sources], "notes": list(found.notes)}
    return frame
