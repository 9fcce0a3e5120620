"""The figures of several runs in one, a colour and a dash per line: a metric over the steps, or the ends of the runs.

The line of several seeds is their mean; its band reaches from the lowest to the highest. Both end where the first of
these runs ended: after that they would cover only the remaining ones.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import altair as alt
import numpy as np

from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.charts import (
    LINE_COLOURS,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    Line,
    Look,
    chart_data,
    chart_rows,
    drawable,
    interval_means,
    line_chart,
    line_look,
    step_edges,
)
from verl_ext.report.run import Run, validation_label
from verl_ext.report.seeds import Lines

END_READINGS = 20  # readings whose median represents a run's end in figures without steps
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))  # of lines beyond the colours, else of the validation sets
POINTS = 60  # points of the mean of several seeds, each the mean of some steps
MOST_THIN = 15  # lines of single seeds in a figure
BAND, THIN = 0.12, 0.35  # opacity


def line_looks(names: Sequence[str], colours: Sequence[str] = LINE_COLOURS) -> dict[str, Look]:
    """Returns a look for each name: other colours first, then other dashes."""
    looks = cycle([(colour, dash) for dash in DASHES for colour in colours])
    return dict(zip(names, looks, strict=False))


def metric_overlay(
    metric: str, lines: Lines, *, looks: Mapping[str, Look] | None = None, log: bool = False, **axis: Any
) -> alt.LayerChart | None:
    """Draws a metric of all lines that have it; None if none has it. `axis` has the options of `line_chart`."""
    looks = looks or line_looks([*lines])
    return _overlay([(name, name, metric, *looks[name]) for name in lines], lines, log=log, **axis)


def validation_overlay(lines: Lines) -> alt.LayerChart | None:
    """Draws the validation sets, each in its dash; only the first if there are more lines than colours."""
    sets = sorted({name for runs in lines.values() for run in runs for name in run.validations()})
    shown = sets[: len(DASHES) if len(lines) <= len(LINE_COLOURS) else 1]
    looks = line_looks([*lines])
    curves = []
    for line in lines:
        for name, dash in zip(shown, DASHES, strict=False):
            label = f"{line}: {validation_label(name)}" if len(shown) > 1 else line
            curves.append((line, label, name, looks[line][0], dash if len(shown) > 1 else looks[line][1]))
    return _overlay(curves, lines)


def _overlay(
    curves: Sequence[tuple[str, str, str, str, tuple[int, ...]]], lines: Lines, *, log: bool = False, **axis: Any
) -> alt.LayerChart | None:
    """Draws curves (line, label, metric, colour, dash); the options are those of `line_chart`."""
    steps = np.unique(np.concatenate([run.steps for runs in lines.values() for run in runs]))
    edges = step_edges(steps, POINTS)
    logged = [[s for run in lines[name] if (s := run.get(metric)) is not None] for name, _, metric, _, _ in curves]
    log = log and any((series.values > 0).any() for found in logged for series in found)
    drawn, bands, thin = [], [], []
    for (name, label, _, colour, dash), all_found in zip(curves, logged, strict=True):
        found = [series for series in all_found if drawable(series, log).steps.size]  # a logarithmic axis has no 0
        if len(found) == 1:
            drawn.append(Line(label, found[0], colour, dash, run=name))
        if len(found) < 2:
            continue
        means = [Series((edges[:-1] + edges[1:] - 1) // 2, interval_means(series, edges)) for series in found]
        all_run = edges[:-1] <= min(run.steps[-1] for run in lines[name])
        spread = seed_spread(np.stack([each.values for each in means]), log=log)
        middle, low, high = (Series(means[0].steps[all_run], values[all_run]).finite() for values in spread)
        if not middle.steps.size:
            continue
        drawn.append(Line(label, middle, colour, dash, dots=False, run=name))
        tops = zip(chart_rows(low, run=name), high.values.tolist(), strict=True)
        band = alt.Chart(chart_data([row | {"high": float(f"{top:.6g}")} for row, top in tops]))
        bands.append(band.mark_area(color=colour, opacity=BAND, clip=True).encode(y2="high:Q"))
        for each in means:
            seed = alt.Chart(chart_data(chart_rows(drawable(each, log), run=name)))
            thin.append(seed.mark_line(color=colour, opacity=THIN, strokeWidth=1, clip=True))
    under = [*bands, *(thin if len(thin) <= MOST_THIN else [])]
    return line_chart(drawn, (int(steps[0]), int(steps[-1])), log=log, under=under, **axis)


def seed_spread(values: np.ndarray, *, log: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, smallest and largest value over the seeds of [seeds, points], ignoring NaN; NaN where all are NaN.

    For a logarithmic axis, only values above 0 count, and the mean is geometric.
    """
    if log:
        values = np.where(values > 0, values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of points where all are NaN
        middle = np.exp(np.nanmean(np.log(values), axis=0)) if log else np.nanmean(values, axis=0)
        return middle, np.nanmin(values, axis=0), np.nanmax(values, axis=0)


def profile_overlay(
    values_of: Callable[[Run], Mapping[Any, float]],
    title: str,
    axis_format: str,
    *,
    order: Sequence[Any] = (),
    unit: str = "",
    **scale: Any,
) -> Callable[[Lines], alt.LayerChart | None]:
    """Draws the values of each line, the mean over its runs, over places such as layers.

    Args:
        order: the places; by default, those that there are, in ascending order.
        scale: options of the axis of the values; a logarithmic one leaves out values of 0.
    """

    def chart(lines: Lines) -> alt.LayerChart | None:
        found = {name: [values_of(run) for run in runs] for name, runs in lines.items()}
        places = order or sorted({place for each in found.values() for values in each for place in values})
        points: list[dict[str, Any]] = [
            {"run": name, "place": str(place), "value": float(np.mean(values))}
            for name, each in found.items()
            for place in places
            if (values := [one[place] for one in each if place in one])
        ]
        points = [point for point in points if point["value"] > 0 or scale.get("type") != "log"]
        if not points:
            return None
        looks = line_looks([*lines])
        base = alt.Chart(chart_data(points)).encode(
            x=alt.X(
                "place:O",
                sort=[*dict.fromkeys(str(place) for place in places)],
                title=title,
                axis=alt.Axis(labelAngle=0, labelOverlap=True, labelExpr="split(datum.label, ' ')"),
            ),
            y=alt.Y("value:Q", title=unit or None, scale=alt.Scale(**scale), axis=alt.Axis(format=axis_format)),
            tooltip=["run:N", "place:N", alt.Tooltip("value:Q", format=".4~g")],
        )
        names = dict.fromkeys(point["run"] for point in points)
        look = line_look("run", {name: looks[name] for name in names})
        stroke = base.mark_line(strokeWidth=2, strokeJoin="round").encode(**look)
        marks = base.mark_point(filled=True, size=50, opacity=1).encode(color=look["color"])
        return alt.layer(stroke, marks).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT)

    return chart


def end_values(parts: Mapping[Any, Series]) -> dict[Any, float]:
    """Returns the values at the end of a run."""
    return {part: float(np.median(series.values[-END_READINGS:])) for part, series in parts.items()}
