"""The x axes of a page besides the step: when each step was over, and how many tokens were seen by then."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from verl_ext.diagnosis.series import Series
from verl_ext.report.run import Run
from verl_ext.report.seeds import Lines

EPOCH = "_timestamp"  # of W&B, counted from 1970
# The metrics that have the total up to a step, and the one of a single step; the first that a run has is used.
TIME = ("_runtime", EPOCH), "timing_s/step"  # seconds, of W&B; any trainer's duration of a step
TOKENS = ("num_tokens", "progress/total_tokens"), "perf/total_num_tokens"  # of TRL, prime-rl; verl's of a batch
UNITS = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
FEWEST_UNITS = 3  # of the largest that is used
MOST_POINTS = 200  # of a clock; between them, time runs evenly


def page_clocks(lines: Lines) -> list[dict[str, Any]]:
    """Returns the clocks that all runs have: what the page calls one, its axis, and steps and totals of each line."""
    return [clock for name, source in (("time", TIME), ("tokens", TOKENS)) for clock in _clock(name, source, lines)]


def _clock(name: str, source: tuple[tuple[str, ...], str], lines: Lines) -> Iterator[dict[str, Any]]:
    found = {line: [_total(run, *source) for run in runs] for line, runs in lines.items()}
    totals = {line: [each for each in all_found if each is not None] for line, all_found in found.items()}
    if any(len(totals[line]) < len(all_found) for line, all_found in found.items()):
        return
    longest = max(each.values[-1] for line in totals.values() for each in line)
    unit, size = next((u for u in UNITS if longest >= FEWEST_UNITS * u[1]), UNITS[-1]) if source is TIME else ("", 1)
    points = {}
    for line, clocks in totals.items():
        first, last = max(clock.steps[0] for clock in clocks), min(clock.steps[-1] for clock in clocks)
        steps = np.unique(np.linspace(first, max(first, last), MOST_POINTS).astype(np.int64))
        mean = np.mean([np.interp(steps, clock.steps, clock.values) for clock in clocks], axis=0) / size
        points[line] = [steps.tolist(), [float(f"{value:.6g}") for value in mean]]
    labels = "format(datum.value, '.6~g')" if unit else "replace(format(datum.value, '~s'), 'G', 'B')"
    yield {"name": name, "title": unit or name, "labels": labels, "lines": points}


def _total(run: Run, totals: tuple[str, ...], of_step: str) -> Series | None:
    """Returns the total up to each step; None if the run lacks it, or it does not grow."""
    for name in totals:
        if (series := run.get(name)) is not None and len(series.steps) > 1 and (np.diff(series.values) > 0).all():
            return Series(series.steps, series.values - (series.values[0] if name == EPOCH else 0))
    series = run.get(of_step)
    if series is None or not (series.values > 0).all():
        return None
    start = int(series.steps[0]) - 1  # each reading is that of all steps since the one before
    steps = np.concatenate([[start], series.steps])
    return Series(steps, np.concatenate([[0.0], np.cumsum(series.values * np.diff(steps))]))
