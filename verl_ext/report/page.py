"""The report's pages: each is one HTML file that needs nothing else, with its figures as PNG files in the same folder.

vl-convert draws the figures without a network or a browser.
"""

import io
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.environment import TemplateStream
from markupsafe import Markup

from verl_ext import __version__
from verl_ext.base.metrics import Metric
from verl_ext.base.printable import printable
from verl_ext.guard.state import Event
from verl_ext.report.clocks import page_clocks
from verl_ext.report.comparison import Comparison, MetricCell
from verl_ext.report.figures.charts import (
    BLUE,
    DARK_COLOURS,
    FEW_LINES,
    HOVER_LAYER,
    INK,
    PAPER,
    PLOT_WIDTH,
    VEGA_CONFIG,
    thin_readings,
)
from verl_ext.report.figures.overlay import line_looks
from verl_ext.report.figures.panels import PANELS, Panel
from verl_ext.report.files import is_regular, open_regular, written_whole
from verl_ext.report.run import DECIDED, MOST_MESSAGE, ReportError, Run, sentence_of
from verl_ext.report.seeds import Lines
from verl_ext.report.tables import ShownTable
from verl_ext.report.terminal import not_finite, step_range
from verl_ext.report.verdict import FACTS_HEADING, REASONS, RunVerdict, reasons

PAGE, OVERVIEW, PICTURES, TRAJECTORIES = "report.html", "report.png", "figures", "trajectories.html"
GENERATOR, HEAD_BYTES = b'name="generator" content="verl_ext', 2000  # the mark of our pages, within this many bytes
# Variables of the template that a page may lack.
SECTIONS = ("verdict", "comparison", "variants", "trajectories", "guard", "said", "tables", "metrics", "clocks")
# Readings of all metrics together that a page has (some 10 bytes each), and of one metric at most and at least.
ALL_READINGS, MOST_READINGS, FEWEST_READINGS = 36_000, 300, 20
MOST_TITLE = 4  # lines of a comparison that its title names
MOST_DECISIONS, MOST_OPEN = 100, 10  # decisions on the page; more than MOST_OPEN are folded
TEMPLATES = Path(__file__).parent / "templates"
BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
PNG_SCALE = 2  # pixels of a PNG per pixel of the figure
OVERVIEW_COLUMNS, OVERVIEW_MARGIN, OVERVIEW_TITLE = 3, 24, 22  # the last two in pixels

Spec = dict[str, Any]
Progress = Callable[[str], None]  # called with the name of the current figure


def write_report(run: Run, verdict: RunVerdict, out: Path, *, trajectories: str | None = None, **options: Any) -> Path:
    """Writes the page of one run, and its figures.

    Args:
        trajectories: the page of trajectories to link to, relative to this page.
        options: options of `write_page`.
    """
    files = ", ".join(file.name for file in run.sources)
    context = {
        "title": run.name,
        "about": f"{step_range(run.steps)}, {len(run.metrics)} metrics" + (f" from {files}" if files else ""),
        "verdict": verdict,
        "reasons": reasons,
        "facts_heading": FACTS_HEADING,
        "legend": sentence_of(REASONS),
        "notes": [*not_finite(run), *run.all_notes()],
        "trajectories": trajectories,
        "guard": _decisions(run.events),
        "clocks": page_clocks({"": [run]}),
        "metrics": all_metrics({"": [run]}),
    }
    charts = {panel: panel.chart(run) for panel in PANELS}
    said = {panel.key: panel.facts(run) for panel in PANELS}
    return write_page(out, charts, context, said=said, of_verl=run.trainer in ("", "verl"), **options)


def write_comparison(comparison: Comparison, out: Path, **options: Any) -> Path:
    """Writes the page of several runs, with `options` of `write_page`."""
    lines, runs = comparison.lines, comparison.runs
    tops: Sequence[str | Metric] = [*lines]
    sides: Sequence[tuple[str | Metric, Sequence[MetricCell]]] = comparison.rows
    if len(lines) > FEW_LINES:  # a row for each line
        tops = [metric for metric, _ in comparison.rows]
        sides = [(name, [cells[at] for _, cells in comparison.rows]) for at, name in enumerate(lines)]
    more = f" and {len(lines) - MOST_TITLE} more" if len(lines) > MOST_TITLE else ""
    context = {
        "title": " / ".join([*lines][:MOST_TITLE]) + more,
        "about": f'{len(runs)} runs; changes are against "{next(iter(lines))}"',
        "comparison": comparison,
        "tops": tops,
        "sides": sides,
        "looks": line_looks([*lines]),
        "clocks": page_clocks(lines),
        "notes": [f"{name}: {note}" for name, run in runs.items() for note in run.notes],
        "metrics": all_metrics(lines),
    }
    charts = {panel: panel.chart_of_all(lines) for panel in PANELS}
    return write_page(
        out, charts, context, of_verl=all(run.trainer in ("", "verl") for run in runs.values()), **options
    )


def write_page(
    out: Path,
    charts: Mapping[Panel, alt.LayerChart | None],
    context: Mapping[str, Any],
    *,
    said: Mapping[str, str] | None = None,
    of_verl: bool = True,
    refresh: int | None = None,
    pictures: bool = True,
    tidy: bool | None = None,
    progress: Progress = lambda what: None,
) -> Path:
    """Writes a page of these figures, and the figures as PNG files.

    Args:
        out: a folder, created if it is missing.
        charts: the figures; None if there is nothing to draw, which the page then reports.
        context: the parts above them: `title`, `about`, `notes` and the template's sections.
        said: the text below a figure, by the key of its panel.
        of_verl: name verl's settings, and the figures without data, with what would make the run log it. What would
            make a run of another trainer log more is not known.
        refresh: seconds after which the page loads itself again.
        pictures: write the PNG files too.
        tidy: remove files of an earlier report in the folder; by default if there is one.
        progress: called with the name of the current figure.
    """
    said = said or {}
    tidy = is_ours(out) if tidy is None else tidy  # before anything is written
    drawn = {panel: spec_of(chart) for panel, chart in charts.items() if chart is not None}
    out.mkdir(parents=True, exist_ok=True)
    progress("page")
    page = template("report.html.j2").stream(
        {**dict.fromkeys(SECTIONS), "looks": {"": (BLUE, ())}, **context},
        panels=[
            {
                "key": panel.key,
                "title": panel.title,
                "reading": panel.caption(compares="comparison" in context, of_verl=of_verl),
                "facts": said.get(panel.key, ""),
            }
            for panel in drawn
        ],
        missing=[panel for panel in charts if panel not in drawn and of_verl],
        figures={panel.key: _in_columns(spec) for panel, spec in drawn.items()},
        dark=DARK_COLOURS,
        config=VEGA_CONFIG,
        script_json=script_json,
        few_lines=FEW_LINES,
        libraries=libraries(),
        style=asset("report.css"),
        script=asset("report.js"),
        refresh=refresh,
        version=__version__,
    )
    write_html(page, out / PAGE)  # first: a failure to draw pictures must not prevent the page
    if tidy:
        _forget(out, drawn if pictures else {}, trajectories=context.get("trajectories"))
    if pictures and drawn:
        _write_pictures(out, drawn, context["title"], progress)
    return out / PAGE


def is_ours(out: Path) -> bool:
    """Returns True if this folder has a report; then files with the names of its figures are a report's as well."""
    if (out / PAGE).is_symlink():  # a link to a report that may be anywhere
        return False
    try:
        with open_regular(out / PAGE) as page:
            return GENERATOR in page.read(HEAD_BYTES)
    except OSError:
        return False


def _forget(out: Path, drawn: Collection[Panel], trajectories: str | None) -> None:
    """Removes files of an earlier report that would pass for this one's. A report writes no links."""
    gone = [out / PICTURES / f"{panel.key}.png" for panel in PANELS if panel not in drawn]
    if not drawn:
        gone.append(out / OVERVIEW)
    if not trajectories:
        gone.append(out / TRAJECTORIES)
    for file in gone:
        if is_regular(file) and not file.is_symlink() and not (out / PICTURES).is_symlink():
            file.unlink(missing_ok=True)


def all_metrics(lines: Lines) -> dict[str, Any]:
    """Returns every metric for the page's list: the runs, each with its line, and by metric the number of each run that
    has it, its steps as differences, the values, and whether readings were left out. Of a long run, the least and the
    largest of each stretch are kept."""
    runs = [(line, run) for line, own in lines.items() for run in own]
    most = min(max(ALL_READINGS // max(sum(len(run.metrics) for _, run in runs), 1), FEWEST_READINGS), MOST_READINGS)
    found: dict[str, list[Any]] = {}
    for number, (_, run) in enumerate(runs):
        for name, series in run.metrics.items():
            finite = series.finite()
            if (kept := thin_readings(finite, most)).steps.size:
                values = [float(f"{value:.5g}") for value in kept.values]
                steps = np.diff(kept.steps, prepend=0).tolist()
                found.setdefault(name, []).append([number, steps, values, len(kept.steps) < len(finite.steps)])
    return {"runs": [(line, run.name) for line, run in runs], "metrics": dict(sorted(found.items()))}


def _decisions(events: Sequence[Event]) -> dict[str, Any] | None:
    """Returns the guard's part of the page; None if it decided nothing."""
    if not events:
        return None
    shown = events[-MOST_DECISIONS:]
    rows = [(str(event.step), DECIDED.get(event.action, event.action), event.rule, event.reason) for event in shown]
    table = ShownTable("The guard's decisions", ("step", "action", "rule", "reason"), rows)
    return {"table": table, "left_out": len(events) - len(shown), "folded": len(rows) > MOST_OPEN}


def _write_pictures(out: Path, drawn: Mapping[Panel, Spec], title: str, progress: Progress) -> None:
    folder = out / PICTURES
    if folder.is_symlink():
        raise ReportError(
            f"{folder}: this is a link, and figures are not written through links; remove it; the page was written"
        )
    folder.mkdir(exist_ok=True)
    pictures = {}
    for panel, spec in drawn.items():
        progress(panel.title)
        try:
            pictures[panel.key] = png(spec, panel.title)
        except ValueError as error:  # what vl-convert raises
            reason = str(error).partition("\n")[0]
            raise ReportError(f"{folder}: {panel.key}.png cannot be drawn ({reason}); the page was written") from error
        with written_whole(folder / f"{panel.key}.png") as file:
            file.write(pictures[panel.key])
    with written_whole(out / OVERVIEW) as file:
        file.write(overview(pictures, title))


@lru_cache
def template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # Text that is not markup may quote anything.
        finalize=lambda value: printable(value, MOST_MESSAGE) if type(value) is str else value,
    )
    return environment.get_template(name)


def script_json(value: object) -> Markup:
    """Returns JSON that is safe in a script element, whatever its strings are: no `</script>`, no `<!--`.

    Invisible characters are escaped, so that the page's source shows them.
    """
    text = orjson.dumps(value).decode().replace("<", r"\u003c")
    if text.isprintable():
        return Markup(text)
    return Markup(BEYOND_ASCII.sub(lambda each: each[0] if each[0].isprintable() else json.dumps(each[0])[1:-1], text))


def asset(name: str) -> Markup:
    """Returns a style sheet or a script of the templates."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def write_html(page: TemplateStream, file: Path) -> None:
    """Writes a page in one step: a browser that reloads it must never see half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as out:
        page.dump(out, encoding="utf-8")


def spec_of(chart: alt.LayerChart) -> Spec:
    """Returns the figure as the page embeds it: as wide as its column, interactive."""
    return chart.properties(width="container").to_dict(validate=False) | {"config": VEGA_CONFIG}  # twice as fast


def _in_columns(spec: Spec) -> Spec:
    """Returns the figure with the rows of its data as columns, at a third of the size; repeats are counted."""

    def shortened(column: Sequence[Any]) -> Any:
        runs = [(value, sum(1 for _ in equal)) for value, equal in groupby(column)]
        return {"runs": runs} if 2 * len(runs) < len(column) else column

    def packed(rows: Sequence[Spec]) -> Any:
        if not rows or any(row.keys() != rows[0].keys() for row in rows):
            return rows
        return {"columns": {name: shortened([row[name] for row in rows]) for name in rows[0]}}

    return {**spec, "datasets": {name: packed(rows) for name, rows in spec.get("datasets", {}).items()}}


def png(spec: Spec, title: str) -> bytes:
    """Draws one figure under its title, without the interactive layer."""
    import vl_convert

    layers: Sequence[Spec] = [layer for layer in spec["layer"] if layer.get("name") != HOVER_LAYER]
    still = {key: value for key, value in spec.items() if key != "params"}
    still |= {"layer": layers, "width": PLOT_WIDTH, "title": title, "config": VEGA_CONFIG | {"padding": 12}}
    return vl_convert.vegalite_to_png(json.dumps(still), scale=PNG_SCALE)


def overview(pictures: Mapping[str, bytes], title: str) -> bytes:
    """Draws all figures in one picture, at half their size."""
    from PIL import Image, ImageDraw, ImageFont

    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures.values()]
    small = [
        image.resize((image.width // PNG_SCALE, image.height // PNG_SCALE), Image.Resampling.LANCZOS)
        for image in images
    ]
    width, height = max(image.width for image in small), max(image.height for image in small)
    columns = min(OVERVIEW_COLUMNS, len(small))
    top = 2 * OVERVIEW_MARGIN + OVERVIEW_TITLE
    size = (columns * width + 2 * OVERVIEW_MARGIN, -(-len(small) // columns) * height + top)
    sheet = Image.new("RGB", size, PAPER)
    font = ImageFont.load_default(OVERVIEW_TITLE)
    ImageDraw.Draw(sheet).text((OVERVIEW_MARGIN + 12, OVERVIEW_MARGIN), title, fill=INK, font=font)
    for place, image in enumerate(small):
        sheet.paste(image, (OVERVIEW_MARGIN + place % columns * width, top + place // columns * height))
    written = io.BytesIO()
    sheet.save(written, "PNG")
    return written.getvalue()


@lru_cache(maxsize=1)
def libraries() -> Markup:
    """Returns Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`.

    vl-convert takes seconds to put it together, so it is kept in the user's cache, if there is one.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    kept = folder / "verl_ext" / f"vega-{metadata.version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        return Markup(kept.read_text(encoding="utf-8"))
    import vl_convert

    script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub forgets that both have defaults
    script = script.replace("</script", r"<\/script")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(kept) as out:
            out.write(script.encode())
    return Markup(script)
