"""Router agreement, layer by layer over the steps."""

from typing import Any

import altair as alt
import numpy as np

from verl_ext.report.figures.lines import data
from verl_ext.report.figures.style import CIVIDIS, GRID, HEIGHT, WIDTH
from verl_ext.report.figures.thin import means, step_edges
from verl_ext.report.run import Run

SEAM = 0.05  # of a column, that it reaches under the next: cells drawn edge to edge show hairlines
COLUMNS = 120  # of the heat map; a column of a longer run is the mean of its steps
AGREEMENT = "router/agreement"


def agreement_chart(run: Run) -> alt.LayerChart | None:
    layers = run.layers(AGREEMENT)
    if not layers:
        return None
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    edges = step_edges(steps, COLUMNS)
    values: list[dict[str, Any]] = [
        {
            "step": int(start) - 0.5,
            "end": int(end) - 0.5 + SEAM * (int(end) - int(start)),
            "layer": layer - 0.5,
            "below": layer + 0.5,
            "agreement": round(float(mean), 5),
            "said": f"layer {layer}, step {start}" + (f" to {end - 1}" if end - start > 1 else ""),
        }
        for layer, series in layers.items()
        for start, end, mean in zip(edges[:-1], edges[1:], means(series, edges), strict=True)
        if np.isfinite(mean)
    ]
    # At least one percent from end to end: near-perfect agreement must not look like a dramatic picture.
    lowest = min(min(row["agreement"] for row in values), 0.99)
    colour = alt.Color(
        "agreement:Q",
        scale=alt.Scale(domain=[lowest, 1], range=list(CIVIDIS)),
        legend=alt.Legend(format=".1~%", gradientLength=180, gradientThickness=10, title="same experts", tickCount=3),
    )
    step = alt.X(
        "step:Q",
        title="step",
        scale=alt.Scale(domain=[float(edges[0]) - 0.5, float(edges[-1]) - 0.5], nice=False),
        axis=alt.Axis(format="d", tickMinStep=1, tickCount=10),
    )
    layer = alt.Y(
        "layer:Q",
        title="layer",
        scale=alt.Scale(domain=[min(layers) - 0.5, max(layers) + 0.5], nice=False, reverse=True),
        axis=alt.Axis(format="d", tickMinStep=1, grid=False),
    )
    tooltip = [alt.Tooltip("said:N", title="where"), alt.Tooltip("agreement:Q", format=".2%", title="same experts")]
    cells = (
        alt.Chart(data(values))
        .mark_rect(stroke=None)
        .encode(x=step, x2="end:Q", y=layer, y2="below:Q", color=colour, tooltip=tooltip)
    )
    return alt.layer(cells).properties(width=WIDTH, height=HEIGHT, view=alt.ViewBackground(fill=GRID))
