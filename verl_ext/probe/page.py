"""The page of a probe, in the style of the report: tables with explanations, and figures over names."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import altair as alt
import numpy as np

from verl_ext.diagnosis.probed import Place
from verl_ext.probe.sweep import LAUNCH, SweepResult, ranked_by_gap
from verl_ext.probe.verdict import ProbeResult
from verl_ext.report.figures.charts import (
    BLUE,
    ORANGE,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    VERMILION,
    chart_data,
    value_axis,
)
from verl_ext.report.figures.panels import Panel
from verl_ext.report.page import write_page

K3 = "k3, nats per token"
PANELS = (
    Panel(
        "states",
        "Hidden states",
        "Relative error from the embedding on, rollout against training. A jump shows the place of a cause; a slow "
        "climb is rounding.",
    ),
    Panel(
        "probability",
        "The gap by probability",
        "k3 between sampling and training, by the token's probability in the rollout. With rounding, most of the gap "
        "is in rare tokens.",
    ),
    Panel(
        "position",
        "The gap by position",
        "k3 between sampling and training, by the token's place in its response. If it climbs, errors compound over "
        "the length.",
    ),
    Panel(
        "sweep",
        "Settings, one changed at a time",
        "k3 with each setting; a bar shows two standard errors to both sides. A setting narrows the gap if its k3 is "
        "below the unchanged launch's and the bars do not overlap.",
    ),
)


def write_probe_page(result: ProbeResult, out: Path) -> Path:
    """Writes `report.html`, `report.png` and the figures to `out`."""
    pair = result.pairs[0]
    charts = (
        states_chart(result.places, result.start),
        bucket_chart(pair.by_probability),
        bucket_chart(pair.by_position),
        sweep_chart(result.sweep),
    )
    context = {
        "title": "Probe: rollout against training",
        "about": f"{result.tokens} tokens in {result.dtype}",
        "notes": [],
        "tables": result.tables(),
        "said": [*result.sentences(), *([f"Next: {result.advice}"] if result.advice else [])],
    }
    drawn = {panel: chart for panel, chart in zip(PANELS, charts, strict=True) if chart is not None}
    return write_page(out, drawn, context)


def states_chart(places: Sequence[Place], start: str) -> alt.LayerChart | None:
    """Draws the relative error at each point, in the order of the computation."""
    points = [(place.point, place.error or 0.0, VERMILION if place.point == start else BLUE) for place in places]
    return _dots(points, "relative error", line=True)


def bucket_chart(buckets: Mapping[str, float]) -> alt.LayerChart | None:
    """Draws k3 of each bucket; returns None for a single bucket, which has all tokens."""
    points = [(name, k3, BLUE) for name, k3 in buckets.items()]
    return _dots(points, K3, line=True) if len(points) > 1 else None


def sweep_chart(swept: Sequence[SweepResult]) -> alt.LayerChart | None:
    """Draws k3 with each changed setting, the smallest first, with two standard errors to both sides."""
    measured = [one for one in ranked_by_gap(swept) if not one.error]
    points = [(one.name or LAUNCH, one.k3, BLUE if one.name else ORANGE) for one in measured]
    return _dots(points, K3, errors={one.name or LAUNCH: 2 * one.k3_error for one in measured})


def _dots(
    points: Sequence[tuple[str, float, str]],
    unit: str,
    *,
    line: bool = False,
    errors: Mapping[str, float] | None = None,
) -> alt.LayerChart | None:
    """Draws (name, value, colour) over the names, on a logarithmic axis, without values of 0; None if all are 0."""
    drawn = [point for point in points if point[1] > 0]
    if not drawn:
        return None
    values = [
        {
            "name": name,
            "value": value,
            "colour": colour,
            "low": max(value - (errors or {}).get(name, 0.0), value / 10),
            "high": value + (errors or {}).get(name, 0.0),
        }
        for name, value, colour in drawn
    ]
    axis = alt.Axis(labelAngle=-40, labelLimit=140, labelOverlap=False)
    x = alt.X("name:N", title=None, sort=[name for name, *_ in points], axis=axis)
    y = value_axis(np.array([value for _, value, _ in drawn]), unit=unit)
    tooltip = [alt.Tooltip("name:N", title="at"), alt.Tooltip("value:Q", format=".2e", title=unit)]
    base = alt.Chart(chart_data(values)).encode(x=x, y=y)
    colour = alt.Color("colour:N", scale=None)
    layers = [base.mark_line(color=BLUE, opacity=0.4)] if line else []
    if errors:
        layers.append(base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q"), y2="high:Q", color=colour))
    layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(color=colour, tooltip=tooltip))
    return alt.layer(*layers).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT)
