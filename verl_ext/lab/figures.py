"""The lab's page in the style of the report: the table, the findings, and the curves of all variants, each the mean
over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import altair as alt

from verl_ext.lab.summary import DROPPED, EXACT, K3, NONE, NORM, REWARD
from verl_ext.lab.table import Experiment
from verl_ext.report.figures.charts import INK, LINE_COLOURS, VERMILION
from verl_ext.report.figures.overlay import Look, line_looks, metric_overlay
from verl_ext.report.figures.panels import PANELS, Panel
from verl_ext.report.page import Progress, write_page
from verl_ext.report.seeds import Lines

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
    replace(panel, title=panel.title.removesuffix(" by layer"), reading=READINGS[panel.metric], verls="", compared="")
    for panel in PANELS
    if panel.metric in READINGS
]


def write_lab_page(
    title: str, about: str, experiment: Experiment, out: Path, progress: Progress = lambda what: None
) -> Path:
    """Writes `report.html`, `report.png` and the figures."""
    named = {variant.name: list(variant.curves.values()) for variant in experiment.variants if variant.curves}
    look = variant_styles([variant.name for variant in experiment.variants])
    context = {
        "title": title,
        "about": about,
        "notes": [f"{name}: {note}" for name, each in named.items() for run in each for note in run.notes],
        "variants": experiment,
    }
    drawn = {panel: chart for panel in LAB_PANELS if (chart := seeds_chart(panel, named, look)) is not None}
    return write_page(out, drawn, context, progress=progress)


def variant_styles(names: Sequence[str]) -> dict[str, Look]:
    """Returns a look for each variant: exact in ink, none in vermilion, the others by colour, then by dash."""
    own: dict[str, Look] = {EXACT: (INK, ()), NONE: (VERMILION, ())}
    others = line_looks([name for name in names if name not in own], [c for c in LINE_COLOURS if c != VERMILION])
    return {name: own.get(name) or others[name] for name in names}


def seeds_chart(panel: Panel, runs: Lines, look: Mapping[str, Look]) -> alt.LayerChart | None:
    """Draws the panel's metric for every variant that has it; returns None if no variant has it."""
    return metric_overlay(panel.metric, runs, looks=look, **panel.axis)
