"""The report's folder: one page that needs nothing else, and its figures as PNG files."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from verl_ext import __version__
from verl_ext.guard.state import Event
from verl_ext.report import render
from verl_ext.report.comparison import Comparison
from verl_ext.report.comparison_text import comparison_rows
from verl_ext.report.figures.gap import DONE
from verl_ext.report.figures.overlay import overlay
from verl_ext.report.figures.panels import PANELS, Panel, facts
from verl_ext.report.figures.style import DARK, SERIES
from verl_ext.report.files import is_regular, open_regular, written_whole
from verl_ext.report.html import script_json, source, template, write
from verl_ext.report.run import ReportError, Run
from verl_ext.report.terminal import not_finite
from verl_ext.report.verdict import Verdict

PAGE, OVERVIEW, PICTURES, TRAJECTORIES = "report.html", "report.png", "figures", "trajectories.html"
GENERATOR, HEAD = b'name="generator" content="verl_ext', 2000  # what tells a page of ours, in so many bytes
WORDS = DONE | {"recover": "recovered"}
# Of the template, that a page may lack.
SECTIONS = ("verdict", "comparison", "variants", "trajectories", "guard", "said", "tables")
MOST_DECISIONS, MOST_OPEN = 100, 10  # on the page; more than the latter are folded

Progress = Callable[[str], None]  # told what is being drawn


def write_report(
    run: Run,
    verdict: Verdict,
    out: Path,
    *,
    trajectories: str | None = None,
    refresh: int | None = None,
    pictures: bool = True,
    tidy: bool | None = None,
    progress: Progress = lambda what: None,
) -> Path:
    """Write the page of one run, and the figures beside it.

    Args:
        out: a folder, made where it is missing.
        trajectories: where the page links to, relative to it.
        refresh: seconds after which the page loads itself again.
        pictures: write the PNG files too.
        tidy: remove what an earlier report left in the folder; by default where one stands there.
    """
    steps = f"step {run.steps[0]}" if len(run.steps) == 1 else f"steps {run.steps[0]} to {run.steps[-1]}"
    files = ", ".join(file.name for file in run.sources)
    context = {
        "title": run.name,
        "about": f"{steps}, {len(run.metrics)} metrics" + (f" from {files}" if files else ""),
        "verdict": verdict,
        "notes": [*not_finite(run), *run.notes],
        "trajectories": trajectories,
        "guard": _decisions(run.events),
    }
    charts = {panel: panel.chart(run) for panel in PANELS}
    said = {panel.key: facts(panel, run) for panel in PANELS}
    return write_page(out, charts, context, said=said, refresh=refresh, pictures=pictures, tidy=tidy, progress=progress)


def write_comparison(
    runs: Mapping[str, Run],
    comparison: Comparison,
    out: Path,
    *,
    pictures: bool = True,
    progress: Progress = lambda what: None,
) -> Path:
    """Write the page of several runs, by the names they are compared under, and the figures beside it."""
    context = {
        "title": " / ".join(runs),
        "about": f"{len(runs)} runs; changes are against {next(iter(runs))}",
        "comparison": comparison_rows(comparison),
        "names": list(runs),
        "notes": [*comparison.notes, *(f"{name}: {note}" for name, run in runs.items() for note in run.notes)],
    }
    charts = {panel: overlay(panel, runs) for panel in PANELS}
    return write_page(out, charts, context, pictures=pictures, progress=progress)


def write_page(
    out: Path,
    charts: Mapping[Panel, alt.LayerChart | None],
    context: Mapping[str, Any],
    *,
    said: Mapping[str, str] | None = None,
    refresh: int | None = None,
    pictures: bool = True,
    tidy: bool | None = None,
    progress: Progress = lambda what: None,
) -> Path:
    """Write a page of these figures, and the figures beside it; as `write_report`.

    Args:
        charts: None where there is nothing to draw, which the page says.
        context: what stands above them: `title`, `about`, `notes` and the template's sections.
        said: below a figure, by the key of its panel.
    """
    said = said or {}
    tidy = is_ours(out) if tidy is None else tidy  # before anything is written
    drawn = {panel: render.spec_of(chart) for panel, chart in charts.items() if chart is not None}
    out.mkdir(parents=True, exist_ok=True)
    progress("page")
    page = template("report.html.j2").stream(
        {**dict.fromkeys(SECTIONS), **context},
        panels=[_card(panel, said.get(panel.key, ""), "comparison" in context) for panel in drawn],
        missing=[panel for panel in charts if panel not in drawn],
        figures=script_json({panel.key: spec for panel, spec in drawn.items()}),
        dark=script_json(DARK),
        colours=SERIES,
        libraries=render.libraries(),
        style=source("report.css"),
        script=source("report.js"),
        refresh=refresh,
        version=__version__,
    )
    write(page, out / PAGE)  # first: what fails in drawing pictures must not cost the page
    if tidy:
        _forget(out, drawn if pictures else {}, trajectories=context.get("trajectories"))
    if pictures and drawn:
        _write_pictures(out, drawn, context["title"], progress)
    return out / PAGE


def is_ours(out: Path) -> bool:
    """Whether a report stands in this folder: then the files of a report's names beside it are a report's as well."""
    if (out / PAGE).is_symlink():  # to a report that may stand anywhere
        return False
    try:
        with open_regular(out / PAGE) as page:
            return GENERATOR in page.read(HEAD)
    except OSError:
        return False


def _forget(out: Path, drawn: Collection[Panel], trajectories: str | None) -> None:
    """What is left of an earlier report in this folder, and would pass for this one's. A report writes no links."""
    gone = [out / PICTURES / f"{panel.key}.png" for panel in PANELS if panel not in drawn]
    gone += [] if drawn else [out / OVERVIEW]
    gone += [] if trajectories else [out / TRAJECTORIES]
    for file in gone:
        if is_regular(file) and not file.is_symlink() and not (out / PICTURES).is_symlink():
            file.unlink(missing_ok=True)


def _decisions(events: Sequence[Event]) -> dict[str, Any] | None:
    """The guard's part of the page; None where it decided nothing."""
    if not events:
        return None
    shown = events[-MOST_DECISIONS:]
    rows = [
        {
            "step": event.step,
            "action": WORDS.get(event.action, event.action),
            "rule": event.rule,
            "reason": event.reason,
        }
        for event in shown
    ]
    return {"rows": rows, "left_out": len(events) - len(shown), "folded": len(rows) > MOST_OPEN}


def _card(panel: Panel, said: str, compared: bool) -> dict[str, str]:
    reading = panel.compared if compared and panel.compared else panel.reading
    return {"key": panel.key, "title": panel.title, "reading": reading, "facts": said}


def _write_pictures(out: Path, drawn: Mapping[Panel, render.Spec], title: str, progress: Progress) -> None:
    folder = out / PICTURES
    if folder.is_symlink():
        raise ReportError(f"{folder}: this is a link, through which no figures are written; remove it; the page stands")
    folder.mkdir(exist_ok=True)
    pictures = {}
    for panel, spec in drawn.items():
        progress(panel.title)
        try:
            pictures[panel.key] = render.png(spec, panel.title)
        except ValueError as error:  # what vl-convert raises
            said = str(error).partition("\n")[0]
            raise ReportError(f"{folder}: {panel.key}.png cannot be drawn ({said}); the page stands") from error
        with written_whole(folder / f"{panel.key}.png") as file:
            file.write(pictures[panel.key])
    with written_whole(out / OVERVIEW) as file:
        file.write(render.overview(pictures, title))
