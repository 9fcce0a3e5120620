"""The figure of the KL between the engines: thresholds, the guard's actions, its growth and its forecast."""

import math
from collections import Counter, defaultdict
from typing import Any

import altair as alt
import numpy as np

from verl_ext.diagnosis.findings.guard import boundary_of, growth_of, judged_k3, nears
from verl_ext.diagnosis.growth import Growth
from verl_ext.diagnosis.names import K1, K3, LOG_RATIO
from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.charts import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    VERMILION,
    Line,
    chart_data,
    chart_rows,
    line_chart,
    lines_of,
    step_edges,
)
from verl_ext.report.run import DECIDED, Run

HEAD_KL = "vllm_kl/head"
MARK_STRETCHES = 150  # the guard's marks are drawn for this many stretches of steps
AHEAD_SHARE = 0.35  # share of the run's steps by which the figure extends the growth into the future
CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
SHAPES = {
    "skip": CROSS,
    "undo": "triangle-down",
    "rollback": "triangle-left",
    "stop": "square",
    "lower_lr": "triangle-up",
    "tighten": "diamond",
    "warn": "circle",
}


def kl_chart(run: Run) -> alt.LayerChart | None:
    """Draws k3, the engines' part of it if rollouts are old, the KL over the sampler's top tokens, and |k1|; the mean
    |log k| of a trainer that logs neither."""
    k1, k3 = run.get(K1), run.get(K3)
    if k1 is None and k3 is None:
        return line_chart(lines_of(run, [(LOG_RATIO, "mean |log k|", BLUE)]), run.span, log=True, unit="nats per token")
    lines, over = [], []
    first, last = run.span
    if k1 is not None:
        lines.append(Line("|k1|, hollow: negative", Series(k1.steps, np.abs(k1.values)), ORANGE))
        over += _hollow_points(k1)
    lines += lines_of(run, [(K3, "k3", BLUE), (HEAD_KL, "over the sampler's top tokens", PURPLE)])
    if (gap := judged_k3(run.readings)) is not None and gap.alone:
        lines.append(Line(gap.name, gap.series, GREEN))
    if found := growth_of(run.readings):
        fit, ahead, last = _growth_layers(
            *found, last, boundary_of(run.readings), ahead=math.ceil(AHEAD_SHARE * len(run.steps))
        )
        lines.append(fit)
        over += ahead
    under = _thresholds(run, first, last)
    return line_chart(lines, (first, last), log=True, unit="nats per token", under=under, over=over, edge=_marks(run))


def _hollow_points(k1: Series) -> list[alt.Chart]:
    negative = k1.values < 0
    if not negative.any() or len(k1.steps) > 2 * MARK_STRETCHES:
        return []
    points = Series(k1.steps[negative], -k1.values[negative])
    mark = alt.Chart(chart_data(chart_rows(points))).mark_point(
        size=26, fill=PAPER, stroke=ORANGE, opacity=1, clip=True
    )
    return [mark]


def _thresholds(run: Run, first: int, last: int) -> list[alt.Chart]:
    levels = {"boundary": boundary_of(run.readings)}
    if (skip := run.get("guard/threshold")) is not None:
        levels["skip threshold"] = float(skip.values[-1])
    if len(set(levels.values())) < len(levels):
        levels = {"skip threshold = boundary": levels["boundary"]}
    names = {f"{label} {value:g}": value for label, value in levels.items()}
    ends = [{"value": value, "step": step, "label": name} for name, value in names.items() for step in (first, last)]
    lines = alt.Chart(chart_data(ends)).mark_line(color=VERMILION, strokeDash=[6, 4], strokeWidth=1.2, clip=True)
    # The upper of two lines has its name above it: they may be close to each other.
    upper = max(names.values()) if len(names) > 1 else math.inf
    written = [
        alt.Chart(chart_data([end for end in ends[::2] if (end["value"] == upper) == above]))
        .mark_text(color=VERMILION, align="left", dx=4, dy=-5 if above else 9, fontSize=10)
        .encode(text="label:N")
        for above in ((False, True) if len(names) > 1 else (False,))
    ]
    return [lines.encode(detail="label:N"), *written]


def _growth_layers(
    window: Series, growth: Growth, last: int, boundary: float, ahead: int
) -> tuple[Line, list[alt.Chart], int]:
    """Returns the fitted line; its extension to the boundary, if that is certain and near; the last step drawn."""
    start, now = int(window.steps[0]), int(window.steps[-1])
    fit = Line("growth fit", Series(np.array([start, now]), _heights(growth, start - now, 0)), INK, dots=False)
    if not nears(growth):
        return fit, [], last
    crossing = now + math.ceil(growth.steps)
    end = min(crossing, last + ahead)
    way = Series(np.array([now, end]), _heights(growth, 0, end - now))
    layers = [alt.Chart(chart_data(chart_rows(way))).mark_line(color=INK, strokeWidth=2, strokeDash=[2, 3], clip=True)]
    if end == crossing:
        there = alt.Chart(chart_data([{"step": end, "value": boundary, "label": f"step {end}"}]))
        point = there.mark_point(shape="diamond", size=90, filled=True, color=INK, opacity=1)
        text = there.mark_text(color=INK, align="right", dx=-8, dy=11, fontSize=11, fontWeight="bold")
        layers += [point, text.encode(text="label:N")]
    return fit, layers, max(last, end)


def _heights(growth: Growth, *steps: int) -> np.ndarray:
    """Returns the heights of the fitted line at these steps, counted from the last reading."""
    return growth.level * np.exp(growth.rate * np.array(steps))


def _marks(run: Run) -> list[alt.Chart]:
    """Draws the guard's actions along the upper edge: a step may have been skipped because its KL was not a number."""
    happened = [
        (event.step, event.action, event.reason)
        for event in run.events
        if event.action in SHAPES and event.step >= run.span[0]  # one far outside the axis would make it as wide
    ]
    explained = {step for step, action, _ in happened if action == "skip"}
    if (skipped := run.get("guard/skipped")) is not None:
        for step, share in zip(skipped.steps.tolist(), skipped.values.tolist(), strict=True):
            if share > 0 and step not in explained:
                part = "" if share == 1 else f"{100 * share:.3g} % of this step's updates; "
                happened.append((step, "skip", f"{part}the event log has no reason"))
    if not happened:
        return []
    edges = step_edges(run.steps, MARK_STRETCHES)
    marks: dict[tuple[int, str], dict[str, Any]] = {}
    for step, action, reason in sorted(happened):
        place = int(np.searchsorted(edges, step, side="right"))
        mark = marks.setdefault((place, action), {"step": step, "action": action, "reason": reason, "count": 0})
        mark["count"] += 1
    for mark in marks.values():
        more = f" (and {mark['count'] - 1} more nearby)" if mark["count"] > 1 else ""
        mark["said"] = f"step {mark['step']}: {DECIDED.get(mark['action'], mark['action'])}{more}"
    shapes = [action for action in SHAPES if any(mark["action"] == action for mark in marks.values())]
    shape = alt.Shape("action:N").scale(domain=shapes, range=[SHAPES[action] for action in shapes])
    words = " : ".join(f"datum.label === '{a}' ? '{DECIDED.get(a, a)}'" for a in shapes) + " : datum.label"
    legend = alt.Legend(labelExpr=words, symbolFillColor=VERMILION, symbolStrokeColor=VERMILION, symbolSize=70)
    look = {"size": 70, "filled": True, "color": VERMILION, "stroke": PAPER, "strokeWidth": 0.5, "opacity": 1}
    tooltip = [alt.Tooltip("said:N", title="guard"), alt.Tooltip("reason:N")]
    levels: dict[int, list[dict[str, Any]]] = defaultdict(list)  # marks at one place are drawn below each other
    above: Counter[int] = Counter()
    for (place, _), mark in marks.items():
        levels[above[place]].append(mark)
        above[place] += 1
    return [
        alt.Chart(chart_data(values))
        .mark_point(**look)
        .encode(y=alt.value(6 + 12 * level), shape=shape.legend(legend), tooltip=tooltip)
        for level, values in levels.items()
    ]
