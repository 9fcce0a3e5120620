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

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.names import K3
from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.charts import (
    LINE_COLOURS,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    Line,
    chart_data,
    chart_rows,
    drawable,
    interval_means,
    line_chart,
    step_edges,
)
from verl_ext.report.figures.columns import OTHER_STAGE, STAGES, stage_seconds
from verl_ext.report.run import Run, validation_label
from verl_ext.report.seeds import Lines

END_READINGS = 20  # readings whose median represents a run's end in figures without steps
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))  # of lines beyond the colours, else of the validation sets
POINTS = 60  # points of the mean of several seeds, each the mean of some steps
MOST_THIN = 15  # lines of single seeds in a figure
BAND, THIN = 0.12, 0.35  # opacity

Look = tuple[str, tuple[int, ...]]  # colour, dash


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


def bucket_overlay(axis: str, title: str) -> Callable[[Lines], alt.LayerChart | None]:
    """Draws k3 of each bucket at the ends of the runs; `title` says what the buckets are."""

    def chart(lines: Lines) -> alt.LayerChart | None:
        found = _means(lines, lambda run: _ends(run.parts(K3, f"{axis}/")))
        return _profile(found, BUCKETS[axis], title, alt.Scale(type="log"), "~e")

    return chart


def layer_overlay(metric: str, axis_format: str) -> Callable[[Lines], alt.LayerChart | None]:
    """Draws `metric/layer_*` of each layer at the ends of the runs."""

    def chart(lines: Lines) -> alt.LayerChart | None:
        found = _means(lines, lambda run: _ends(run.layers(metric)))
        layers = sorted({int(layer) for profile in found.values() for layer in profile})
        return _profile(found, [str(layer) for layer in layers], "layer", alt.Scale(zero=False), axis_format)

    return chart


def stage_overlay(lines: Lines) -> alt.LayerChart | None:
    stages = [*dict.fromkeys(name for name, _ in STAGES.values()), OTHER_STAGE[0]]
    seconds = _means(lines, stage_seconds)
    return _profile(seconds, stages, "stage of a step", alt.Scale(zero=True), ".6~g", "seconds")


def _means(lines: Lines, values_of: Callable[[Run], Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the values of each line: of each of its runs, or their means."""
    found = {name: [values_of(run) for run in runs] for name, runs in lines.items()}
    return {
        name: {
            place: float(np.mean([values[place] for values in each if place in values]))
            for place in dict.fromkeys(place for values in each for place in values)
        }
        for name, each in found.items()
    }


def _ends(parts: Mapping[Any, Series]) -> dict[str, float]:
    return {str(part): float(np.median(series.values[-END_READINGS:])) for part, series in parts.items()}


def _profile(
    values: Mapping[str, Mapping[str, float]],
    order: Sequence[str],
    title: str,
    scale: alt.Scale,
    axis_format: str,
    unit: str = "",
) -> alt.LayerChart | None:
    """Draws the lines over ordered places, at the runs' ends; a logarithmic scale leaves out values of 0."""
    log = getattr(scale, "type", None) == "log"
    points = [
        {"run": name, "place": place, "value": profile[place]}
        for name, profile in values.items()
        for place in order
        if place in profile and (profile[place] > 0 or not log)
    ]
    if not points:
        return None
    used = [place for place in order if any(point["place"] == place for point in points)]
    names = [name for name in values if any(point["run"] == name for point in points)]
    looks = line_looks([*values])
    base = alt.Chart(chart_data(points)).encode(
        x=alt.X(
            "place:O",
            sort=used,
            title=title,
            axis=alt.Axis(labelAngle=0, labelOverlap=True, labelExpr="split(datum.label, ' ')"),
        ),
        y=alt.Y("value:Q", title=unit or None, scale=scale, axis=alt.Axis(format=axis_format)),
        color=alt.Color("run:N", scale=alt.Scale(domain=names, range=[looks[name][0] for name in names])),
        tooltip=["run:N", "place:N", alt.Tooltip("value:Q", format=".4~g")],
    )
    dashes = alt.Scale(domain=names, range=[list(looks[name][1]) or [1, 0] for name in names])
    stroke = base.mark_line(strokeWidth=2, strokeJoin="round").encode(strokeDash=alt.StrokeDash("run:N", scale=dashes))
    marks = stroke, base.mark_point(filled=True, size=50, opacity=1)
    return alt.layer(*marks).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT)
