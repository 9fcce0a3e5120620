"""Metrics over steps: lines with layers over and under them, and the colours and axes of all figures.

A figure of some 600 pixels shows no more than MOST_POINTS readings of a line, so a longer one is thinned.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np

from verl_ext.diagnosis.series import Series
from verl_ext.report.run import Run

# Okabe and Ito's palette, which is distinguishable under every common colour blindness, and greys; by role in the light
# page, with the dark page's replacements (lighter if the original would be hard to see on the background).
BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PURPLE, INK, MUTED, GRID, PAPER = "#56b4e9", "#cc79a7", "#1c1e21", "#5f6670", "#e3e6ea", "#ffffff"
DARK_COLOURS = {
    BLUE: "#4aa8e8",
    ORANGE: "#f0b429",
    GREEN: "#2fbf91",
    VERMILION: "#ff7a3c",
    SKY: "#9ad4f7",
    PURPLE: "#e29ac4",
    INK: "#e8eaed",
    MUTED: "#a3abb5",
    GRID: "#363b42",
    PAPER: "#1b1e22",
}
LINE_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)  # for lines without an order: runs, validation sets
# Cividis, dark to light; made for colour-blind readers too.
CIVIDIS = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
)
BUCKET_COLOURS = ("#d55e00", "#e69f00", "#8a8678", "#56b4e9", "#0072b2")  # for buckets, low to high

PLOT_WIDTH, PLOT_HEIGHT = 560, 220  # pixels of a plot in a PNG; in the page it is as wide as its column
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

VEGA_CONFIG: dict[str, Any] = {
    "background": PAPER,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelFlush": False,
    },
    "axisX": {"grid": False, "domainColor": MUTED, "tickColor": MUTED},
    "axisY": {"domain": False, "ticks": False, "tickCount": 5},
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "title": None,
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "titleFontSize": 11,
        "labelFontSize": 11,
        "labelLimit": 260,
        "symbolStrokeWidth": 2.5,
        "symbolSize": 120,
        "symbolOpacity": 1,
        "offset": 6,
    },
    "title": {"anchor": "start", "color": INK, "subtitleColor": MUTED, "fontSize": 14, "subtitleFontSize": 11},
}

HOVER_LAYER = "readings"  # the layer that only answers the pointer
MOST_DOTS = 60  # readings; a longer line is drawn without a dot at each
MOST_GRID = 6  # steps of a logarithmic axis
MOST_DECADES = 8  # of a logarithmic axis; lower values, of engines that agree exactly, are drawn at its lower edge
# A plain number where it is short: 0.5, not 5e-1.
LOG_LABELS = "(datum.value >= 0.001 && datum.value < 10000 ? format(datum.value, ',~g') : format(datum.value, '~e'))"
LEGEND_LETTERS = 60  # of all labels; a longer legend has two columns
LARGEST_POWER = 307  # of ten: a double can still hold 5 times it
MOST_POINTS = 400  # of a line: two for three pixels
TREND_POINTS = 120  # medians; a line of more than twice as many readings is drawn faintly, its medians over it
FEW_LINES = 6  # more lines have fewer points each


Look = tuple[str, tuple[int, ...]]  # colour, dash


@dataclass(frozen=True)
class Line:
    """One line and its look; `run` is the run that it is of, if the figure has several."""

    label: str
    series: Series
    colour: str
    dash: tuple[int, ...] = ()
    dots: bool = True
    run: str = ""

    def rows(self, series: Series) -> list[dict[str, Any]]:
        return chart_rows(series, label=self.label, **({"run": self.run} if self.run else {}))


def lines_of(run: Run, curves: Iterable[tuple[str, str, str]]) -> list[Line]:
    """Returns the lines of (metric, label, colour)s, without metrics that the run lacks."""
    return [Line(label, series, colour) for name, label, colour in curves if (series := run.get(name)) is not None]


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
) -> alt.LayerChart | None:
    """Draws lines over steps, with a legend by label; hovering shows the readings. Returns None without lines.

    Args:
        lines: each has at least one reading; values of 0 and below are left out of a logarithmic axis.
        steps: first and last of the run, so that all figures of a page have the same axis.
        log: a logarithmic axis, unless there is nothing above 0.
        percent: values are shares, shown in percent.
        zero: the axis starts at 0.
        under, over: layers drawn below and above the lines, of data with `step` and `value`; they get the axes here.
        edge: layers along the upper edge, of data with `step`; they set their own height.
    """
    if not lines:
        return None
    log = log and any((line.series.values > 0).any() for line in lines)
    shown = [replace(line, series=drawable(line.series, log)) for line in lines]
    around = [
        row[end] for each in (*under, *over) for row in each.data.values for end in ("value", "high") if end in row
    ]
    heights = np.concatenate([*(line.series.values for line in shown), np.array(around, dtype=np.float64)])
    spanned = heights[heights > 0] if log else None
    x, y = step_axis(steps), value_axis(spanned, percent=percent, unit=unit, zero=zero, edge=bool(edge))
    look = line_look("label", {line.label: (line.colour, line.dash) for line in lines})
    # Together, more lines have as many points as a few.
    points, medians = (most * FEW_LINES // max(len(lines), FEW_LINES) for most in (MOST_POINTS, TREND_POINTS))
    faint: list[Line] = []
    whole: list[Line] = []
    dotted: list[Line] = []
    for line in shown:
        few = line.dots and len(line.series.steps) <= MOST_DOTS and len(lines) <= FEW_LINES
        (dotted if few else faint if len(line.series.steps) > 2 * medians else whole).append(line)
    readings = chart_data([row for line in shown for row in line.rows(thin_readings(line.series, points))])
    trends = chart_data([row for line in faint for row in line.rows(stretch_medians(line.series, medians))])
    strokes = [
        _strokes(readings, faint, opacity=0.35 if len(lines) <= FEW_LINES else 0.1, strokeWidth=1),
        _strokes(readings, whole, strokeWidth=2),
        _strokes(readings, dotted, strokeWidth=2, point={"size": 22, "filled": True}),
        _strokes(trends, faint, strokeWidth=2),
    ]
    coloured = [chart.encode(x=x, y=y, **look) for chart in strokes if chart is not None]
    coloured.append(_hover_layer(shown, readings).encode(x=x, y=y, color=look["color"]))
    behind, above = ([chart.encode(x=x, y=y) for chart in charts] for charts in (under, over))
    marks = [chart.encode(x=x) for chart in edge]
    chart = alt.layer(*behind, *coloured, *above, *marks).properties(width=PLOT_WIDTH, height=PLOT_HEIGHT)
    zoom = alt.selection_interval(bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]")
    return chart.add_params(zoom)


def line_look(field: str, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Returns the channels that give each value of a field its colour and dash, in the legend too."""
    names, colours, dashes = [*looks], [colour for colour, _ in looks.values()], [dash for _, dash in looks.values()]
    columns = {"columns": 2} if len(names) > 2 and sum(map(len, names)) > LEGEND_LETTERS else {}
    legend = alt.Legend(symbolType="stroke", **columns) if len(names) > 1 or names[0] else None
    found = {"color": alt.Color(f"{field}:N", scale=alt.Scale(domain=names, range=colours), legend=legend)}
    if any(dashes):
        scale = alt.Scale(domain=names, range=[list(dash) or [1, 0] for dash in dashes])
        found["strokeDash"] = alt.StrokeDash(f"{field}:N", scale=scale, legend=legend)
    return found


def log_grid(values: np.ndarray) -> list[float]:
    """Returns the grid of a logarithmic axis: powers of ten around positive values, with 2 and 5 if these are few.

    Where the values are close together, the steps are equal.
    """
    least, most = float(values.min()), float(values.max())
    if most > least:
        width = 10.0 ** math.floor(math.log10(most - least))
        if width > 0 and (first := math.floor(least / width)) >= 1:
            last = math.ceil(most / width)
            every = -(-(last - first) // MOST_GRID)
            grid = (float(f"{width * place:.6g}") for place in range(first, last + 1, every))
            return [line for line in dict.fromkeys(grid) if math.isfinite(line)]
    low = _double_power(math.floor(math.log10(values.min())))
    high = _double_power(math.ceil(math.log10(values.max())))
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    step = max(1, -(-(high - low) // MOST_GRID))
    return [factor * 10.0**power for power in range(low, high + 1, step) for factor in factors]


def _double_power(power: int) -> int:
    return min(max(power, -LARGEST_POWER), LARGEST_POWER)


def step_axis(steps: tuple[float, float]) -> alt.X:
    first, last = steps
    margin = 0.5 if first == last else 0
    scale = alt.Scale(domain=[first - margin, last + margin], nice=False)
    few = {"values": [math.ceil(first), math.floor(last)]} if last - first <= 1 else {}  # no half steps
    return alt.X("step:Q", title="step", scale=scale, axis=alt.Axis(format="d", tickMinStep=1, tickCount=10, **few))


def value_axis(
    positive: np.ndarray | None = None, *, percent: bool = False, unit: str = "", zero: bool = False, edge: bool = False
) -> alt.Y:
    """Returns a linear axis, or a logarithmic one for these values, and with room for marks along the `edge`."""
    if positive is not None:
        low, high = float(positive.min()), float(positive.max())
        lowest = 10.0 ** (math.floor(math.log10(high)) - MOST_DECADES)
        labels, cut = LOG_LABELS, low < lowest
        if cut:
            low, labels = lowest, f"(datum.value <= {lowest} ? '≤ ' : '') + {LOG_LABELS}"
        grid = [line for line in log_grid(np.array([low, high])) if line <= high or not cut]  # it would be clamped too
        if low == high:  # an axis of one height would print all labels on each other
            low, high = low / 2 or low, min(2 * high, sys.float_info.max)
        scale, axis = (
            alt.Scale(type="log", domain=[low, high], clamp=cut, nice=False, padding=28 if edge else 14),
            alt.Axis(labelExpr=labels, values=grid, labelOverlap=True),
        )
    else:
        scale, axis = alt.Scale(zero=zero, nice=True), alt.Axis(format=".3~%" if percent else ",.6~g")
    return alt.Y("value:Q", title=unit or None, scale=scale, axis=axis)


def chart_rows(series: Series, **more: Any) -> list[dict[str, Any]]:
    """Returns the series as Vega-Lite data, with four digits more than anyone reads off a figure."""
    values = (float(f"{value:.6g}") for value in series.values)
    return [{"step": int(step), "value": value, **more} for step, value in zip(series.steps, values, strict=True)]


class _Rows(alt.InlineData):
    """Rows that Altair neither checks nor copies: it would do both many times per row, for 8 of 10 seconds."""

    _class_is_valid_at_instantiation = False

    def __deepcopy__(self, memo: object) -> "_Rows":
        return self


def chart_data(values: list[dict[str, Any]]) -> alt.InlineData:
    return _Rows(values=values)


def thin_readings(series: Series, most: int = MOST_POINTS) -> Series:
    """Keeps the least and the largest reading of each of most / 2 stretches of steps: no spike is lost."""
    if len(series.steps) <= most:
        return series
    # Stretches are equal in steps, so that a validation every tenth step does not crowd out the steps in between.
    stretch = _stretches(series.steps, most // 2)
    order = np.lexsort((series.values, stretch))
    ends = np.flatnonzero(np.diff(stretch[order], prepend=-1, append=-1))
    keep = np.unique(order[np.concatenate([ends[:-1], ends[1:] - 1])])
    return Series(series.steps[keep], series.values[keep])


def stretch_medians(series: Series, most: int = TREND_POINTS) -> Series:
    """Returns the median of each of `most` stretches of steps, at the stretch's middle."""
    if len(series.steps) <= most:
        return series
    starts = np.unique(_stretches(series.steps, most), return_index=True)[1]
    parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(series.steps)], strict=True)]
    steps = np.array([int(np.median(series.steps[part])) for part in parts])
    return Series(steps, np.array([np.median(series.values[part]) for part in parts]))


def interval_sums(series: Series, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many readings each interval [edges[i], edges[i + 1]) of steps has, and their sum."""
    which = np.asarray(np.searchsorted(edges, series.steps, side="right")) - 1
    inside = (which >= 0) & (which < len(edges) - 1)
    count = np.bincount(which[inside], minlength=len(edges) - 1)
    return count, np.bincount(which[inside], weights=series.values[inside], minlength=len(edges) - 1)


def interval_means(series: Series, edges: np.ndarray) -> np.ndarray:
    """Returns the mean of the readings in each interval; NaN where there are none."""
    count, total = interval_sums(series, edges)
    return np.divide(total, count, out=np.full(len(edges) - 1, np.nan), where=count > 0)


def step_edges(steps: np.ndarray, most: int) -> np.ndarray:
    """Returns the edges of at most `most` intervals of whole steps that cover `steps`, equal except for the last."""
    first, last = int(steps[0]), int(steps[-1])
    width = -(-(last - first + 1) // most)
    return np.append(np.arange(first, last + 1, width), last + 1)


def drawable(series: Series, log: bool) -> Series:
    """Returns the readings that an axis can show: finite ones, above 0 on a logarithmic axis."""
    series = series.finite()
    above = series.values > (0 if log else -np.inf)
    return Series(series.steps[above], series.values[above])


def _strokes(rows: alt.InlineData, lines: Sequence[Line], **mark: Any) -> alt.Chart | None:
    """Draws some of the lines that `rows` has."""
    if not lines:
        return None
    chosen = alt.FieldOneOfPredicate(field="label", oneOf=[line.label for line in lines])
    return alt.Chart(rows).transform_filter(chosen).mark_line(clip=True, strokeJoin="round", **mark)


def _hover_layer(lines: Sequence[Line], rows: alt.InlineData) -> alt.Chart:
    """Marks the reading nearest to the pointer, and shows its numbers."""
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False)
    # Written by hand: under `nearest`, Vega-Lite's own tooltip takes numbers from datum.datum, but text from datum,
    # which has none.
    row = "(datum.datum || datum)"
    named = f"metric: {row}.label, " if any(line.label for line in lines) else ""
    tooltip = f"{{step: format({row}.step, 'd'), {named}value: format({row}.value, ',.4~g')}}"
    shown = alt.condition(nearest, alt.value(1), alt.value(0))
    return (
        alt.Chart(rows)
        .mark_point(size=70, filled=True, stroke=INK, strokeWidth=1, clip=True)
        .encode(opacity=shown, tooltip=alt.value(alt.ExprRef(tooltip)))
        .add_params(nearest)
        .properties(name=HOVER_LAYER)
    )


def _stretches(steps: np.ndarray, count: int) -> np.ndarray:
    return (steps - steps[0]) * count // (steps[-1] - steps[0] + 1)
