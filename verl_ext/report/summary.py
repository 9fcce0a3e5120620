"""A short table of a run: how the reward moved, how far the two engines are apart, what was done about it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl_ext.report.load import Run, Series

if TYPE_CHECKING:
    from rich.console import Group

WINDOW = 3  # "first" and "last" are means over this many steps, so that one noisy batch does not decide


@dataclass(frozen=True)
class Row:
    """One metric; `worst` is the value furthest in the bad direction, None where neither is bad."""

    label: str
    metric: str
    first: float
    last: float
    worst: float | None
    unit: str  # "number", "small" (scientific) or "share" (percent)

    def cells(self) -> tuple[str, str, str, str, str]:
        worst = "" if self.worst is None else format_value(self.worst, self.unit)
        return (
            self.label,
            format_value(self.first, self.unit),
            format_value(self.last, self.unit),
            worst,
            self.metric,
        )


def _furthest_from_zero(values: np.ndarray) -> float:
    return values[np.argmax(np.abs(values))]


# label, metric, which value is the worst, unit; the order is the order of the table.
ROWS: list[tuple[str, str, Callable[[np.ndarray], float] | None, str]] = [
    ("reward", "critic/score/mean", None, "number"),
    ("engine KL, k3", "vllm_kl/k3", np.max, "small"),
    ("engine KL, k1", "vllm_kl/k1", _furthest_from_zero, "small"),
    ("largest prob. diff.", "vllm_kl/prob_diff_max", np.max, "small"),
    ("tokens dropped", "correction/dropped", np.max, "share"),
    ("  ratio too low", "correction/dropped_low", np.max, "share"),
    ("  ratio too high", "correction/dropped_high", np.max, "share"),
    ("differs in any layer", "router/any_layer_differs", np.max, "share"),
    ("router agreement", "router/agreement", np.min, "share"),
]


def summary_rows(run: Run) -> list[Row]:
    """The rows of the table; metrics that the run never logged are left out."""
    rows = [_row(run.get(metric), label, metric, worst, unit) for label, metric, worst, unit in ROWS]
    rows += [
        _row(series, f"  layer {layer}", f"router/agreement/layer_{layer:02d}", np.min, "share")
        for layer, series in run.layers("router/agreement").items()
    ]
    return [row for row in rows if row is not None]


def summary_notes(run: Run) -> list[str]:
    """What does not fit the table's columns: steps, skipped updates, time, values that were not numbers."""
    return list(_notes(run))


def summary(run: Run) -> "Group":
    """The rows as a `rich` table, the notes below it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # Narrow enough for a terminal of 80 columns; labels and number formats are chosen to fit.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("first", "last", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("metric", style="dim", no_wrap=True)
    for row in summary_rows(run):
        table.add_row(*row.cells())
    return Group(table, *(Text(f" {note}") for note in summary_notes(run)))


def format_value(value: float, unit: str) -> str:
    match unit:
        case "share":
            return f"{100 * value:.2f} %"
        case "small":
            return f"{value:.1e}"
        case _:
            return f"{value:.3f}"


def _row(
    series: Series | None, label: str, metric: str, worst: Callable[[np.ndarray], float] | None, unit: str
) -> Row | None:
    if series is None:
        return None
    values = series.values
    return Row(
        label=label,
        metric=metric,
        first=float(values[:WINDOW].mean()),
        last=float(values[-WINDOW:].mean()),
        worst=None if worst is None else float(worst(values)),
        unit=unit,
    )


def _notes(run: Run) -> Iterator[str]:
    yield f"steps {run.steps[0]} to {run.steps[-1]}; first and last are means over {WINDOW} of them"
    if (skipped := run.get("guard/skipped")) is not None:
        yield f"updates skipped: {int(skipped.values.sum())} of {len(skipped.values)} (guard/skipped)"
    if (seconds := run.get("timing_s/step")) is not None:
        yield f"mean step time: {seconds.values.mean():.1f} s (timing_s/step)"
    for _, metric, _, _ in ROWS:
        if (series := run.metrics.get(metric)) is None:
            continue
        if missing := int((~np.isfinite(series.values)).sum()):
            yield f"{metric} was not a finite number in {missing} of {len(series.values)} steps"
