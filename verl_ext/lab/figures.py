"""The lab's page in the style of the report: the table, the findings, and the curves of all variants.

A curve's line is the mean over the seeds; its band reaches from the lowest seed to the highest. Both end where the
first run of the variant ended: after that they would cover only the remaining runs.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import altair as alt
import numpy as np

from verl_ext.diagnosis.series import Series
from verl_ext.lab.summary import DROPPED, EXACT, K3, NONE, NORM, REWARD, Variant, ranked_variants
from verl_ext.lab.table import findings_of, legend, table_columns, table_rows
from verl_ext.report.figures.charts import (
    INK,
    LINE_COLOURS,
    VERMILION,
    Line,
    chart_data,
    chart_rows,
    drawable,
    interval_means,
    line_chart,
    step_edges,
)
from verl_ext.report.figures.overlay import DASHES
from verl_ext.report.figures.panels import PANELS, Panel
from verl_ext.report.page import Progress, write_page
from verl_ext.report.run import Run

POINTS = 60  # points of a line, each the mean of some steps
MOST_THIN = 15  # lines of single seeds in a figure
BAND, THIN = 0.12, 0.35  # opacity

Look = tuple[str, tuple[int, ...]]  # colour, dash
Runs = Mapping[str, Sequence[Run]]  # runs of each variant

READINGS = {  # by the metric
    REWARD: "A method helps if its line and its band stay above those of none; the distance to exact is the remaining "
    "cost of the gap. A line ends where the first run of its method ended.",
    K3: "A climb on this axis means that the gap compounds. A method that holds the reward while k3 climbs tolerates "
    "the gap; one that holds both closes it.",
    DROPPED: "Share of tokens at weight 0. If it falls while k3 climbs, the band does not catch the gap.",
    "router/agreement": "Share of a token's experts that both engines chose. If it is low, and replay (r3) raises the "
    "reward, routing is the gap.",
    "response_length/mean": "A mask that drops whole responses may prefer short ones: this figure shows it.",
    "actor/entropy": "Entropy of the policy. A collapse often begins when it turns.",
    NORM: "Norm before clipping. A method with a far smaller norm than the others also learns more slowly: compare "
    "rewards with that in mind.",
}
LAB_PANELS = [
    replace(panel, title=panel.title.removesuffix(" by layer"), reading=READINGS[panel.metric], compared="")
    for panel in PANELS
    if panel.metric in READINGS
]


def write_lab_page(
    title: str, about: str, variants: Sequence[Variant], out: Path, progress: Progress = lambda what: None
) -> Path:
    """Writes `report.html`, `report.png` and the figures."""
    order = ranked_variants(variants)
    named = {variant.name: list(variant.curves.values()) for variant in order if variant.curves}
    look = variant_styles([variant.name for variant in order])
    context = {
        "title": title,
        "about": about,
        "notes": [f"{name}: {note}" for name, each in named.items() for run in each for note in run.notes],
        "variants": {
            "titles": [column.title for column in table_columns(variants)],
            "rows": table_rows(variants),
            "legend": legend(variants),
            "words": findings_of(variants),
        },
    }
    drawn = {panel: chart for panel in LAB_PANELS if (chart := seeds_chart(panel, named, look)) is not None}
    return write_page(out, drawn, context, progress=progress)


def variant_styles(names: Sequence[str]) -> dict[str, Look]:
    """Returns a look for each variant: exact in ink, none in vermilion, the others by colour, then by dash."""
    others = cycle((colour, dash) for dash, colour in product(DASHES, LINE_COLOURS) if colour != VERMILION)
    own: dict[str, Look] = {EXACT: (INK, ()), NONE: (VERMILION, ())}
    return {name: own[name] if name in own else next(others) for name in names}


def seeds_chart(panel: Panel, runs: Runs, look: Mapping[str, Look]) -> alt.LayerChart | None:
    """Draws the panel's metric for every variant that has it; returns None if no variant has it."""
    found = {name: [s for run in each if (s := run.get(panel.metric)) is not None] for name, each in runs.items()}
    found = {name: each for name, each in found.items() if each}
    if not found:
        return None
    steps = np.unique(np.concatenate([run.steps for each in runs.values() for run in each]))
    edges = step_edges(steps, POINTS)
    lines, bands, thin = [], [], []
    for name, each in found.items():
        colour, dash = look[name]
        curves = [_curve(series, edges) for series in each]
        spread = seed_spread(np.stack([curve.values for curve in curves]), log=panel.log)
        all_run = edges[:-1] <= min(run.steps[-1] for run in runs[name])
        middle, low, high = (Series(curves[0].steps[all_run], values[all_run]).finite() for values in spread)
        if not middle.steps.size:  # a logarithmic axis cannot show zeros
            continue
        lines.append(Line(name, middle, colour, dash, dots=False))
        if len(each) > 1:
            bands.append(_band(low, high, colour))
            thin += [_thin(drawable(curve, panel.log), colour) for curve in curves]
    if not lines:
        return None
    under = [*bands, *(thin if len(thin) <= MOST_THIN else [])]
    span = int(steps[0]), int(steps[-1])
    return line_chart(lines, span, log=panel.log, percent=panel.percent, zero=panel.zero, under=under)


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


def _curve(series: Series, edges: np.ndarray) -> Series:
    """Returns the curve, with NaN for a stretch without a logged step."""
    return Series((edges[:-1] + edges[1:] - 1) // 2, interval_means(series, edges))


def _band(low: Series, high: Series, colour: str) -> alt.Chart:
    ends = [row | {"high": top["value"]} for row, top in zip(chart_rows(low), chart_rows(high), strict=True)]
    return alt.Chart(chart_data(ends)).mark_area(color=colour, opacity=BAND, clip=True).encode(y2="high:Q")


def _thin(curve: Series, colour: str) -> alt.Chart:
    return alt.Chart(chart_data(chart_rows(curve))).mark_line(color=colour, opacity=THIN, strokeWidth=1, clip=True)
