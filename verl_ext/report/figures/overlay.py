"""The figures of several runs in one, one colour per run: a metric over the steps, or the ends of the runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.names import K3
from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.charts import LINE_COLOURS, PLOT_HEIGHT, PLOT_WIDTH, Line, chart_data, line_chart
from verl_ext.report.figures.columns import OTHER_STAGE, STAGES, stage_seconds
from verl_ext.report.run import Run, validation_label

END_READINGS = 20  # readings whose median represents a run's end in figures without steps
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))  # of the validation sets of a run

Runs = Mapping[str, Run]  # by the name in the legend


def metric_overlay(metric: str, runs: Runs, **axis: Any) -> alt.LayerChart | None:
    """Draws a metric of all runs that have it; None if none has it. `axis` has the options of `line_chart`."""
    lines = [
        Line(name, series, colour)
        for (name, run), colour in zip(runs.items(), LINE_COLOURS, strict=False)
        if (series := run.get(metric)) is not None
    ]
    return line_chart(lines, _span(runs), **axis)


def _span(runs: Runs) -> tuple[int, int]:
    return min(run.span[0] for run in runs.values()), max(run.span[1] for run in runs.values())


def validation_overlay(runs: Runs) -> alt.LayerChart | None:
    names = sorted({name for run in runs.values() for name in run.validations()})[: len(DASHES)]
    lines = [
        Line(f"{label}: {validation_label(name)}" if len(names) > 1 else label, series, colour, dash)
        for (label, run), colour in zip(runs.items(), LINE_COLOURS, strict=False)
        for name, dash in zip(names, DASHES, strict=False)
        if (series := run.get(name)) is not None
    ]
    return line_chart(lines, _span(runs))


def bucket_overlay(axis: str, title: str) -> Callable[[Runs], alt.LayerChart | None]:
    """Draws k3 of each bucket at the ends of the runs; `title` says what the buckets are."""

    def chart(runs: Runs) -> alt.LayerChart | None:
        found = {name: _ends(run.parts(K3, f"{axis}/")) for name, run in runs.items()}
        return _profile(found, BUCKETS[axis], title, alt.Scale(type="log"), "~e")

    return chart


def layer_overlay(metric: str, axis_format: str) -> Callable[[Runs], alt.LayerChart | None]:
    """Draws `metric/layer_*` of each layer at the ends of the runs."""

    def chart(runs: Runs) -> alt.LayerChart | None:
        found = {name: _ends(run.layers(metric)) for name, run in runs.items()}
        layers = sorted({int(layer) for profile in found.values() for layer in profile})
        return _profile(found, [str(layer) for layer in layers], "layer", alt.Scale(zero=False), axis_format)

    return chart


def stage_overlay(runs: Runs) -> alt.LayerChart | None:
    stages = [*dict.fromkeys(name for name, _ in STAGES.values()), OTHER_STAGE[0]]
    seconds = {name: stage_seconds(run) for name, run in runs.items()}
    return _profile(seconds, stages, "stage of a step", alt.Scale(zero=True), ".6~g", "seconds")


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
    """Draws one line per run over ordered places, at the runs' ends; a logarithmic scale leaves out values of 0."""
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
    colours = dict(zip(values, LINE_COLOURS, strict=False))
    base = alt.Chart(chart_data(points)).encode(
        x=alt.X(
            "place:O",
            sort=used,
            title=title,
            axis=alt.Axis(labelAngle=0, labelOverlap=True, labelExpr="split(datum.label, ' ')"),
        ),
        y=alt.Y("value:Q", title=unit or None, scale=scale, axis=alt.Axis(format=axis_format)),
        color=alt.Color("run:N", scale=alt.Scale(domain=names, range=[colours[name] for name in names])),
        tooltip=["run:N", "place:N", alt.Tooltip("value:Q", format=".4~g")],
    )
    marks = base.mark_line(strokeWidth=2, strokeJoin="round"), base.mark_point(filled=True, size=50, opacity=1)
    return alt.layer(*marks).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT)
