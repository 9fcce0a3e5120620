"""Metrics over steps: lines, with what is drawn over and under them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np

from verl_ext.report.figures.style import HEIGHT, INK, WIDTH
from verl_ext.report.figures.thin import TREND, medians, thin
from verl_ext.report.run import Series

READINGS = "readings"  # the layer that only answers the pointer
DOTS_UP_TO = 60  # readings; a longer line is drawn without a dot at each
LARGEST_POWER = 307  # of ten, that a double still holds with 5 before it
FAINT_FROM = 2 * TREND  # readings; a longer line is drawn faintly, its medians over it


@dataclass(frozen=True)
class Line:
    """One line and its look."""

    label: str
    series: Series
    colour: str
    dash: tuple[int, ...] = ()
    dots: bool = True


def line_chart(
    lines: Sequence[Line],
    steps: tuple[int, int],
    *,
    log: bool = False,
    percent: bool = False,
    unit: str = "",
    zero: bool = False,
    under: Sequence[Any] = (),
    over: Sequence[Any] = (),
    edge: Sequence[Any] = (),
) -> alt.LayerChart:
    """Lines over steps, in a legend by label, with the readings shown on hover.

    Args:
        lines: with at least one reading each; values of 0 and below are left out of a logarithmic axis.
        steps: first and last of the run, so that all figures of a page have the same axis.
        log: a logarithmic axis, unless there is nothing above 0.
        percent: values are shares, shown in percent.
        zero: the axis begins at 0.
        under, over: layers drawn below and above the lines, of data with `step` and `value`; they get the axes here.
        edge: layers along the upper edge, of data with `step`, which know their height.
    """
    positive = np.concatenate([line.series.values[line.series.values > 0] for line in lines]) if log else np.empty(0)
    grid = decades(positive) if positive.size else None
    shown = [replace(line, series=_drawable(line.series, grid is not None)) for line in lines]
    x, y = step_axis(steps), value_axis(grid=grid, percent=percent, unit=unit, zero=zero)
    legend = alt.Legend(symbolType="stroke") if len(lines) > 1 or lines[0].label else None
    scale = alt.Scale(domain=[line.label for line in lines], range=[line.colour for line in lines])
    look = {"color": alt.Color("label:N", scale=scale, legend=legend)}
    if any(line.dash for line in lines):  # in the legend too
        dashes = alt.Scale(domain=[line.label for line in lines], range=[list(line.dash) or [1, 0] for line in lines])
        look["strokeDash"] = alt.StrokeDash("label:N", scale=dashes, legend=legend)
    faint = [line for line in shown if len(line.series.steps) > FAINT_FROM]
    whole = [line for line in shown if len(line.series.steps) <= FAINT_FROM]
    strokes = [
        *(_strokes(line, thin(line.series), 0.35) for line in faint),
        *(_strokes(line, line.series, 1.0) for line in whole),
        *(_strokes(line, medians(line.series), 1.0) for line in faint),
    ]
    coloured = [chart.encode(x=x, y=y, **look) for chart in strokes]
    coloured.append(_readings(shown).encode(x=x, y=y, color=look["color"]))
    around = [[chart.encode(x=x, y=y) for chart in charts] for charts in (under, over)]
    marks = [chart.encode(x=x) for chart in edge]
    chart = alt.layer(*around[0], *coloured, *around[1], *marks).properties(width=WIDTH, height=HEIGHT)
    zoom = alt.selection_interval(bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]")
    return chart.add_params(zoom)


def decades(values: np.ndarray) -> list[float]:
    """Grid lines of a logarithmic axis: the powers of ten around positive values, and 2 and 5 where there are few."""
    low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
    low, high = (min(max(power, -LARGEST_POWER), LARGEST_POWER) for power in (low, high))
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    step = max(1, -(-(high - low) // 6))
    return [factor * 10.0**power for power in range(low, high + 1, step) for factor in factors]


def step_axis(steps: tuple[int, int]) -> alt.X:
    first, last = steps
    margin = 0.5 if first == last else 0
    scale = alt.Scale(domain=[first - margin, last + margin], nice=False)
    return alt.X("step:Q", title="step", scale=scale, axis=alt.Axis(format="d", tickMinStep=1, tickCount=10))


def value_axis(*, grid: list[float] | None = None, percent: bool = False, unit: str = "", zero: bool = False) -> alt.Y:
    """A linear axis, or a logarithmic one with these grid lines."""
    if grid:
        scale, axis = alt.Scale(type="log", nice=False, padding=14), alt.Axis(format="~e", values=grid)
    else:
        scale, axis = alt.Scale(zero=zero, nice=True), alt.Axis(format=".3~%" if percent else ".6~g")
    return alt.Y("value:Q", title=unit or None, scale=scale, axis=axis)


def rows(series: Series, **more: Any) -> list[dict[str, Any]]:
    """As Vega-Lite takes data; four digits more than anyone reads off a figure."""
    values = (float(f"{value:.6g}") for value in series.values)
    return [{"step": int(step), "value": value, **more} for step, value in zip(series.steps, values, strict=True)]


class _Rows(alt.InlineData):
    """Neither checked nor copied by Altair, which does both to every row, many times: 8 in 10 of the seconds."""

    _class_is_valid_at_instantiation = False

    def __deepcopy__(self, memo: object) -> "_Rows":
        return self


def data(values: list[dict[str, Any]]) -> alt.InlineData:
    return _Rows(values=values)


def _drawable(series: Series, log: bool) -> Series:
    keep = series.values > 0 if log else np.isfinite(series.values)
    return Series(series.steps[keep], series.values[keep])


def _strokes(line: Line, series: Series, opacity: float) -> alt.Chart:
    dots: Any = {"size": 22, "filled": True} if line.dots and len(series.steps) <= DOTS_UP_TO else False
    mark: Mapping[str, Any] = {
        "strokeWidth": 2 if opacity == 1 else 1,
        "opacity": opacity,
        "clip": True,
        "strokeJoin": "round",
    }
    return alt.Chart(data(rows(series, label=line.label))).mark_line(point=dots, **mark)


def _readings(lines: Sequence[Line]) -> alt.Chart:
    """What the pointer finds: the nearest reading, marked, with its numbers."""
    values = [row for line in lines for row in rows(thin(line.series), label=line.label)]
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False)
    # Spelled out: under `nearest`, Vega-Lite's own takes numbers from datum.datum, but text from datum, which has none.
    row = "(datum.datum || datum)"
    named = f"metric: {row}.label, " if any(line.label for line in lines) else ""
    tooltip = f"{{step: format({row}.step, 'd'), {named}value: format({row}.value, '.4~g')}}"
    shown = alt.condition(nearest, alt.value(1), alt.value(0))
    return (
        alt.Chart(data(values))
        .mark_point(size=70, filled=True, stroke=INK, strokeWidth=1, clip=True)
        .encode(opacity=shown, tooltip=alt.value(alt.ExprRef(tooltip)))
        .add_params(nearest)
        .properties(name=READINGS)
    )
