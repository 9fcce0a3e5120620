"""Where a step's time goes."""

import altair as alt
import numpy as np

from verl_ext.report.figures.lines import data
from verl_ext.report.figures.style import BLUE, GREEN, HEIGHT, MUTED, ORANGE, PURPLE, SKY, VERMILION, WIDTH
from verl_ext.report.figures.thin import binned, step_edges
from verl_ext.report.run import Run

STEP = "timing_s/step"
COLUMNS = 100
LEGEND_COLUMNS = 4  # seven names in one row would be cut
# Of verl's timing_s/*, what adds up to a step but for the rest of it, and its name here; others are parts of these.
STAGES = {
    "gen": ("rollout", BLUE),
    "old_log_prob": ("old log-probs", SKY),
    "ref": ("reference", PURPLE),
    "adv": ("measure, advantages", GREEN),
    "update_actor": ("update", VERMILION),
    "update_weights": ("weight sync", ORANGE),
}
REST = ("everything else", MUTED)


def stage_seconds(run: Run) -> dict[str, float]:
    """Mean seconds of a step by stage, the rest of the step last; {} where steps were not timed."""
    step = run.get(STEP)
    if step is None:
        return {}
    found = {
        name: float(series.values.sum()) / len(step.steps)
        for stage, (name, _) in STAGES.items()
        if (series := run.get(f"timing_s/{stage}")) is not None
    }
    rest = float(step.values.mean()) - sum(found.values())
    return {**found, REST[0]: max(rest, 0.0)}


def share_chart(run: Run) -> alt.LayerChart | None:
    """Stages of a step as shares of it. Stages that overlap, in the asynchronous modes, can add up to more than it."""
    step = run.get(STEP)
    if step is None:
        return None
    edges = step_edges(step.steps, COLUMNS)
    count, total = binned(step, edges)
    left = total.copy()
    parts = {}
    for stage, (name, _) in STAGES.items():
        if (series := run.get(f"timing_s/{stage}")) is not None:
            parts[name] = binned(series, edges)[1]  # a step without an update counts with 0 seconds of it
            left -= parts[name]
    parts[REST[0]] = np.maximum(left, 0.0)
    colours = dict([*STAGES.values(), REST])
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
    colour = (
        alt.Color("stage:N")
        .scale(domain=list(parts), range=[colours[name] for name in parts])
        .legend(columns=LEGEND_COLUMNS)
    )
    bars = (
        alt.Chart(data(values))
        .mark_rect(stroke=None)
        .transform_stack(
            as_=["low", "high"], stack="seconds", groupby=["step"], offset="normalize", sort=[alt.SortField("order")]
        )
        .encode(
            x=alt.X(
                "step:Q",
                title="step",
                scale=alt.Scale(domain=[float(edges[0]) - 0.5, float(edges[-1]) - 0.5], nice=False),
                axis=alt.Axis(format="d", tickMinStep=1, tickCount=10),
            ),
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
    return alt.layer(bars).properties(width=WIDTH, height=HEIGHT)
