"""A run as the report sees it: every numeric metric over its steps, and what the guard decided."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from verl_ext.base.metrics import METRICS
from verl_ext.base.printable import printable
from verl_ext.guard.state import Event

LARGEST_STEP = 2**53  # from here on, a page's JavaScript cannot tell steps apart
LARGEST = 1e100  # a value beyond it is as good as infinite: squares of it, and their sums, would be
MOST_MESSAGE = 4000  # characters
LAYER = re.compile(r"[0-9]{1,4}")


class ReportError(ValueError):
    """The run cannot be read; the message is one line, names the file, and is meant for the user."""

    def __init__(self, message: str):
        super().__init__(printable(message, MOST_MESSAGE))  # it quotes names of files, and what is in them


def is_step(value: object) -> TypeGuard[int]:
    """Returns True for a possible step: a whole number with which steps can be counted, here and on a page."""
    return type(value) is int and abs(value) < LARGEST_STEP


def own_steps(found: Sequence[Any], last: int, one: str, several: str) -> tuple[list[Any], list[str]]:
    """Selects what can belong to a run with this last step, and says how much else there was.

    The step after it counts too: the metrics of a step at which the guard stops the run may not be logged.

    Args:
        found: anything with a `step`.
        one, several: what it is called.
    """
    own = [each for each in found if each.step <= last + 1]
    match len(found) - len(own):
        case 0:
            return own, []
        case 1:
            return own, [f"1 {one} is of a later step than the metrics: left out; it is another run's"]
        case count:
            return own, [f"{count} {several} are of later steps than the metrics: left out; they are another run's"]


def names_of(name: str) -> tuple[str, ...]:
    """A metric, then the name under which verl itself logs the same quantity, where the plugin is off."""
    metric = METRICS.get(name)
    return (name, metric.verls) if metric and metric.verls else (name,)


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it, NaN where the value was not a number, infinite where beyond LARGEST."""

    steps: np.ndarray  # int64, ascending, each step once
    values: np.ndarray  # float64, same length

    def finite(self) -> "Series":
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


@dataclass(frozen=True)
class Run:
    """One run; `get` answers None where nothing finite was logged.

    Attributes:
        name: short, for headings; printable, as are the names of metrics, and the words of events.
        sources: the files that were read.
        steps: every step that logged anything, ascending.
        metrics: by name as it was logged.
        events: of the guard, by step.
        notes: what the reader should know about the files, one sentence each: lines left out, steps logged twice.
        last: whether it is the last of its file. Other files in the folder are taken to be of the last run.
    """

    name: str
    sources: tuple[Path, ...]
    steps: np.ndarray
    metrics: dict[str, Series] = field(repr=False)
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    last: bool = True

    def get(self, name: str) -> Series | None:
        """The finite values of a metric, or of what verl itself logs of it."""
        found = (self.metrics[each].finite() for each in names_of(name) if each in self.metrics)
        return next((series for series in found if series.steps.size), None)

    def logged(self, name: str) -> Series | None:
        """The series of `get` with its values that are not finite."""
        found = (self.metrics.get(each) for each in names_of(name))
        return next((series for series in found if series is not None), None)

    def validations(self) -> list[str]:
        """verl's main validation metrics, `val-core/DATA_SOURCE/VARIABLE/METRIC`, where anything was finite."""
        return sorted(name for name in self.metrics if name.startswith("val-core/") and self.get(name) is not None)

    def layers(self, name: str) -> dict[int, Series]:
        """`name/layer_00`, `name/layer_01`, ... by layer number; layers with nothing finite are left out."""
        found = self.parts(name, "layer_")
        return {int(number): found[number] for number in sorted(filter(LAYER.fullmatch, found), key=int)}

    def parts(self, name: str, prefix: str) -> dict[str, Series]:
        """Metrics called `name/prefix...`, e.g. with `prob/`, by what follows; those with nothing finite left out."""
        start = f"{name}/{prefix}"
        found = {key.removeprefix(start): self.get(key) for key in self.metrics if key.startswith(start)}
        return {part: series for part, series in found.items() if series is not None}
