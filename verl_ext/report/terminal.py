"""One run on one screen: what happened, why, what to do; then how each metric moved, and what is missing."""

import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from verl_ext.base.metrics import METRICS, Metric, find, ours
from verl_ext.base.printable import printable, wrap_name
from verl_ext.diagnosis.findings.guard import skipped_share
from verl_ext.diagnosis.findings.routers import ROUTER, is_moe
from verl_ext.diagnosis.names import aliases_of, quantity_of
from verl_ext.diagnosis.rank import Suspect
from verl_ext.diagnosis.series import NOW_READINGS, Series, beginning_of, now_of
from verl_ext.report.run import ENDED, MOST_MESSAGE, Run, validation_label
from verl_ext.report.tables import ruled_table
from verl_ext.report.verdict import FACTS_HEADING, REASONS, RunVerdict, reasons

Unit = Literal["number", "small", "share", "count", "seconds"]

LINE_WIDTH, LABEL_COLUMNS, SPARK_CELLS = 80, 22, 22  # columns of the whole, of a label and of a sparkline
VALUES = ("first", "now", "worst")  # columns of the table
NUMBER_COLUMNS, SHORTEST_LABEL = 11, 10  # columns of a number with the space around it, and of a label
VALIDATION_READINGS = 1  # a validation is a mean over whole files, and the one before is steps old
SCORE = Metric("score", "a score of a validation in another framework", better="higher")
EVENT_NOTE = "guard, step "
MOST_EVENTS, MOST_NAMED, MOST_VALIDATIONS = 3, 3, 6
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
ASCII = str.maketrans({"±": "+/-", "×": "x", "–": "-", "—": "-", "…": "...", "·": "-", "’": "'"})  # noqa: RUF001
# A smaller range is drawn as a nearly flat line, so that mere noise does not look dramatic.
LEAST_SPAN = {"log": np.log(2.0), "share": 0.01}
LEAST_RELATIVE_SPAN = 0.02
COLOURS = {
    "healthy": "green",
    "suspect": "yellow",
    "flat": "yellow",
    "drifting": "yellow",
    "past the boundary": "red",
    "collapsed": "red",
    "dead": "red",
    "stopped": "red",
    "not enough data": "cyan",
}

WORST: dict[str, Callable[[np.ndarray], float]] = {
    "highest": np.max,
    "lowest": np.min,
    "largest": lambda values: values[np.argmax(np.abs(values))],
}
FORMATS: dict[str, Unit] = {"share": "share", "nats per token": "small", "tokens": "count", "s": "seconds"}
ROWS = (  # in the order of the table
    "critic/score/mean",
    "vllm_kl/k3",
    "vllm_kl/k1",
    "vllm_kl/log_ratio_abs_mean",
    "vllm_kl/prob_diff_max",
    "correction/dropped",
    "correction/dropped_low",
    "correction/dropped_high",
    "router/any_layer_differs",
    "router/agreement",
    "router/agreement/error",
    "router/load_effective",
    "actor/entropy",
    "response_length/mean",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/kl_loss",
    "timing_s/step",
)
PARTS = ("correction/dropped_low", "correction/dropped_high", "router/agreement/error")  # parts of a row above them
# The setting that makes a run log a metric.
REMEDIES = [
    ("vllm_kl/k3", "the engines' mismatch", ours.GAP.override),
    ("router/agreement", "router agreement", ours.ROUTING.override),
]
MOST_CAUSE_LINES = 4  # of a cause


@dataclass(frozen=True)
class DashboardRow:
    """One metric: its value at the start and now, as in the verdict (`diagnosis.series`).

    Attributes:
        worst: the reading furthest in the bad direction; None if neither direction is bad.
    """

    label: str
    metric: str
    first: float
    now: float
    worst: float | None
    unit: Unit
    series: Series


def dashboard_rows(run: Run) -> list[DashboardRow]:
    """Returns the rows of the table, without metrics that the run never logged."""
    found = []
    for name in ROWS:
        indent = "  " if name in PARTS else ""
        found.append(_metric_row(run.get(name), name, indent + METRICS[name].label))
        if name == "router/agreement/error" and (layers := run.layers("router/agreement")):
            # Only the layer that agrees least at the end: models have up to 94 layers.
            worst = min(layers, key=lambda number: now_of(layers[number]))
            found.append(
                _metric_row(layers[worst], f"router/agreement/layer_{worst:02d}", f"  lowest now: layer {worst}")
            )
    for name in run.validations()[:MOST_VALIDATIONS]:
        found.append(_metric_row(run.get(name), name, f"val {validation_label(name)}", VALIDATION_READINGS))
    return [row for row in found if row is not None]


def format_of(metric: Metric) -> Unit:
    """Returns the unit in which a metric's values are written."""
    return FORMATS.get(metric.unit, "small" if metric.scale == "log" else "number")


def format_value(value: float, unit: Unit) -> str:
    """Returns the value as text, of at most 9 columns for usual values."""
    match unit:
        case "share":
            return f"{100 * value:.2f} %"
        case "small":
            return f"{value:.1e}"
        case "seconds":
            return f"{value:.1f} s"
        case "count":
            return f"{value:,.0f}"
        case _:
            if value == 0 or 0.01 <= abs(value) < 1e5:
                return f"{value:.3f}"
            return f"{value:.2e}" if value > 0 else f"{value:.1e}"


def sparkline(series: Series, span: tuple[int, int], unit: Unit, cells: int = SPARK_CELLS, blocks: str = BLOCKS) -> str:
    """Draws the series from the first step to the last of `span`; for "small", the logarithm of the values' size."""
    series = series.finite()
    if not series.steps.size:
        return ""
    steps = span[1] - span[0] + 1
    cells = min(cells, steps)
    heights = _log_size(series.values) if unit == "small" else series.values
    cell: np.ndarray = (series.steps - span[0]) * cells // steps
    groups = [heights[cell == index] for index in range(cells)]
    medians = np.array([np.median(group) if group.size else np.nan for group in groups])
    low, high = float(np.nanmin(medians)), float(np.nanmax(medians))
    least = LEAST_SPAN.get("log" if unit == "small" else unit, LEAST_RELATIVE_SPAN * max(abs(low), abs(high)))
    if (missing := least - (high - low)) > 0:
        bottom = low - 0.45 * missing  # the middle would be the border of two blocks
        low = 0.0 if bottom < 0 <= low and unit != "small" else bottom  # 0 is drawn at the bottom
        high = low + least
    share = (medians - low) / (high - low) if high > low else np.where(np.isnan(medians), np.nan, 0.0)
    return "".join(" " if np.isnan(at) else blocks[min(int(at * len(blocks)), len(blocks) - 1)] for at in share)


def step_range(steps: Collection[int]) -> str:
    """Returns the first step and the last, in words."""
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def encodable(text: str, options: ConsoleOptions) -> str:
    """Returns the text as this terminal can show it; characters without an ASCII equivalent become `?`."""
    return text.translate(ASCII).encode("ascii", "replace").decode() if options.ascii_only else text


def indented(text: str, options: ConsoleOptions, style: str = "") -> Padding | Text:
    """Returns a paragraph one column to the right, like the tables."""
    if isinstance(text, Command):
        return Text(f" {encodable(printable(text), options)}", style=style, no_wrap=True, overflow="ignore")
    return Padding(Text(encodable(printable(text, MOST_MESSAGE), options), style=style), (0, 0, 0, 1), expand=False)


class Command(str):
    """A line that is copied: it may be longer than the terminal is wide, and is not broken within its words."""


def continued(command: str, width: int, first: str = "") -> list[Command]:
    """Returns a command in lines of at most this width, if its words allow, as a shell continues them."""
    lines = textwrap.wrap(
        command, max(width - 2, 1), initial_indent=first, break_long_words=False, break_on_hyphens=False
    )
    return [Command(line) for line in (*(f"{line} \\" for line in lines[:-1]), *lines[-1:])]


@dataclass(frozen=True)
class Dashboard:
    """The run for a terminal of 80 columns or fewer, in ASCII if the terminal has no UTF-8.

    A sparkline spans all steps of the run. Each cell is the median of its steps, and blank if none was finite. The
    axis of a divergence is logarithmic.
    """

    run: Run
    verdict: RunVerdict

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style in self._heading(options.max_width - 2):
            yield indented(text, options, style) if text else ""
        # A narrow terminal has no sparklines, then shorter labels, then fewer numbers.
        wide, room = options.max_width >= LINE_WIDTH, options.max_width - 2
        table = ruled_table(LINE_WIDTH if wide else None)
        fit = 3 if wide else max((room - SHORTEST_LABEL) // NUMBER_COLUMNS, 1)
        shown = [name for name in VALUES if name in ("now", "first", "worst")[:fit]]
        label = min(LABEL_COLUMNS, max(room - len(shown) * NUMBER_COLUMNS, 1))
        table.add_column("", overflow="fold", width=label)
        for name in shown:
            table.add_column(name, justify="right", overflow="fold", width=NUMBER_COLUMNS - 2)
        first, last = self.run.span
        if wide:
            table.add_column(f"step {first} to {last}", overflow="fold", width=SPARK_CELLS + 1, style="cyan")
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        for row in dashboard_rows(self.run):
            values = (getattr(row, name) for name in shown)
            line = [sparkline(row.series, (first, last), row.unit, blocks=blocks)] if wide else []
            table.add_row(
                Text(encodable(wrap_name(row.label, label), options)),
                *("" if value is None else format_value(value, row.unit) for value in values),
                *line,
            )
        if table.row_count:
            yield table
        if self.verdict.suspects and self.run.metrics:
            yield indented(REASONS, options)
        for note in notes(self.run, {step.do for step in self.verdict.steps}):
            short = note.startswith(EVENT_NOTE) and len(note) > LINE_WIDTH - 2
            yield indented(f"{note[: LINE_WIDTH - 5]}..." if short else note, options)

    def _heading(self, width: int) -> Iterator[tuple[str, str]]:
        """Yields lines and their styles; a command that needs several lines of this width can be pasted."""
        verdict = self.verdict
        at = f", step {self.run.steps[-1]}" if self.run.metrics else ""
        yield f"{self.run.name}{at}: {verdict.state}", f"bold {COLOURS[verdict.state]}"
        yield verdict.sentence, ""
        causes = ""
        for label, suspect in verdict.labelled():
            for line, style in _cause_lines(label, suspect, verdict):
                causes += f"{line}\n"
                yield line, style
        if verdict.alarm:
            yield "", ""
            yield verdict.alarm, "bold"
        if first := verdict.first:
            yield "", ""
            yield verdict.first_heading, "bold"
            for line in [first.do] if first.in_words else continued(first.do, width):
                yield line, "bold"
            if reason := verdict.reason_of(first):
                yield reason, ""
        if verdict.others:
            yield "", ""
            yield f"{verdict.others_heading}:", "bold"
            for step in verdict.others:
                lines = [] if step.in_words else continued(step.do, width, "- ")
                for line in [*lines, step.sentence] if len(lines) > 1 else [f"- {step.do}: {step.why}"]:
                    yield line, ""
        if facts := [fact for fact in verdict.other_facts if fact.text not in causes]:
            yield "", ""
            yield f"{FACTS_HEADING}:", "bold"
            for fact in facts:
                yield f"- {fact.dated}", "dim"


def _cause_lines(label: str, suspect: Suspect, verdict: RunVerdict) -> Iterator[tuple[str, str]]:
    """Yields a cause in at most MOST_CAUSE_LINES lines: its title, as much of the evidence for and against it as there
    are lines left, and the one thing to check. The page has all of it."""
    title = f"{label}: {suspect.cause.title}"
    check = f"check: {said}" if (said := verdict.check_of(suspect)) else ""
    said = verdict.sentence.lower()
    shared = (
        {sign.finding.name for sign in verdict.suspects[0].evidence} if suspect is not verdict.suspects[0] else set()
    )
    new = [
        sign for sign in suspect.evidence if not verdict.is_said(sign.finding.name) and sign.finding.text not in said
    ]
    kept = new if any(sign.points > 0 for sign in new) else suspect.evidence
    signs = sorted(kept, key=lambda sign: sign.finding.name in shared)  # the alternative first by what is its own
    speaks_for, speaks_against = reasons(signs)
    room = max(MOST_CAUSE_LINES - _part_lines(title) - _part_lines(check), 1)
    yield title, "bold" if suspect is verdict.suspects[0] else ""
    against = bool(speaks_against) and room > 1
    if speaks_for:
        yield _as_many("+ ", speaks_for, room - 1 if against else room), ""
    if against:
        yield _as_many("- ", speaks_against, 1), "dim"
    if check:
        yield _shortened(check, max(MOST_CAUSE_LINES - _part_lines(title) - 1, 1)), ""


def _part_lines(text: str) -> int:
    return len(textwrap.wrap(text, LINE_WIDTH - 1, break_on_hyphens=False))


def _shortened(text: str, lines: int) -> str:
    """Returns the text, cut behind a word if it would take more lines, and not within parentheses."""
    while _part_lines(text) > lines or (text.endswith(" ...") and text.count("(") > text.count(")")):
        if not (kept := text.removesuffix(" ...").rpartition(" ")[0]):  # a single long word
            return f"{text[: LINE_WIDTH - 5]} ..."
        text = f"{kept} ..."
    return text


def _as_many(start: str, texts: Sequence[str], lines: int) -> str:
    """Returns the first texts that together fit on this many lines, and how many are left."""
    for count in range(len(texts), 0, -1):
        more = f" (and {len(texts) - count} more)" if count < len(texts) else ""
        line = start + "; ".join(texts[:count]) + more
        if _part_lines(line) <= lines:
            return line
    return _shortened(start + texts[0], lines)


def _metric_row(series: Series | None, name: str, label: str, readings: int = NOW_READINGS) -> DashboardRow | None:
    if series is None:
        return None
    metric = find(name) or SCORE
    return DashboardRow(
        label=label,
        metric=name,
        first=beginning_of(series, readings),
        now=now_of(series, readings),
        worst=float(WORST[metric.worst](series.values)) if metric.worst else None,
        unit=format_of(metric),
        series=series,
    )


def notes(run: Run, advised: Collection[str] = ()) -> Iterator[str]:
    """Yields the lines below the table: skips, the guard, values that were not numbers, metrics that are not logged.

    Args:
        advised: overrides that the verdict advises already.
    """
    if run.metrics:
        medians = f"now: median of the last {NOW_READINGS} readings; first: of the first {NOW_READINGS}"
        yield f"{medians}; fewer in a short run; worst: of all"
    if run.validations():
        yield "val: the first and the last reading"
    if (skipped := skipped_share(run.readings)) is not None:
        yield f"updates skipped: {100 * skipped[0]:.3g} % in {skipped[1]} steps (guard/skipped)"
    for event in (each for each in run.events[-MOST_EVENTS:] if each != run.end):
        reason = " ".join(event.reason.split())
        yield reason if event.rule == ENDED else f"{EVENT_NOTE}{event.step}: {event.action}: {reason}"
    if (more := len(run.validations()) - MOST_VALIDATIONS) > 0:
        yield f"{more} more scores of validation sets"
    yield from not_finite(run)
    yield from run.all_notes()
    for metric, what, override in REMEDIES if run.of_verl and run.metrics else ():
        experts = metric.startswith(ROUTER) and not is_moe(run.readings)  # a dense model has none
        if run.get(metric) is None and override not in advised and not experts:
            yield f"not logged: {what}; add {override}"


def not_finite(run: Run) -> Iterator[str]:
    """Yields the metrics that were not finite numbers, and how often; those of the table first. One that nobody knows
    and that never was a number was not logged: loggers write both as null."""
    missing = {
        name: int((~np.isfinite(series.values)).sum())
        for name, series in run.metrics.items()
        if np.isfinite(series.values).any() or quantity_of(name) is not None
    }
    table = [alias.name for metric in ROWS for alias in aliases_of(metric) if alias.name in missing]
    names = [name for name in dict.fromkeys([*table, *sorted(missing)]) if missing[name]]
    for name in names[:MOST_NAMED]:
        yield f"{name} was not a finite number in {missing[name]} of {len(run.metrics[name].values)} steps"
    if (more := len(names) - MOST_NAMED) > 0:
        yield f"{more} more metrics were not finite in some steps"


def _log_size(values: np.ndarray) -> np.ndarray:
    """Returns logarithms of sizes. Zeros, from engines that agree exactly, are drawn as low as the smallest other
    value."""
    size = np.abs(values)
    positive = size[size > 0]
    return np.log(np.maximum(size, positive.min() if positive.size else 1.0))
