"""The outcome of an experiment as a table for a terminal and a page, as findings in sentences, and as JSON."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import orjson
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from verl_ext import __version__
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
    variant_named,
)
from verl_ext.report.files import written_whole
from verl_ext.report.terminal import encodable, indented, step_range, wrap_name

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
class Entry:
    text: str
    verdict: str = ""  # "better" or "worse", for a difference above the noise


@dataclass(frozen=True)
class Column:
    """A column of the table. `width` is for a terminal; a narrow one leaves out `spare` columns."""

    title: str
    width: int
    cell: Callable[[Variant], str | Entry]
    spare: bool = False


@dataclass(frozen=True)
class TableRow:
    name: str
    label: str
    cells: tuple[Entry, ...]


def table_columns(variants: Sequence[Variant]) -> list[Column]:
    """Returns the columns of a table of these variants, after the name."""
    early = _any_ended_early(variants)
    against = [
        Column(f"against {name}", DIFFERENCE, _against_cell(other), spare=name == EXACT)
        for name in (NONE, EXACT)
        if (other := variant_named(variants, name)) is not None
    ]
    endings = [
        Column("ended early", 9, lambda variant: _share_text(variant.stopped.values(), len(variant.runs))),
        Column("reward then", 10, lambda variant: _reward_cell(variant.reward_then), spare=True),
    ]
    return [
        Column("final reward", 10, lambda variant: _reward_cell(variant.mean("final"))),
        *against,
        Column("peak", 10, lambda variant: _reward_cell(variant.mean("peak")), spare=True),
        Column("collapsed", 9, lambda variant: _share_text(variant.collapsed.values(), variant.known)),
        *(endings if early else []),
        Column("k3, start", 7, _mean_cell("k3_start", "{:.1e}"), spare=early),
        Column("k3, before", 7, _mean_cell("k3_before", "{:.1e}")),
        Column("dropped", 7, _mean_cell("dropped", "{:.1f} %", scale=100), spare=early),
        Column("warning", 7, _warning_cell),
        Column("grad norm, median", 10, _mean_cell("grad_norm_median", "{:.2g}"), spare=True),
        Column("grad norm, max", 10, _mean_cell("grad_norm_max", "{:.2g}"), spare=True),
        Column("skipped", 7, _mean_cell("skipped", "{:.1f}"), spare=True),
        Column("rollbacks", 9, _mean_cell("rollbacks", "{:.1f}"), spare=True),
    ]


def table_rows(variants: Sequence[Variant]) -> list[TableRow]:
    """Returns the rows: the exact variant first, then by the final reward."""
    shown = table_columns(variants)

    def cells(variant: Variant) -> tuple[Entry, ...]:
        said = (column.cell(variant) for column in shown)
        return tuple(each if isinstance(each, Entry) else Entry(each) for each in said)

    return [TableRow(variant.name, _label(variant), cells(variant)) for variant in ranked_variants(variants)]


def legend(variants: Sequence[Variant]) -> str:
    """Returns the meaning of the columns, in one paragraph."""
    return LEGEND + (ENDED_EARLY if _any_ended_early(variants) else "")


def findings_of(variants: Sequence[Variant]) -> list[str]:
    """Returns the findings in sentences; there are some even if the seeds show no difference."""
    order = ranked_variants(variants)
    exact, none = variant_named(order, EXACT), variant_named(order, NONE)
    others = [variant for variant in order if variant.name not in (EXACT, NONE)]
    return [
        *_damage(exact, none),
        *_ranking(others, none),
        *_collapses(order),
        *_guard_endings(order),
        *_warnings(order),
        *_caveats(order),
        *(
            f"{variant.name}, seed {seed} failed: {error}"
            for variant in order
            for seed, error in variant.failed.items()
        ),
    ]


def results_of(about: Mapping[str, Any], variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the contents of the table, the findings and the runs of every seed, for JSON; `about` comes first.

    A mean over seeds is {mean, low, high, seeds}, without low and high if there is one seed; null means not logged. A
    run that the guard stopped early is under `ended_early`; `collapsed` covers the runs whose outcome is known.
    """
    order = ranked_variants(variants)
    none, exact = variant_named(order, NONE), variant_named(order, EXACT)
    return {
        **about,
        "version": __version__,
        "rule": {"window": LEVEL_STEPS, "collapsed_below": COLLAPSED_SHARE, "intervals": COVERAGE},
        "findings": findings_of(variants),
        "variants": [
            {
                "name": variant.name,
                "overrides": list(variant.overrides),
                "collapsed": _outcome_json(variant.collapsed, variant.known),
                "ended_early": _outcome_json(variant.stopped, len(variant.runs))
                | {"reward_then": _interval_json(variant.reward_then)},
                "false_alarms": variant.false_alarms,
                "means": {measure: _interval_json(variant.mean(measure)) for measure in MEASURES},
                f"final_against_{NONE}": _interval_json(variant.difference_to(none)),
                f"final_against_{EXACT}": _interval_json(variant.difference_to(exact)),
                "runs": {str(seed): asdict(run) for seed, run in variant.runs.items()},
                "failed": {str(seed): error for seed, error in variant.failed.items()},
            }
            for variant in order
        ],
    }


def results_text(results: Mapping[str, Any]) -> str:
    return orjson.dumps(results, option=orjson.OPT_INDENT_2).decode()


def write_results(results: Mapping[str, Any], out: Path) -> Path:
    with written_whole(out / RESULTS) as file:
        file.write(results_text(results).encode() + b"\n")
    return out / RESULTS


@dataclass(frozen=True)
class TerminalTable:
    """The table and the findings under it, for a terminal of 80 columns or more; in ASCII if it has no UTF-8."""

    variants: Sequence[Variant]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = table_columns(self.variants)
        wide = options.max_width >= NAME + sum(column.width + 1 for column in known)
        drawn = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        drawn.add_column("", width=NAME, overflow="fold")
        for column in known:
            if wide or not column.spare:
                drawn.add_column(Text(column.title), justify="right", width=column.width, overflow="fold")
        for row in table_rows(self.variants):
            label = Text(encodable(wrap_name(row.label, NAME), options), style="bold" if row.name == NONE else "")
            entries = [e for e, column in zip(row.cells, known, strict=True) if wide or not column.spare]
            cells = [Text(encodable(entry.text, options), style=STYLES[entry.verdict]) for entry in entries]
            drawn.add_row(label, *cells, end_section=row.name == EXACT)
        yield drawn
        yield ""
        yield indented(legend(self.variants), options, "dim")
        for finding in findings_of(self.variants):
            yield indented(finding, options)


def _label(variant: Variant) -> str:
    mark = f"{NONE}, baseline" if variant.name == NONE else variant.name
    return f"{mark}; {len(variant.failed)} failed" if variant.failed else mark


def _against_cell(other: Variant) -> Callable[[Variant], Entry]:
    def say(variant: Variant) -> Entry:
        if (change := variant.difference_to(other)) is None:
            return Entry("-")
        verdict = ("better" if change.mean > 0 else "worse") if change.sure else ""
        return Entry(change.text(SIGNED) + ("*" if verdict else ""), verdict)

    return say


def _reward_cell(found: Interval | None) -> str:
    return "-" if found is None else found.text()


def _mean_cell(measure: str, text: str, scale: int = 1) -> Callable[[Variant], str]:
    def say(variant: Variant) -> str:
        found = variant.mean(measure)
        return "-" if found is None else text.format(scale * found.mean)

    return say


def _share_text(steps: Collection[int], of: int) -> str:
    """Returns the count, and the median of the steps."""
    if not of:
        return "-"
    return f"{len(steps)}/{of}" + (f" @{median(steps):.0f}" if steps else "")


def _any_ended_early(variants: Sequence[Variant]) -> bool:
    return any(variant.stopped for variant in variants)


def _warning_cell(variant: Variant) -> str:
    """Returns the steps ahead of the fall, if the reward fell; else the number of false warnings."""
    if leads := variant.by_seed("warning").values():
        return f"{mean(leads):+.0f}"
    if variant.collapsed:
        return "never"
    return f"{len(variant.false_alarms)} false" if variant.false_alarms else "-"


def _damage(exact: Variant | None, none: Variant | None) -> Iterator[str]:
    """Yields a line on the reward that the gap costs, which a method could win back."""
    if exact is None or (cost := exact.difference_to(none)) is None:
        return
    if cost.sure and cost.mean > 0:
        yield f"The gap costs {cost.text()} of the final reward: {NONE} against {EXACT}."
    else:
        change = cost.text(SIGNED)
        yield f"{EXACT} does not end above {NONE} by more than the noise ({change}): there is nothing to win back here."


def _ranking(others: Sequence[Variant], none: Variant | None) -> Iterator[str]:
    found = [(variant.name, change) for variant in others if (change := variant.difference_to(none)) is not None]
    sure = [each for each in found if each[1].sure]
    kinds = {
        f"Better than {NONE} by more than the seeds' noise": [each for each in sure if each[1].mean > 0],
        f"Worse than {NONE} by more than the seeds' noise": [each for each in sure if each[1].mean < 0],
        "Within the noise": [each for each in found if not each[1].sure],
    }
    for kind, these in kinds.items():
        if these:
            yield f"{kind}: " + ", ".join(f"{name} ({change.text(SIGNED)})" for name, change in these) + "."


def _collapses(variants: Sequence[Variant]) -> Iterator[str]:
    rule = f"the {LEVEL_STEPS}-step mean of the reward below half of its peak"
    died = [_collapse_of(variant) for variant in variants if variant.collapsed]
    of = " among the runs that the guard did not stop" if _any_ended_early(variants) else ""
    yield f"Collapsed ({rule}): {'; '.join(died)}." if died else f"No run collapsed{of} ({rule})."
    exact = variant_named(variants, EXACT)
    if exact is not None and exact.collapsed:
        yield f"{EXACT} collapses by itself: the gap is not the only cause here."


def _collapse_of(variant: Variant) -> str:
    seeds = ", ".join(map(str, variant.collapsed))
    at = step_range(variant.collapsed.values())
    return f"{variant.name} in {len(variant.collapsed)} of {variant.known} (seed {seeds}; {at})"


def _guard_endings(variants: Sequence[Variant]) -> Iterator[str]:
    ended = [_endings_of(variant) for variant in variants if variant.stopped]
    if ended:
        yield (
            f"The guard stopped runs early: {'; '.join(ended)}. Their outcome is unknown, so these variants have no "
            "final reward and are not compared."
        )


def _endings_of(variant: Variant) -> str:
    then = variant.reward_then
    first = f"before the first {LEVEL_STEPS}-step mean of the reward"
    reward = first if then is None else f"at a reward of {then.mean:.2f}"
    if then is not None and then.seeds < len(variant.stopped):
        reward += f" in {then.seeds}, in the others {first}"
    steps = step_range(variant.stopped.values())
    return f"{variant.name} in {len(variant.stopped)} of {len(variant.runs)} ({steps}, {reward})"


def _warnings(variants: Sequence[Variant]) -> Iterator[str]:
    died = sum(len(variant.collapsed) for variant in variants)
    lived = sum(variant.known for variant in variants) - died
    early = [int(lead) for variant in variants for lead in variant.by_seed("warning").values() if lead > 0]
    ahead = f", {min(early)} to {max(early)} steps ahead of the fall" if early else ""
    came = [f"in time in {len(early)} of {died} collapses{ahead}"] if died else []
    if false := sum(len(variant.false_alarms) for variant in variants):
        came.append(f"in {false} of the {lived} runs that trained to their end without one")
    if came:
        yield f"Warnings (k3 above {LARGE_K3:g}, or a forecast below {FEW_STEPS} steps) came {', and '.join(came)}."


def _caveats(variants: Sequence[Variant]) -> Iterator[str]:
    most = max((len(variant.runs) for variant in variants), default=0)
    if most < 2:
        yield "One seed shows nothing about noise: use more (--seeds 5)."
        return
    yield (
        f"±: {100 * COVERAGE:.0f} % intervals over the seeds (Student's t); differences are paired by seed. There is "
        "no correction for many comparisons: without any effect, one in twenty still looks like one."
    )
    if fewer := [f"{each.name} ({len(each.runs)})" for each in variants if len(each.runs) < most]:
        yield f"Fewer runs than the {most} of the others: {', '.join(fewer)}."


def _outcome_json(at: Mapping[int, int], of: int) -> dict[str, Any]:
    """Returns the share of the runs, and the steps by seed."""
    return {"share": len(at) / of if of else None, "of": of, "at": {str(seed): step for seed, step in at.items()}}


def _interval_json(found: Interval | None) -> dict[str, float] | None:
    if found is None:
        return None
    ends = {} if found.half is None else {"low": found.mean - found.half, "high": found.mean + found.half}
    return {"mean": found.mean, **ends, "seeds": found.seeds}
