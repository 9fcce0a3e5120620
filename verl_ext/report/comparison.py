"""Several runs side by side: the end of each metric, and the differences to the first line that are more than noise.

A line is a run, or the runs of one setting with several seeds (`seeds.group_runs`). `compare_runs` compares, and each
cell has its texts, for a page and a notebook; `ComparisonTable` prints the table in a terminal.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from verl_ext.base.arguments import similar_names
from verl_ext.base.metrics import Metric, find
from verl_ext.base.printable import wrap_name
from verl_ext.diagnosis.judge import judge
from verl_ext.diagnosis.names import REWARD
from verl_ext.diagnosis.noise import (
    CAVEAT,
    FEWEST_EFFECTIVE,
    FLOOR,
    LEVEL,
    ROUNDING,
    TOO_FEW,
    Difference,
    Final,
    compare_finals,
    final,
    judge_differences,
)
from verl_ext.diagnosis.series import Series
from verl_ext.report.run import ReportError, Run
from verl_ext.report.seeds import Lines, group_runs, unique_names
from verl_ext.report.tables import ruled_table
from verl_ext.report.terminal import Unit, encodable, format_of, format_value, indented

ROWS = (  # after the reward and the validation
    "vllm_kl/k3",
    "vllm_kl/k1",
    "vllm_kl/log_ratio_abs_mean",
    "vllm_kl/prob_diff_max",
    "vllm_kl/prob_diff_mean",
    "correction/dropped",
    "router/agreement",
    "router/any_layer_differs",
    "actor/entropy",
    "actor/kl_loss",
    "response_length/mean",
    "actor/grad_norm",
    "actor/pg_clipfrac",
    "guard/skipped",
    "timing_s/step",
)
ENOUGH_SEEDS = 5  # fewer find only large differences
SHARES = ("guard/skipped",)  # of the updates of the whole run, without a noise test
UNCERTAIN = "not certain"  # counts by itself, and not after the correction for the other comparisons
SHORT = {"within noise": "noise", TOO_FEW: "too few"}  # verdicts in narrow columns
LEAST_COLUMN = 13  # columns that a value with its error needs
VERDICT_STYLES = {"better": "green", "worse": "red", "differs": "yellow"}


@dataclass(frozen=True)
class MetricCell:
    """One metric of one line.

    Attributes:
        metric: the row's metric.
        final: the final value, of SHARES the mean over the whole run; None if the line lacks the metric. Of several
            seeds, the mean of their final values, and the standard error of that mean.
        spread: what stands behind the ±: one standard deviation between seeds, if any line has several; else, one
            standard error.
        seeds: number of runs that have the metric.
        difference: the difference to the first line; None for the first, and if one of the two has no final value.
        verdict: "better", "worse", "differs", "not certain", "within noise" or "too few readings to tell", after the
            correction of `_judge_rows`; empty if nothing was compared.
    """

    metric: Metric
    final: Final | None = None
    spread: float | None = None
    seeds: int = 1
    difference: Difference | None = None
    verdict: str = ""

    @property
    def value(self) -> str:
        """The final value with its spread as text; "-" if the line lacks the metric."""
        if self.final is None:
            return "-"
        if self.final.scale == "log" and self.final.mean <= FLOOR * (1 + ROUNDING):
            return f"below {FLOOR:.0e}"
        mean = format_value(self.final.mean, format_of(self.metric))
        if self.spread is None:
            return mean
        if self.final.scale == "log":  # the spread is of the logarithm
            return f"{mean} ±{100 * np.expm1(self.spread):.0f} %"
        number, _, unit = mean.partition(" ")
        spread = _size_text(self.spread, format_of(self.metric)).partition(" ")[0]
        return f"{number} ±{spread} {unit}".rstrip()

    @property
    def change(self) -> str:
        """The difference to the first line as text; "" if nothing was compared."""
        return "" if self.difference is None else _signed_text(self.metric, self.difference.change)

    @property
    def interval(self) -> str:
        """The 99 % interval of the change, by itself, as text; "" if there is none."""
        if self.difference is None or (interval := self.difference.interval) is None:
            return ""
        return " to ".join(_signed_text(self.metric, end) for end in interval)


Row = tuple[Metric, tuple[MetricCell, ...]]  # a cell for every line; the first line is the baseline


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of the table, and the runs of each line, by its name.

    Attributes:
        basis: what is compared, to be read before the table.
        notes: what is odd or open.
    """

    lines: Lines
    rows: tuple[Row, ...] = ()
    basis: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> dict[str, Run]:
        """Each run by its line's name; with its own name too, if the line has several."""
        return {
            name if len(line) == 1 else f"{name}: {own}": run
            for name, line in self.lines.items()
            for own, run in zip(unique_names(line), line, strict=True)
        }


def compare_runs(
    runs: Sequence[Run],
    extra: Sequence[str] = (),
    window: int | None = None,
    cut: bool = True,
    joined: Lines | None = None,
    apart: bool = False,
) -> Comparison:
    """Compares the ends of lines with the first one's.

    Args:
        runs, joined, apart: as in `group_runs`; two lines or more.
        extra: names of further metrics.
        window: steps, as in `noise.final`.
        cut: ignore steps after the shortest run's last step, so that all windows end at the same step.

    Raises ReportError for fewer than two lines.
    """
    lines = group_runs(runs, joined, apart)
    if len(lines) < 2:
        raise ReportError(f"a comparison needs two runs or more; given: {len(lines)}")
    whole = Comparison(lines)
    common = min(int(run.steps[-1]) for run in whole.runs.values())
    if late := [name for name, run in whole.runs.items() if cut and run.steps[0] > common]:
        raise ReportError(
            f"{', '.join(late)} begins after step {common}, where another run ends: there is nothing to compare"
        )
    cut_lines = [[_cut_at(run, common) if cut else run for run in line] for line in lines.values()]
    cut_runs = [run for line in cut_lines for run in line]
    seeds = any(len(line) > 1 for line in cut_lines)
    rows: list[Row] = []
    for metric in _table_metrics(cut_runs, extra):
        cells = [_cell(line, metric, window, seeds) for line in cut_lines]
        if any(cell.final for cell in cells):
            rows.append((metric, (cells[0], *(_compare_cell(cells[0], cell) for cell in cells[1:]))))
    judged = _judge_rows(rows)
    notes = []
    for name, run in whole.runs.items():
        if (learning := judge(run.readings).learning).state == "collapsed":
            notes.append(f"{name}: {learning.text}")
    notes += _comparison_notes(lines, judged, min(len(run.steps) for run in cut_runs))
    logged = {name for run in cut_runs for name in run.metrics}
    shown = {metric.name for metric, _ in judged}
    for name in dict.fromkeys(extra):
        if name not in shown:
            notes.append(f"{name} has no finite value in any run{similar_names(name, logged)}")
    basis = tuple(_basis(lines, window, common if cut else None))
    return replace(whole, rows=_in_own_names(judged, cut_runs), basis=basis, notes=tuple(notes))


def _in_own_names(rows: Sequence[Row], runs: Sequence[Run]) -> tuple[Row, ...]:
    """Returns the rows under the name that all runs log, if they log the same; without a name, if they differ."""

    def own(metric: Metric) -> Metric:
        names = {run.own_name(metric.name) for run in runs if run.get(metric.name) is not None}
        return replace(metric, name=names.pop() if len(names) == 1 else metric.label)

    return tuple((own(metric), cells) for metric, cells in rows)


def _table_metrics(runs: Sequence[Run], extra: Sequence[str]) -> Iterator[Metric]:
    """Yields the possible rows, in their order: reward, validation, the known metrics, those that the user named."""
    validation = sorted({name for run in runs for name in run.validations()})
    known = [REWARD, *validation, *ROWS]
    for name in dict.fromkeys([*known, *extra]):
        metric = find(name) or Metric(name, "a metric of the user's own")
        yield replace(metric, name=name, label=(metric.label if name in known else "") or name)


def _cut_at(run: Run, step: int) -> Run:
    def cut_series(series: Series) -> Series:
        keep = series.steps <= step
        return Series(series.steps[keep], series.values[keep])

    metrics = {name: cut_series(series) for name, series in run.metrics.items()}
    return replace(run, steps=run.steps[run.steps <= step], metrics=metrics)


def _cell(line: Sequence[Run], metric: Metric, window: int | None, seeds: bool) -> MetricCell:
    found = [series for run in line if (series := run.get(metric.name)) is not None]
    if not found:
        return MetricCell(metric)
    finals = [
        Final(float(series.values.mean()), None) if metric.name in SHARES else final(series, window, metric.scale)
        for series in found
    ]
    if len(finals) == 1:
        return MetricCell(metric, finals[0], spread=None if seeds else finals[0].error)
    centres = [each.centre for each in finals]
    mean, spread = float(np.mean(centres)), float(np.std(centres, ddof=1))
    windows = [each.steps for each in finals if each.steps]
    over_seeds = Final(
        math.exp(mean) if metric.scale == "log" else mean,
        spread / math.sqrt(len(finals)) if len(finals) >= FEWEST_EFFECTIVE else None,
        len(finals) - 1,
        next((each.drift for each in finals if each.drift), 0.0),
        (min(start for start, _ in windows), max(end for _, end in windows)) if windows else None,
        metric.scale,
    )
    return MetricCell(metric, over_seeds, spread=spread, seeds=len(finals))


def _compare_cell(baseline: MetricCell, cell: MetricCell) -> MetricCell:
    if baseline.final is None or cell.final is None:
        return cell
    one, other = baseline.final, cell.final
    # A run that is compared with several seeds is one more seed: it scatters as they do.
    if cell.seeds > baseline.seeds == 1:
        one = replace(one, error=cell.spread if other.error is not None else None, freedom=other.freedom)
    elif baseline.seeds > cell.seeds == 1:
        other = replace(other, error=baseline.spread if one.error is not None else None, freedom=one.freedom)
    return replace(cell, difference=compare_finals(one, other))


def _judge_rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Judges the table's comparisons: of the reward by themselves, and all others together.

    Runs are compared for their reward. Asked beforehand, this question needs no correction for the other metrics, where
    anything is looked for; the lines that may be better than the first one are corrected for.
    """

    def differences(of_reward: bool) -> list[Difference]:
        chosen = (cells for metric, cells in rows if (metric.name == REWARD) == of_reward)
        return [cell.difference for cells in chosen for cell in cells if cell.difference]

    families = {of_reward: iter(judge_differences(differences(of_reward))) for of_reward in (True, False)}

    def judge_cell(cell: MetricCell) -> MetricCell:
        if cell.difference is None:
            return cell
        verdict: str = next(families[cell.metric.name == REWARD])
        if verdict == "within noise" and cell.difference.verdict == "differs":
            verdict = UNCERTAIN
        if verdict == TOO_FEW and cell.metric.name in SHARES:
            verdict = ""
        if verdict == "differs" and (good := cell.metric.better):
            verdict = "better" if (cell.difference.change > 0) == (good == "higher") else "worse"
        return replace(cell, verdict=verdict)

    return tuple((metric, tuple(map(judge_cell, cells))) for metric, cells in rows)


def _basis(lines: Lines, window: int | None, common: int | None) -> Iterator[str]:
    """Yields what is compared, and what ± means; `common` is the last step, if all were cut there."""
    last = {name: max(int(run.steps[-1]) for run in line) for name, line in lines.items()}
    longer = ", ".join(f"{name} (to {step})" for name, step in last.items() if common is not None and step > common)
    if longer:
        yield f"compared at step {common}, the last one that all runs have; later steps left out: {longer}"
    elif len(set(last.values())) > 1:
        yield "the runs end at different steps: " + ", ".join(f"{name} at {step}" for name, step in last.items())
    over = "tenth of the readings (20 to 100)" if window is None else f"{window} steps"
    several = {name: len(line) for name, line in lines.items() if len(line) > 1}
    alike = len(several) == len(lines) and len(set(several.values())) == 1
    counted = ", ".join(f"{name} ({count} runs)" for name, count in several.items())
    seeds = f"the {max(several.values())} seeds of each line" if alike else f"the seeds of {counted}"
    error = f"one standard deviation between {seeds}" if several else "one standard error"
    yield f'means over the last {over}; ±: {error}; changes are against "{next(iter(lines))}"'


def _comparison_notes(lines: Lines, rows: Sequence[Row], shortest: int) -> Iterator[str]:
    """Yields notes on the verdicts and on the lines; `shortest` is the number of steps of the shortest run."""
    several = [name for name, line in lines.items() if len(line) > 1]
    tested = [cell for _, cells in rows for cell in cells if cell.difference and cell.difference.p is not None]
    if tested:
        rest = sum(cell.metric.name != REWARD for cell in tested)
        kinds = {"the reward": len(tested) - rest, "the other metrics" if rest > 1 else "the other metric": rest}
        holm = "after Holm's correction for {} comparisons"
        counted = (f"{of} {holm.format(n) if n > 1 else 'by itself'}" for of, n in kinds.items() if n)
        yield f"a difference counts if it is significant at {100 * LEVEL:.0f} %: {', '.join(counted)}"
    if any(cell.verdict == UNCERTAIN for cell in tested):
        rewards = [
            f"; reward of {name}: {cell.change}, with a 99 % interval by itself of {cell.interval}"
            for metric, cells in rows
            for name, cell in zip(lines, cells, strict=True)
            if metric.name == REWARD and cell.verdict == UNCERTAIN
        ]
        yield f"{UNCERTAIN}: significant by itself, but not after the correction{''.join(rewards)}"
    if tested and several and (fewest := min(len(lines[name]) for name in several)) < ENOUGH_SEEDS:
        yield f"with {fewest} seeds, only differences of several standard deviations count: more seeds show more"
    few = [cell.final.steps for _, cells in rows for cell in cells if cell.verdict == TOO_FEW and cell.final]
    if few and several:
        yield f"{TOO_FEW}: a setting with several seeds needs at least {FEWEST_EFFECTIVE:.0f}"
    elif few:
        widest = max((steps[1] - steps[0] + 1 for steps in few if steps), default=0)
        larger = f"try --window {shortest // 2}" if shortest // 2 > widest else "longer runs are needed"
        yield f"{TOO_FEW}: these windows have too few independent readings; {larger}"
    if next(iter(lines)) not in several and len(several) < len(lines) - 1:
        yield CAVEAT
    for index, name in enumerate(lines):
        moving = [metric for metric, cells in rows if (end := cells[index].final) and end.drift]
        if titles := [metric.name if metric.label == "validation" else metric.label for metric in moving]:
            yield f"still moving at the end of {name}: {', '.join(titles)}"
        windows = [(metric, [cell.final and cell.final.steps for cell in cells]) for metric, cells in rows]
        if ended := [
            metric.name
            for metric, all_steps in windows
            if (own := all_steps[index]) and any(other and own[1] < other[0] for other in all_steps)
        ]:
            yield f"{name} stopped logging before the others' windows begin: {', '.join(ended)}"


@dataclass(frozen=True)
class ComparisonTable:
    """The table for a terminal, in ASCII if it has no UTF-8; 2 or 3 runs fit 100 columns, more are wrapped.

    If a run's column would be too narrow for its numbers, each run has a row.
    """

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = tuple(self.comparison.lines)
        wide = min(options.max_width, 100)
        narrow = len(names) > 3 or wide < 90
        label = 18 if narrow else 28
        column = min((wide - label - 2) // len(names) - 2, 30)
        table = ruled_table()
        stacked = column < LEAST_COLUMN  # each run of a metric in a row of its own
        if stacked:
            label = min(label, wide - LEAST_COLUMN - 4)
        table.add_column("", width=label, overflow="fold")
        for name in () if stacked else names:
            table.add_column(Text(encodable(wrap_name(name, column), options)), width=column, overflow="fold")
        if stacked:
            table.add_column("", width=min(wide - label - 4, 30), overflow="fold")
        for metric, entries in self.comparison.rows:
            title = Text(encodable(wrap_name(metric.label, label), options))
            if metric.label != metric.name:
                title.append("\n" + encodable(wrap_name(metric.name, label), options), style="dim")
            cells = []
            for entry in entries:
                value, change, verdict = entry.value, entry.change, entry.verdict
                if narrow:
                    verdict = SHORT.get(verdict, verdict)
                    for long, short in ((" points", " pt"), (" %", "%"), (" s", "s")):
                        value, change = value.replace(long, short), change.replace(long, short)
                text = Text(encodable(value, options))
                if change:
                    text.append(encodable(f"\n{change} ", options))
                    text.append(verdict, style=VERDICT_STYLES.get(verdict, "dim"))
                cells.append(text)
            if not stacked:
                table.add_row(title, *cells)
                continue
            table.add_row(title, "")
            for name, cell in zip(names, cells, strict=True):
                table.add_row(Text(encodable(wrap_name(f"- {name}", label), options)), cell)
        for line in self.comparison.basis:
            yield indented(line, options)
        yield table
        for note in self.comparison.notes:
            yield indented(note, options)


def _signed_text(metric: Metric, change: float) -> str:
    """Returns a difference with its sign, in percentage points for shares; a ratio on the log scale."""
    if metric.scale == "log":
        ratio = np.exp(min(change, 700.0))
        return f"×{ratio:.2f}" if 0.01 <= ratio < 1000 else f"×{ratio:.1e}"  # noqa: RUF001
    return ("+" if change >= 0 else "-") + _size_text(abs(change), format_of(metric)).replace(" %", " points")


def _size_text(value: float, unit: Unit) -> str:
    """Returns an error or a change as text, with two digits if the unit's usual decimals would show none."""
    least = {"number": 0.01, "share": 1e-4, "count": 1, "seconds": 0.1}.get(unit, 0.0)
    if not 0 < value < least:
        return format_value(value, unit)
    return f"{100 * value:.2g} %" if unit == "share" else f"{value:.2g}{' s' if unit == 'seconds' else ''}"
