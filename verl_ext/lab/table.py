"""The outcome of an experiment as a table for a terminal and a page, as findings in sentences, and as JSON."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import orjson
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from verl_ext import __version__
from verl_ext.base.printable import wrap_name
from verl_ext.lab.summary import (
    COLLAPSED_SHARE,
    COVERAGE,
    EXACT,
    FEW_STEPS,
    LARGE_K3,
    LEVEL_STEPS,
    MEASURES,
    NONE,
    Interval,
    Variant,
    ranked_variants,
)
from verl_ext.report.files import written_whole
from verl_ext.report.terminal import encodable, indented, step_range

RESULTS = "results.json"
NAME, DIFFERENCE = 14, 12  # widths of columns; all columns of a narrow terminal, one blank between them, take 80
SIGNED = "+.2f"  # the format of differences
STYLES = {"better": "green", "worse": "red", "": ""}
LEGEND = (
    "collapsed: runs, and the median step. k3: mean of the first 5 steps, and of 10 that end 10 before the collapse "
    "(without one, of the last 10). warning: steps before the reward's fall. *: more than the seeds' noise."
)
ENDED_EARLY = (
    " ended early: runs that the guard stopped, the median step, and the reward then. Such a run has no final reward "
    "and is not compared; it counts as collapsed only if it had collapsed before."
)


@dataclass(frozen=True)
class Cell:
    text: str
    verdict: str = ""  # "better" or "worse", for a difference above the noise


@dataclass(frozen=True)
class Column:
    """A column of the table. `width` is for a terminal; a narrow one leaves out `spare` columns."""

    title: str
    width: int
    cell: Callable[[Variant], Cell]
    spare: bool = False


@dataclass(frozen=True)
class TableRow:
    name: str
    label: str
    cells: tuple[Cell, ...]


class Experiment:
    """The outcome of an experiment. rich prints its table and findings in a terminal of 80 columns or more; in ASCII if
    it has no UTF-8.

    Attributes:
        variants: the exact one first, then by the final reward.
        exact, none: the variants of these names; None if there is none.
        ends_early: whether the guard stopped a run early.
        columns: those after the name.
        rows: a row for each variant.
        findings: sentences; there are some even if the seeds show no difference.
    """

    def __init__(self, variants: Sequence[Variant]):
        self.variants = ranked_variants(variants)
        named = {variant.name: variant for variant in variants}
        self.exact, self.none = named.get(EXACT), named.get(NONE)
        self.ends_early = any(variant.stopped for variant in variants)
        self.columns = list(self._columns())
        self.rows = [
            TableRow(variant.name, _label(variant), tuple(column.cell(variant) for column in self.columns))
            for variant in self.variants
        ]
        self.findings = [
            *self._damage(),
            *self._ranking(),
            *self._collapses(),
            *self._guard_endings(),
            *self._warnings(),
            *self._caveats(),
            *(
                f"{variant.name}, seed {seed} failed: {error}"
                for variant in self.variants
                for seed, error in variant.failed.items()
            ),
        ]

    @property
    def legend(self) -> str:
        """The meaning of the columns, in one paragraph."""
        return LEGEND + (ENDED_EARLY if self.ends_early else "")

    def results(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the contents of the table, the findings and the runs of every seed, for JSON; `about` comes first.

        A mean over seeds is {mean, low, high, seeds}, without low and high if there is one seed; null means not logged.
        A run that the guard stopped early is under `ended_early`; `collapsed` covers the runs whose outcome is known.
        """
        return {
            **about,
            "version": __version__,
            "rule": {"window": LEVEL_STEPS, "collapsed_below": COLLAPSED_SHARE, "intervals": COVERAGE},
            "findings": self.findings,
            "variants": [
                {
                    "name": variant.name,
                    "overrides": list(variant.overrides),
                    "collapsed": _outcome_json(variant.collapsed, variant.known),
                    "ended_early": _outcome_json(variant.stopped, len(variant.runs))
                    | {"reward_then": _interval_json(variant.reward_then)},
                    "false_alarms": variant.false_alarms,
                    "means": {measure: _interval_json(variant.mean(measure)) for measure in MEASURES},
                    f"final_against_{NONE}": _interval_json(variant.difference_to(self.none)),
                    f"final_against_{EXACT}": _interval_json(variant.difference_to(self.exact)),
                    "runs": {str(seed): asdict(run) for seed, run in variant.runs.items()},
                    "failed": {str(seed): error for seed, error in variant.failed.items()},
                }
                for variant in self.variants
            ],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= NAME + sum(column.width + 1 for column in self.columns)
        shown = [number for number, column in enumerate(self.columns) if wide or not column.spare]
        drawn = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        drawn.add_column("", width=NAME, overflow="fold")
        for column in (self.columns[number] for number in shown):
            drawn.add_column(Text(column.title), justify="right", width=column.width, overflow="fold")
        for row in self.rows:
            label = Text(encodable(wrap_name(row.label, NAME), options), style="bold" if row.name == NONE else "")
            cells = (row.cells[number] for number in shown)
            texts = (Text(encodable(cell.text, options), style=STYLES[cell.verdict]) for cell in cells)
            drawn.add_row(label, *texts, end_section=row.name == EXACT)
        yield drawn
        yield ""
        yield indented(self.legend, options, "dim")
        for finding in self.findings:
            yield indented(finding, options)

    def _columns(self) -> Iterator[Column]:
        early = self.ends_early
        yield Column("final reward", 10, lambda variant: _reward_cell(variant.mean("final")))
        for other in filter(None, (self.none, self.exact)):
            yield Column(f"against {other.name}", DIFFERENCE, partial(_against_cell, other), spare=other is self.exact)
        yield Column("peak", 10, lambda variant: _reward_cell(variant.mean("peak")), spare=True)
        yield Column("collapsed", 9, lambda variant: _share_cell(variant.collapsed.values(), variant.known))
        if early:
            yield Column("ended early", 9, lambda variant: _share_cell(variant.stopped.values(), len(variant.runs)))
            yield Column("reward then", 10, lambda variant: _reward_cell(variant.reward_then), spare=True)
        yield _measured("k3, start", 7, "k3_start", "{:.1e}", spare=early)
        yield _measured("k3, before", 7, "k3_before", "{:.1e}", spare=False)
        yield _measured("dropped", 7, "dropped", "{:.1f} %", spare=early, scale=100)
        yield Column("warning", 7, _warning_cell)
        yield _measured("grad norm, median", 10, "grad_norm_median", "{:.2g}")
        yield _measured("grad norm, max", 10, "grad_norm_max", "{:.2g}")
        yield _measured("skipped", 7, "skipped", "{:.1f}")
        yield _measured("rollbacks", 9, "rollbacks", "{:.1f}")

    def _damage(self) -> Iterator[str]:
        """Yields a line on the reward that the gap costs, which a method could win back."""
        if self.exact is None or (cost := self.exact.difference_to(self.none)) is None:
            return
        if cost.sure and cost.mean > 0:
            yield f"The gap costs {cost.text()} of the final reward: {NONE} against {EXACT}."
        else:
            change = cost.text(SIGNED)
            yield (
                f"{EXACT} does not end above {NONE} by more than the noise ({change}): there is nothing to win back "
                "here."
            )

    def _ranking(self) -> Iterator[str]:
        if self.none is None:
            yield f"There is no run without a method to compare with: add {NONE} to --variants."
        others = (variant for variant in self.variants if variant.name not in (EXACT, NONE))
        found = [
            (variant.name, change) for variant in others if (change := variant.difference_to(self.none)) is not None
        ]
        sure = [each for each in found if each[1].sure]
        kinds = {
            f"Better than {NONE} by more than the seeds' noise": [each for each in sure if each[1].mean > 0],
            f"Worse than {NONE} by more than the seeds' noise": [each for each in sure if each[1].mean < 0],
            "Within the noise": [each for each in found if not each[1].sure],
        }
        for kind, these in kinds.items():
            if these:
                yield f"{kind}: " + ", ".join(f"{name} ({change.text(SIGNED)})" for name, change in these) + "."

    def _collapses(self) -> Iterator[str]:
        rule = f"the {LEVEL_STEPS}-step mean of the reward below half of its peak"
        died = [_collapse_of(variant) for variant in self.variants if variant.collapsed]
        of = " among the runs that the guard did not stop" if self.ends_early else ""
        yield f"Collapsed ({rule}): {'; '.join(died)}." if died else f"No run collapsed{of} ({rule})."
        if self.exact is not None and self.exact.collapsed:
            yield f"{EXACT} collapses by itself: the gap is not the only cause here."

    def _guard_endings(self) -> Iterator[str]:
        ended = [_endings_of(variant) for variant in self.variants if variant.stopped]
        if ended:
            yield (
                f"The guard stopped runs early: {'; '.join(ended)}. Their outcome is unknown, so these variants have "
                "no final reward and are not compared."
            )

    def _warnings(self) -> Iterator[str]:
        died = sum(len(variant.collapsed) for variant in self.variants)
        lived = sum(variant.known for variant in self.variants) - died
        early = [int(lead) for variant in self.variants for lead in variant.by_seed("warning").values() if lead > 0]
        ahead = f", {min(early)} to {max(early)} steps ahead of the fall" if early else ""
        came = [f"in time in {len(early)} of {died} collapses{ahead}"] if died else []
        if false := sum(len(variant.false_alarms) for variant in self.variants):
            came.append(f"in {false} of the {lived} runs that trained to their end without one")
        if came:
            yield f"Warnings (k3 above {LARGE_K3:g}, or a forecast below {FEW_STEPS} steps) came {', and '.join(came)}."

    def _caveats(self) -> Iterator[str]:
        most = max((len(variant.runs) for variant in self.variants), default=0)
        if most < 2:
            yield "One seed shows nothing about noise: use more (--seeds 5)."
            return
        yield (
            f"±: {100 * COVERAGE:.0f} % intervals over the seeds (Student's t); differences are paired by seed. There "
            "is no correction for many comparisons: without any effect, one in twenty still looks like one."
        )
        if fewer := [f"{each.name} ({len(each.runs)})" for each in self.variants if len(each.runs) < most]:
            yield f"Fewer runs than the {most} of the others: {', '.join(fewer)}."


def results_text(results: Mapping[str, Any]) -> str:
    return orjson.dumps(results, option=orjson.OPT_INDENT_2).decode()


def write_results(results: Mapping[str, Any], out: Path) -> Path:
    with written_whole(out / RESULTS) as file:
        file.write(results_text(results).encode() + b"\n")
    return out / RESULTS


def _label(variant: Variant) -> str:
    mark = f"{NONE}, baseline" if variant.name == NONE else variant.name
    return f"{mark}; {len(variant.failed)} failed" if variant.failed else mark


def _against_cell(other: Variant, variant: Variant) -> Cell:
    if (change := variant.difference_to(other)) is None:
        return Cell("-")
    verdict = ("better" if change.mean > 0 else "worse") if change.sure else ""
    return Cell(change.text(SIGNED) + ("*" if verdict else ""), verdict)


def _measured(title: str, width: int, measure: str, form: str, *, spare: bool = True, scale: int = 1) -> Column:
    """Returns the column of a measure's means over the seeds, in this format."""

    def cell(variant: Variant) -> Cell:
        found = variant.mean(measure)
        return Cell("-" if found is None else form.format(scale * found.mean))

    return Column(title, width, cell, spare)


def _reward_cell(found: Interval | None) -> Cell:
    return Cell("-" if found is None else found.text())


def _share_cell(steps: Collection[int], of: int) -> Cell:
    """Returns the count, and the median of the steps."""
    return Cell((f"{len(steps)}/{of}" + (f" @{median(steps):.0f}" if steps else "")) if of else "-")


def _warning_cell(variant: Variant) -> Cell:
    """Returns the steps ahead of the fall, if the reward fell; else the number of false warnings."""
    if leads := variant.by_seed("warning").values():
        return Cell(f"{mean(leads):+.0f}")
    if variant.collapsed:
        return Cell("never")
    return Cell(f"{len(variant.false_alarms)} false" if variant.false_alarms else "-")


def _collapse_of(variant: Variant) -> str:
    seeds = ", ".join(map(str, variant.collapsed))
    at = step_range(variant.collapsed.values())
    return f"{variant.name} in {len(variant.collapsed)} of {variant.known} (seed {seeds}; {at})"


def _endings_of(variant: Variant) -> str:
    then = variant.reward_then
    first = f"before the first {LEVEL_STEPS}-step mean of the reward"
    reward = first if then is None else f"at a reward of {then.mean:.2f}"
    if then is not None and then.seeds < len(variant.stopped):
        reward += f" in {then.seeds}, in the others {first}"
    steps = step_range(variant.stopped.values())
    return f"{variant.name} in {len(variant.stopped)} of {len(variant.runs)} ({steps}, {reward})"


def _outcome_json(at: Mapping[int, int], of: int) -> dict[str, Any]:
    """Returns the share of the runs, and the steps by seed."""
    return {"share": len(at) / of if of else None, "of": of, "at": {str(seed): step for seed, step in at.items()}}


def _interval_json(found: Interval | None) -> dict[str, float] | None:
    if found is None:
        return None
    ends = {} if found.half is None else {"low": found.mean - found.half, "high": found.mean + found.half}
    return {"mean": found.mean, **ends, "seeds": found.seeds}
