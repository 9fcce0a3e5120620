"""Runs in a notebook: the output of `verl-ext report` and `verl-ext compare`, as objects that a cell displays.

The code that draws is imported when a figure is requested; `load_run` works without the packages of the `report` extra.
"""

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.base.errors import missing_package
from verl_ext.report.load import read_run
from verl_ext.report.run import ReportError, Run
from verl_ext.report.terminal import Dashboard
from verl_ext.report.verdict import RunVerdict, judge_run

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd
    from rich.console import Console, RenderableType

    from verl_ext.report.comparison import Comparison
    from verl_ext.report.figures.panels import Panel
    from verl_ext.report.trajectories import Trajectory

MOST_CELLS = 1 << 28  # 2 GiB; a run of 10,000 steps with 500 metrics has 5 million
TEXT_COLUMNS = 100  # of the text output
IFRAME = '<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'
TEXT = '<pre style="line-height: 1.3; white-space: pre">{code}</pre>'


def load_run(path: str | Path, run: int | None = None) -> "LoadedRun":
    """Loads a run from disk: everything that `verl-ext report` reads.

    Args:
        path: a file or folder of verl's file logger, W&B, MLflow or TensorBoard; PATH:N is the Nth of several runs.
        run: the number N, counted from 1; the last by default.

    Raises:
        ReportError: there is no run that can be read; one line says why.
    """
    return LoadedRun(read_run(Path(path), run))


def compare(
    *runs: "LoadedRun", joined: "Mapping[str, Sequence[LoadedRun]] | None" = None, **options: Any
) -> "ComparedRuns":
    """Compares the ends of runs with the first one's; `joined` and the options are those of `comparison.compare_runs`:
    `extra`, `window`, `cut`, `apart`."""
    with _extra_packages():
        from verl_ext.report.comparison import compare_runs

        lines = {name: [loaded.run for loaded in line] for name, line in (joined or {}).items()}
        return ComparedRuns(compare_runs([loaded.run for loaded in runs], joined=lines, **options))


class _Shown(ABC):
    """An object that a cell displays as the command's text, in colour; `print` and a terminal leave the colour out."""

    @abstractmethod
    def _renderable(self) -> "RenderableType":
        """Returns the object that rich prints."""

    def _console(self) -> "Console":
        from rich.console import Console

        # Otherwise, in a notebook, rich writes into the cell too.
        console = Console(file=io.StringIO(), width=TEXT_COLUMNS, record=True, force_jupyter=False)
        console.print(self._renderable())
        return console

    def __repr__(self) -> str:
        return self._console().export_text()

    def _repr_html_(self) -> str:
        return self._console().export_html(inline_styles=True, code_format=TEXT)


@dataclass(frozen=True, eq=False, repr=False)
class LoadedRun(_Shown):
    """One run; a cell displays the verdict, what to do, and the table of metrics."""

    run: Run

    def _renderable(self) -> "RenderableType":
        return Dashboard(self.run, self.verdict)

    @cached_property
    def verdict(self) -> RunVerdict:
        return judge_run(self.run)

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Returns the metrics as a pandas frame.

        The index is `step` (int64, ascending). Each metric is a column of float64 under the name by which it was
        logged: NaN if a step did not log it, or logged no number; infinite beyond 1e100. `attrs` has the `name` of the
        run, its `sources` (files), and `notes`: parts that were left out, and other runs in the files.

        Raises:
            ReportError: a frame would have too many cells.
        """
        with _extra_packages():
            import pandas as pd

        run = self.run
        if run.steps.size * len(run.metrics) > MOST_CELLS:
            raise ReportError(
                f"{run.name}: a frame of {run.steps.size} steps and {len(run.metrics)} metrics has too many cells; "
                "verl_ext.report.load.read_run gives each metric with the steps that logged it"
            )
        cells = np.full((len(run.metrics), run.steps.size), np.nan)
        for row, series in zip(cells, run.metrics.values(), strict=True):
            row[np.searchsorted(run.steps, series.steps)] = series.values
        frame = pd.DataFrame(cells.T, index=pd.Index(run.steps, name="step"), columns=list(run.metrics))
        frame.attrs = {"name": run.name, "sources": [str(file) for file in run.sources], "notes": list(run.notes)}
        return frame

    def figure(self, key: str) -> "alt.LayerChart":
        """Returns the report's figure of this key: `reward`, `vllm_kl`, `dropped`, ... ReportError without data."""
        return _figure(key, lambda panel: panel.chart(self.run))

    @cached_property
    def trajectories(self) -> "list[Trajectory]":
        """The trajectories that the run wrote, by step. ReportError if it wrote none."""
        with _extra_packages():
            from verl_ext.report.folder import read_own
            from verl_ext.report.trajectories import REMEDY, trajectories_file

            if (dump := trajectories_file(self.run.sources[0])) is None:
                raise ReportError(f"{self.run.sources[0]}: no trajectories next to this file; {REMEDY}")
            return read_own(self.run, dump)[0]

    def tokens(self, number: int = -1) -> "TokenView":
        """Returns one of `trajectories`, token by token; the last by default."""
        return TokenView(self.run.name, self.trajectories[number])


@dataclass(frozen=True, eq=False, repr=False)
class ComparedRuns(_Shown):
    """Compared runs; a cell displays the table of `verl-ext compare` and its notes."""

    comparison: "Comparison"

    def _renderable(self) -> "RenderableType":
        from verl_ext.report.comparison import ComparisonTable

        return ComparisonTable(self.comparison)

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Returns the table as a pandas frame of texts: a row per metric; each run's `value`, `change`, `verdict`."""
        with _extra_packages():
            import pandas as pd

        rows = self.comparison.rows
        texts = {
            (name, part): [getattr(cells[place], part) for _, cells in rows]
            for place, name in enumerate(self.comparison.lines)
            for part in (("value", "change", "verdict") if place else ("value",))
        }
        return pd.DataFrame(texts, index=[metric.name for metric, _ in rows])

    def figure(self, key: str) -> "alt.LayerChart":
        """Returns the report's figure of this key, with all runs in it. ReportError if no run has such data."""
        return _figure(key, lambda panel: panel.chart_of_all(self.comparison.lines))


@dataclass(frozen=True)
class TokenView:
    """One trajectory; a cell displays the report's page of it, coloured by |log k|, with every number on hover."""

    run: str
    trajectory: "Trajectory"

    def _repr_html_(self) -> str:
        from verl_ext.report.trajectories import write_trajectory_page

        with TemporaryDirectory() as folder:
            page = write_trajectory_page([self.trajectory], Path(folder) / "page.html", title=self.run)
            return IFRAME.format(page=html.escape(page.read_text(encoding="utf-8")))


def _figure(key: str, draw: "Callable[[Panel], alt.LayerChart | None]") -> "alt.LayerChart":
    """Returns the figure of this key with its title and the look of the page; ReportError if there is none."""
    with _extra_packages():
        from verl_ext.report.figures.charts import VEGA_CONFIG
        from verl_ext.report.figures.panels import PANELS

        panels = {panel.key: panel for panel in PANELS}
        if key not in panels:
            raise ReportError(f"there is no figure {key!r}; choose one of: {', '.join(panels)}")
        panel = panels[key]
        if (chart := draw(panel)) is None:
            raise ReportError(f"{key}: {panel.missing}" + (f" Add {panel.override}" if panel.override else ""))
        return chart.properties(title=panel.title).configure(**VEGA_CONFIG)


@contextmanager
def _extra_packages() -> Iterator[None]:
    """Turns the error for a missing package into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ReportError(missing_package(error)) from error
