"""A comparison as text: rows for a page, a table for a terminal."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.metrics import Metric
from verl_ext.report.comparison import Cell, Comparison
from verl_ext.report.noise import FLOOR, ROUNDING
from verl_ext.report.terminal import Unit, encodable, format_of, format_value, indented, wrap_name

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

SHORT = {"within noise": "noise", "too few steps": "too few"}  # verdicts in narrow columns
VERDICT_STYLES = {"better": "green", "worse": "red", "differs": "yellow"}


def comparison_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """The table as text, for a page: one dictionary a metric.

    `label`, `metric`, `scale`, `better` and `cells`: a list with, for each run, `run`, `value`, `change`, `interval`
    (of the change alone, at 99 %) and `verdict`; "-" is a value the run lacks, an empty text what was not compared.
    """
    return [
        {
            "label": metric.label,
            "metric": metric.name,
            "scale": metric.scale,
            "better": metric.better,
            "cells": [
                {
                    "run": name,
                    "value": _value(metric, cell),
                    "change": _change(metric, cell, cells[0]),
                    "interval": _interval(metric, cell),
                    "verdict": cell.verdict,
                }
                for name, cell in zip(comparison.names, cells, strict=True)
            ],
        }
        for metric, cells in comparison.rows
    ]


def comparison_table(comparison: Comparison) -> "RenderableType":
    """The table for a terminal: 2 or 3 runs fit 100 columns, more are wrapped; in ASCII where it has no UTF-8."""
    return _Table(comparison)


@dataclass(frozen=True)
class _Table:
    comparison: Comparison

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        names = self.comparison.names
        wide = min(options.max_width, 100)
        narrow = len(names) > 3 or wide < 90
        label = 18 if narrow else 28
        column = min((wide - label - 2) // len(names) - 2, 30)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_lines=False)
        table.add_column("", width=label, overflow="fold")
        for name in names:
            table.add_column(Text(encodable(wrap_name(name, column), options)), width=column, overflow="fold")
        for row in comparison_rows(self.comparison):
            title = Text(encodable(wrap_name(row["label"], label), options))
            if row["label"] != row["metric"]:
                title.append("\n" + encodable(wrap_name(row["metric"], label), options), style="dim")
            cells = []
            for cell in row["cells"]:
                verdict = SHORT.get(cell["verdict"], cell["verdict"]) if narrow else cell["verdict"]
                value, change = (_short(cell[key]) if narrow else cell[key] for key in ("value", "change"))
                text = Text(encodable(value, options))
                if change:
                    text.append(encodable(f"\n{change} ", options))
                    text.append(verdict, style=VERDICT_STYLES.get(verdict, "dim"))
                cells.append(text)
            table.add_row(title, *cells)
        yield table
        for note in self.comparison.notes:
            yield indented(note, options)


def _short(text: str) -> str:
    return text.replace(" points", " pt").replace(" %", "%").replace(" s", "s")


def _value(metric: Metric, cell: Cell) -> str:
    if cell.total is not None:
        return f"{cell.total[0]:.0f} of {cell.total[1]}"
    if cell.final is None:
        return "-"
    if cell.final.scale == "log" and cell.final.mean <= FLOOR * (1 + ROUNDING):
        return f"below {FLOOR:.0e}"
    mean = format_value(cell.final.mean, format_of(metric))
    if cell.final.error is None:
        return mean
    if cell.final.scale == "log":  # the error is of the logarithm
        return f"{mean} ±{100 * np.expm1(cell.final.error):.0f} %"
    number, _, unit = mean.partition(" ")
    error = _size(cell.final.error, format_of(metric)).partition(" ")[0]
    return f"{number} ±{error} {unit}".rstrip()


def _change(metric: Metric, cell: Cell, baseline: Cell) -> str:
    if cell is not baseline and cell.total is not None and baseline.total is not None:
        return f"{cell.total[0] - baseline.total[0]:+.0f}"
    return "" if cell.difference is None else _signed(metric, cell.difference.change)


def _interval(metric: Metric, cell: Cell) -> str:
    if cell.difference is None or (interval := cell.difference.interval) is None:
        return ""
    return " to ".join(_signed(metric, end) for end in interval)


def _signed(metric: Metric, change: float) -> str:
    """A difference with its sign, percentage points for shares; a ratio on the log scale."""
    if metric.scale == "log":
        ratio = np.exp(min(change, 700.0))
        return f"×{ratio:.2f}" if 0.01 <= ratio < 1000 else f"×{ratio:.1e}"  # noqa: RUF001
    return ("+" if change >= 0 else "-") + _size(abs(change), format_of(metric)).replace(" %", " points")


def _size(value: float, unit: Unit) -> str:
    """Of an error or a change, to two digits where the unit's usual decimals would leave none."""
    least = {"number": 0.01, "share": 1e-4, "count": 1, "seconds": 0.1}.get(unit, 0.0)
    if not 0 < value < least:
        return format_value(value, unit)
    return f"{100 * value:.2g} %" if unit == "share" else f"{value:.2g}{' s' if unit == 'seconds' else ''}"
