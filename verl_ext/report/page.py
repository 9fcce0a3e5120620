"""The report's folder: one page that needs nothing else, and its figures as PNG files."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from verl_ext import __version__
from verl_ext.report import render
from verl_ext.report.comparison import Comparison
from verl_ext.report.comparison_text import comparison_rows
from verl_ext.report.figures.overlay import overlay
from verl_ext.report.figures.panels import PANELS, Panel, facts
from verl_ext.report.figures.style import DARK, SERIES
from verl_ext.report.html import script_json, source, template
from verl_ext.report.run import Run
from verl_ext.report.terminal import not_finite
from verl_ext.report.verdict import Verdict

PAGE, OVERVIEW, PICTURES = "report.html", "report.png", "figures"

Progress = Callable[[str], None]  # told what is being drawn


def write_report(
    run: Run,
    verdict: Verdict,
    out: Path,
    *,
    trajectories: str | None = None,
    refresh: int | None = None,
    pictures: bool = True,
    progress: Progress = lambda what: None,
) -> Path:
    """Write the page of one run, and the figures beside it.

    Args:
        out: a folder, made where it is missing.
        trajectories: where the page links to, relative to it.
        refresh: seconds after which the page loads itself again.
        pictures: write the PNG files too.
    """
    steps = f"step {run.steps[0]}" if len(run.steps) == 1 else f"steps {run.steps[0]} to {run.steps[-1]}"
    files = ", ".join(file.name for file in run.sources)
    context = {
        "title": run.name,
        "about": f"{steps}, {len(run.metrics)} metrics" + (f" from {files}" if files else ""),
        "verdict": verdict,
        "notes": [*not_finite(run), *run.notes],
        "trajectories": trajectories,
    }
    charts = {panel: panel.chart(run) for panel in PANELS}
    said = {panel.key: facts(panel, run) for panel in PANELS}
    return _write(out, charts, said, context, refresh, pictures, progress)


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
    return _write(out, charts, {}, context, None, pictures, progress)


def _write(
    out: Path,
    charts: Mapping[Panel, alt.LayerChart | None],
    said: Mapping[str, str],
    context: Mapping[str, Any],
    refresh: int | None,
    pictures: bool,
    progress: Progress,
) -> Path:
    drawn = {panel: render.spec_of(chart) for panel, chart in charts.items() if chart is not None}
    out.mkdir(parents=True, exist_ok=True)
    progress("page")
    page = template("report.html.j2", run_colour=lambda place: SERIES[place % len(SERIES)]).render(
        {"verdict": None, "comparison": None, "trajectories": None, **context},
        panels=[_card(panel, said.get(panel.key, ""), "comparison" in context) for panel in drawn],
        missing=[panel for panel in charts if panel not in drawn],
        figures=script_json({panel.key: spec for panel, spec in drawn.items()}),
        dark=script_json(DARK),
        libraries=render.libraries(),
        style=source("report.css"),
        script=source("report.js"),
        refresh=refresh,
        version=__version__,
    )
    if pictures and drawn:
        _write_pictures(out, drawn, context["title"], progress)
    _forget_pictures(out, drawn if pictures else {})
    _replace(out / PAGE, page)
    return out / PAGE


def _replace(file: Path, text: str) -> None:
    """In one step: a page that reloads itself must not find half a file."""
    beside = file.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def _forget_pictures(out: Path, drawn: Collection[Panel]) -> None:
    """Those of an earlier report in this folder, which would pass for this one's."""
    gone = [out / PICTURES / f"{panel.key}.png" for panel in PANELS if panel not in drawn]
    for file in gone if drawn else [*gone, out / OVERVIEW]:
        file.unlink(missing_ok=True)


def _card(panel: Panel, said: str, compared: bool) -> dict[str, str]:
    reading = panel.compared if compared and panel.compared else panel.reading
    return {"key": panel.key, "title": panel.title, "reading": reading, "facts": said}


def _write_pictures(out: Path, drawn: Mapping[Panel, render.Spec], title: str, progress: Progress) -> None:
    (out / PICTURES).mkdir(exist_ok=True)
    pictures = {}
    for panel, spec in drawn.items():
        progress(panel.title)
        pictures[panel.key] = render.png(spec, panel.title)
        (out / PICTURES / f"{panel.key}.png").write_bytes(pictures[panel.key])
    (out / OVERVIEW).write_bytes(render.overview(pictures, title))


def unique_names(runs: Sequence[Run]) -> list[str]:
    """What tells the runs apart: their names, the folder in which runs of one name differ, or a number after all."""
    names = [run.name for run in runs]
    parents = [[parent.name for parent in run.sources[0].resolve().parents] if run.sources else [] for run in runs]
    alike = len(set(names)) == 1
    for depth in range(min(map(len, parents), default=0)):
        if len(set(names)) == len(names):
            return names
        folders = [folders[depth] for folders in parents]
        if len(set(folders)) > 1:
            names = folders if alike else [f"{folder}/{name}" for folder, name in zip(folders, names, strict=True)]
            alike = False
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
