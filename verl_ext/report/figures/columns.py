"""Figures with steps as columns: routing by layer, and the shares of a step's time."""

from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np

from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.charts import (
    BLUE,
    CIVIDIS,
    GREEN,
    GRID,
    MUTED,
    ORANGE,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    PURPLE,
    SKY,
    VERMILION,
    chart_data,
    interval_means,
    interval_sums,
    step_axis,
    step_edges,
)
from verl_ext.report.run import Run

OVERLAP = 0.05  # share of a column that overlaps the next: cells drawn edge to edge show hairlines
HEAT_COLUMNS = 120  # of the heat map; a column of a longer run is the mean of its steps
MOST_LAYERS = 12  # numbers on the axis
STEPS = f"round((datum.end - datum.step) / {1 + OVERLAP})"  # of a cell, in Vega's language
SAID = (
    "'layer ' + (datum.layer + 0.5) + ', step ' + (datum.step + 0.5)"
    f" + ({STEPS} > 1 ? ' to ' + (datum.step + {STEPS} - 0.5) : '')"
)
AGREEMENT, LOAD = "router/agreement", "router/load_max"
STEP_TIME = "timing_s/step"
TIME_COLUMNS = 100  # of the shares of a step
LEGEND_COLUMNS = 4  # seven names in one row would be cut
# Stages of verl's timing_s/* that add up to a step, except for the rest of it, and their names here; others are parts
# of these.
STAGES = {
    "gen": ("rollout", BLUE),
    "old_log_prob": ("old log-probs", SKY),
    "ref": ("reference", PURPLE),
    "adv": ("measure, advantages", GREEN),
    "update_actor": ("update", VERMILION),
    "update_weights": ("weight sync", ORANGE),
}
OTHER_STAGE = ("everything else", MUTED)
STAGE_ORDER = [name for name, _ in (*STAGES.values(), OTHER_STAGE)]


def layer_chart(name: str, short: str, sound: float, axis_format: str) -> Callable[[Run], alt.LayerChart | None]:
    """Draws `name/layer_*` over layers and steps; the further from 1, the darker.

    Args:
        short: what the colours mean, in a few words.
        sound: the colours span at least the values from this one to 1: small differences must not look dramatic.
    """

    def chart(run: Run) -> alt.LayerChart | None:
        layers = run.layers(name)
        if not layers:
            return None
        steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
        edges = step_edges(steps, HEAT_COLUMNS)
        means = np.array([interval_means(series, edges) for series in layers.values()])
        values: list[dict[str, Any]] = [  # column by column: a page has equal numbers in a row once
            {
                "step": int(start) - 0.5,
                "end": int(end) - 0.5 + OVERLAP * (int(end) - int(start)),
                "layer": layer - 0.5,
                "value": round(float(mean), 5),
            }
            for start, end, column in zip(edges[:-1], edges[1:], means.T, strict=True)
            for layer, mean in zip(layers, column, strict=True)
            if np.isfinite(mean)
        ]
        furthest = (max if sound > 1 else min)([sound, *(row["value"] for row in values)])
        colour = alt.Color(
            "value:Q",
            scale=alt.Scale(domain=[furthest, 1], range=list(CIVIDIS)),
            legend=alt.Legend(format=axis_format, gradientLength=180, gradientThickness=10, title=short, tickCount=3),
        )
        layer = alt.Y(
            "layer:Q",
            title="layer",
            scale=alt.Scale(domain=[min(layers) - 0.5, max(layers) + 0.5], nice=False, reverse=True),
            axis=alt.Axis(
                format="d", values=sorted(layers)[:: -(-len(layers) // MOST_LAYERS)], labelOverlap=False, grid=False
            ),
        )
        tooltip = [alt.Tooltip("said:N", title="where"), alt.Tooltip("value:Q", format=axis_format, title=short)]
        cells = (
            alt.Chart(chart_data(values))
            .transform_calculate(below="datum.layer + 1", said=SAID)
            .mark_rect(stroke=None)
            .encode(x=_column_axis(edges), x2="end:Q", y=layer, y2="below:Q", color=colour, tooltip=tooltip)
        )
        return alt.layer(cells).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT, view=alt.ViewBackground(fill=GRID))

    return chart


def _timed(run: Run) -> tuple[Series, dict[str, Series]] | None:
    """Returns the time of each step, and that of its stages by name; None if no stage was timed."""
    step = run.get(STEP_TIME)
    found = ((name, run.get(f"timing_s/{stage}")) for stage, (name, _) in STAGES.items())
    stages = {name: series for name, series in found if series is not None}
    return (step, stages) if step is not None and stages else None


def stage_seconds(run: Run) -> dict[str, float]:
    """Returns the mean seconds of a step by stage, the rest of the step last; {} if none was timed."""
    if (timed := _timed(run)) is None:
        return {}
    step, stages = timed
    found = {name: float(series.values.sum()) / len(step.steps) for name, series in stages.items()}
    return {**found, OTHER_STAGE[0]: max(float(step.values.mean()) - sum(found.values()), 0.0)}


def share_chart(run: Run) -> alt.LayerChart | None:
    """Draws the stages as shares of a step; None if no stage was timed. In asynchronous modes they overlap, and can add
    up to more than a step."""
    if (timed := _timed(run)) is None:
        return None
    step, stages = timed
    edges = step_edges(step.steps, TIME_COLUMNS)
    count, total = interval_sums(step, edges)
    # A step without an update counts as 0 seconds.
    parts = {name: interval_sums(series, edges)[1] for name, series in stages.items()}
    parts[OTHER_STAGE[0]] = np.maximum(total - sum(parts.values()), 0.0)
    colours = dict([*STAGES.values(), OTHER_STAGE])
    values = [
        {
            "step": int(edges[i]) - 0.5,
            "end": int(edges[i + 1]) - 0.5,
            "stage": name,
            "order": place,
            "seconds": round(float(seconds[i] / count[i]), 3),
            "of": round(float(total[i] / count[i]), 3),
        }
        for place, (name, seconds) in enumerate(parts.items())
        for i in np.flatnonzero(count).tolist()
    ]
    scale = alt.Scale(domain=list(parts), range=[colours[name] for name in parts])
    colour = alt.Color("stage:N", scale=scale, legend=alt.Legend(columns=LEGEND_COLUMNS))
    bars = (
        alt.Chart(chart_data(values))
        .mark_rect(stroke=None)
        .transform_stack(
            as_=["low", "high"], stack="seconds", groupby=["step"], offset="normalize", sort=[alt.SortField("order")]
        )
        .encode(
            x=_column_axis(edges),
            x2="end:Q",
            y=alt.Y("low:Q", title="share of the step", axis=alt.Axis(format="%")),
            y2="high:Q",
            color=colour,
            tooltip=[
                "stage:N",
                alt.Tooltip("seconds:Q", format=".3~g"),
                alt.Tooltip("of:Q", title="of", format=".3~g"),
            ],
        )
    )
    return alt.layer(bars).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT)


def _column_axis(edges: np.ndarray) -> alt.X:
    """Returns the axis of the steps, half a step wider at each end, because a column is centred on its step."""
    return step_axis((float(edges[0]) - 0.5, float(edges[-1]) - 0.5))
