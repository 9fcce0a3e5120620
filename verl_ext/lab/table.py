"""The variants beside each other, as rows of text for a page and as a table for a terminal."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from verl_ext.lab.seeds import Interval, Variant, named, ranked
from verl_ext.lab.words import EXACT, NONE, signed
from verl_ext.report.terminal import encodable, indented, wrap_name

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

NAME, DIFFERENCE = 14, 12  # columns of the terminal; with the others' and one between two, 80
STYLES = {"better": "green", "worse": "red", "": ""}
LEGEND = (
    "collapsed: runs, and the median step. k3: mean of the first 5 steps, and of 10 that end 10 before the collapse, "
    "or at the end without one. warning: steps ahead of the fall. *: more than the seeds' noise."
)
ENDED_EARLY = (
    " ended early: runs that the guard ended, the median step, and the reward then. Such a run has no final reward and "
    "is not compared; it counts as collapsed only if it had collapsed before."
)


@dataclass(frozen=True)
class Entry:
    text: str
    verdict: str = ""  # "better" or "worse", of a difference that is more than noise


@dataclass(frozen=True)
class Column:
    """`width` is in a terminal; where that is narrow, the columns that are `spare` are left out."""

    title: str
    width: int
    say: Callable[[Variant], str | Entry]
    spare: bool = False


@dataclass(frozen=True)
class Row:
    name: str
    label: str
    cells: tuple[Entry, ...]


def columns(variants: Sequence[Variant]) -> list[Column]:
    """What a table of these has behind the name."""
    early = _any_ended_early(variants)
    against = [
        Column(f"against {name}", DIFFERENCE, _against(other), spare=name == EXACT)
        for name in (NONE, EXACT)
        if (other := named(variants, name)) is not None
    ]
    return [
        Column("final reward", 10, _reward("final")),
        *against,
        Column("peak", 10, _reward("peak"), spare=True),
        Column("collapsed", 9, _collapsed),
        *(
            [Column("ended early", 9, _ended_early), Column("reward then", 10, _reward_then, spare=True)]
            if early
            else []
        ),
        Column("k3, start", 7, _mean("k3_start", "{:.1e}"), spare=early),
        Column("k3, before", 7, _mean("k3_before", "{:.1e}")),
        Column("dropped", 7, _dropped, spare=early),
        Column("warning", 7, _warning),
        Column("grad norm, median", 10, _mean("grad_norm_median", "{:.2g}"), spare=True),
        Column("grad norm, max", 10, _mean("grad_norm_max", "{:.2g}"), spare=True),
        Column("skipped", 7, _mean("skipped", "{:.1f}"), spare=True),
        Column("rollbacks", 9, _mean("rollbacks", "{:.1f}"), spare=True),
    ]


def legend(variants: Sequence[Variant]) -> str:
    """What the columns hold."""
    return LEGEND + ENDED_EARLY * _any_ended_early(variants)


def rows(variants: Sequence[Variant]) -> list[Row]:
    """The exact one first, then by the final reward."""
    shown = columns(variants)

    def cells(variant: Variant) -> tuple[Entry, ...]:
        said = (column.say(variant) for column in shown)
        return tuple(each if isinstance(each, Entry) else Entry(each) for each in said)

    return [Row(variant.name, _label(variant), cells(variant)) for variant in ranked(variants)]


def table(variants: Sequence[Variant], words: Sequence[str]) -> "RenderableType":
    """For a terminal of 80 columns, or with more columns for a wide one; in ASCII where it has no UTF-8."""
    return _Table(variants, words)


@dataclass(frozen=True)
class _Table:
    variants: Sequence[Variant]
    words: Sequence[str]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        known = columns(self.variants)
        wide = options.max_width >= NAME + sum(column.width + 1 for column in known)
        drawn = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        drawn.add_column("", width=NAME, overflow="fold")
        for column in known:
            if wide or not column.spare:
                drawn.add_column(Text(column.title), justify="right", width=column.width, overflow="fold")
        for row in rows(self.variants):
            label = Text(encodable(wrap_name(row.label, NAME), options), style="bold" if row.name == NONE else "")
            entries = [e for e, column in zip(row.cells, known, strict=True) if wide or not column.spare]
            cells = [Text(encodable(entry.text, options), style=STYLES[entry.verdict]) for entry in entries]
            drawn.add_row(label, *cells, end_section=row.name == EXACT)
        yield drawn
        yield ""
        yield indented(legend(self.variants), options, "dim")
        for word in self.words:
            yield indented(word, options)


def _label(variant: Variant) -> str:
    mark = f"{NONE}, baseline" if variant.name == NONE else variant.name
    return f"{mark}; {len(variant.failed)} failed" if variant.failed else mark


def _against(other: Variant) -> Callable[[Variant], Entry]:
    def say(variant: Variant) -> Entry:
        if other is variant or (change := variant.against(other)) is None:
            return Entry("-")
        verdict = ("better" if change.mean > 0 else "worse") if change.sure else ""
        return Entry(signed(change) + "*" * bool(verdict), verdict)

    return say


def _reward(measure: str) -> Callable[[Variant], str]:
    return lambda variant: _rewards(variant.mean(measure))


def _reward_then(variant: Variant) -> str:
    return _rewards(variant.reward_then)


def _rewards(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:.2f}" + ("" if found.half is None else f" ±{found.half:.2f}")


def _mean(measure: str, text: str) -> Callable[[Variant], str]:
    def say(variant: Variant) -> str:
        found = variant.mean(measure)
        return "-" if found is None else text.format(found.mean)

    return say


def _collapsed(variant: Variant) -> str:
    return _share(variant.collapsed.values(), variant.known)


def _ended_early(variant: Variant) -> str:
    return _share(variant.stopped.values(), len(variant.runs))


def _share(steps: Collection[int], of: int) -> str:
    """How many, and the median of their steps."""
    if not of:
        return "-"
    return f"{len(steps)}/{of}" + (f" @{median(steps):.0f}" if steps else "")


def _any_ended_early(variants: Sequence[Variant]) -> bool:
    return any(variant.stopped for variant in variants)


def _dropped(variant: Variant) -> str:
    found = variant.mean("dropped")
    return "-" if found is None else f"{100 * found.mean:.1f} %"


def _warning(variant: Variant) -> str:
    """Steps ahead of the fall, where it fell; else how often it was for nothing."""
    if leads := variant.of("warning").values():
        return f"{mean(leads):+.0f}"
    if variant.collapsed:
        return "never"
    return f"{len(variant.false_alarms)} false" if variant.false_alarms else "-"
