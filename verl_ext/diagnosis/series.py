"""The readings of a run for the diagnosis: canonical name of a quantity -> its steps and values."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Any, TypeVar

import numpy as np

from verl_ext.diagnosis.names import Alias
from verl_ext.diagnosis.probed import Probe

LARGEST = 1e100  # a larger value counts as infinite, so that sums of squares stay finite
NOW_READINGS = 5  # the value now is a median of so many: two odd readings do not move it, three show a change
FIRST_READINGS = 3  # readings of the first updates
LEVEL_READINGS = 20  # the level at the beginning or at the end is a mean of so many

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it, NaN where the value was not a number."""

    steps: np.ndarray  # int64, ascending, each step once
    values: np.ndarray  # float64, same length

    def finite(self) -> "Series":
        return self.within(np.inf)

    def within(self, largest: float) -> "Series":
        """Returns the readings whose absolute value is smaller than this."""
        keep = np.abs(self.values) < largest
        return Series(self.steps[keep], self.values[keep])

    def converted(self, alias: Alias) -> "Series":
        """Returns the values that were logged under an alias as those of its quantity."""
        return Series(self.steps, alias.convert(self.values))

    @property
    def is_rounded(self) -> bool:
        """Whether no reading has more than three decimals, as verl printed them to 0.4: a 0 is then a small number."""
        values = self.finite().values
        return bool(np.allclose(values, np.round(values, 3), rtol=0, atol=1e-9))

    def at(self, step: int) -> float | None:
        """Returns the reading of a step; None if it logged none."""
        index = int(np.searchsorted(self.steps, step))
        return float(self.values[index]) if index < len(self.steps) and self.steps[index] == step else None

    def pairs(self) -> list[tuple[int, float]]:
        return list(zip(self.steps.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True)
class Ending:
    """How a run ended by itself: its last step, and the error in one line."""

    step: int
    reason: str


@dataclass(frozen=True)
class Act:
    """A line of the guard's event log: a rule of its or a step that it takes, and what it decided."""

    step: int
    rule: str
    action: str
    reason: str


class NotLoggedError(Exception):
    """A run lacks the metrics that a finding needs. `findings.registry` catches it."""


def require_logged(found: Answer | None) -> Answer:
    """Returns the argument. Raises NotLoggedError if it is None."""
    if found is None:
        raise NotLoggedError
    return found


class Readings:
    """The metrics of a run. A metric that was never a finite number counts as not logged, except for `logged`.

    Args:
        series: canonical name -> all its readings.
        ending: the error that ended the run, if it is known.
        acts: what the guard decided, by step.
        probe: what a probe of the launch measured; it has no series of its own.
    """

    def __init__(
        self,
        series: Mapping[str, Series],
        ending: Ending | None = None,
        acts: Sequence[Act] = (),
        probe: Probe | None = None,
    ):
        self.ending, self.acts, self.probe = ending, acts, probe
        self.answers: dict[Callable[..., Any], Any] = {}  # results of functions that are `cached_per_run`
        self._logged = {name: found for name, found in series.items() if found.steps.size}
        finite = {name: found.within(LARGEST) for name, found in self._logged.items()}
        self._finite = {name: found for name, found in finite.items() if found.steps.size}

    @classmethod
    def of_pairs(cls, pairs: Mapping[str, Iterable[tuple[int, float]]], ending: Ending | None = None) -> "Readings":
        """Returns the readings of name -> (step, value), with ascending steps."""
        arrays = {name: np.array(list(found), dtype=np.float64).reshape(-1, 2) for name, found in pairs.items()}
        return cls({name: Series(found[:, 0].astype(np.int64), found[:, 1]) for name, found in arrays.items()}, ending)

    def get(self, name: str) -> Series | None:
        """Returns the finite readings of a metric."""
        return self._finite.get(name)

    def need(self, name: str, fewest: int = 1) -> Series:
        """Returns the finite readings of a metric. Raises NotLoggedError for fewer than `fewest`."""
        series = self._finite.get(name)
        return require_logged(series if series is not None and len(series.steps) >= fewest else None)

    def logged(self, name: str) -> Series | None:
        """Returns all readings of a metric, also those that are not finite."""
        return self._logged.get(name)

    def every_name(self) -> Iterator[str]:
        """Yields the names of all metrics, also of those that were never finite."""
        return iter(self._logged)

    def names(self, start: str = "") -> Iterator[str]:
        """Yields the names of the metrics that have a finite reading and begin like this."""
        return (name for name in self._finite if name.startswith(start))

    def has(self, start: str) -> bool:
        return next(self.names(start), None) is not None

    @property
    def last_step(self) -> int:
        """The last step that logged anything; 0 if none did."""
        return max((int(found.steps[-1]) for found in self._logged.values()), default=0)

    def values(self, *names: str) -> np.ndarray:
        """Returns the finite values of the first of these metrics that was logged; empty if none was."""
        return next((self._finite[name].values for name in names if name in self._finite), np.empty(0))

    def late(self, *names: str) -> float | None:
        """Returns the mean of the last LEVEL_READINGS readings."""
        found = self.values(*names)[-LEVEL_READINGS:]
        return float(found.mean()) if found.size else None

    def early(self, *names: str) -> float | None:
        """Returns the mean of the first LEVEL_READINGS readings, but of at most half of all."""
        found = self.values(*names)
        return float(found[: max(min(LEVEL_READINGS, len(found) // 2), 1)].mean()) if found.size else None

    def joined(self, *names: str) -> np.ndarray:
        """Returns [steps, 1 + names]: the steps at which all these metrics are finite, and their readings."""
        series = [self._finite[name] for name in names if name in self._finite]
        if len(series) < len(names):
            return np.empty((0, 1 + len(names)))
        common: np.ndarray = reduce(np.intersect1d, (found.steps for found in series))
        columns = [found.values[np.searchsorted(found.steps, common)] for found in series]
        return np.column_stack([common.astype(np.float64), *columns])


def cached_per_run(function: Callable[[Readings], Answer]) -> Callable[[Readings], Answer]:
    """Decorates a function of a run whose result several findings use, so that it is computed once for each run."""

    @wraps(function)
    def answer(run: Readings) -> Answer:
        if answer not in run.answers:
            run.answers[answer] = function(run)
        return run.answers[answer]

    return answer


def holds_from(holds: np.ndarray, share: float) -> int:
    """Returns the first index that holds and from which at least this share holds; the length if there is none."""
    shares = holds[::-1].cumsum()[::-1] / np.arange(len(holds), 0, -1)
    begins = holds & (shares >= share)
    return int(np.argmax(begins)) if begins.any() else len(holds)


def step_from(series: Series, holds: np.ndarray, share: float) -> int:
    """Returns the step of `holds_from`; the last one if there is none."""
    return int(series.steps[min(holds_from(holds, share), len(series.steps) - 1)])


def now_of(series: Series, readings: int = NOW_READINGS) -> float:
    """Returns a metric's value now: the median of its last readings, at most half of all."""
    return float(np.median(series.values[-_count_at_end(series, readings) :]))


def now_label(series: Series) -> str:
    """Returns what `now_of` is of, for the text next to the number."""
    return median_label("last", _count_at_end(series, NOW_READINGS))


def beginning_of(series: Series, readings: int = NOW_READINGS) -> float:
    """Returns a metric's value at the start: the median of its first readings, at most half of all."""
    return float(np.median(series.values[: _count_at_end(series, readings)]))


def beginning_label(series: Series) -> str:
    """Returns what `beginning_of` is of, for the text next to the number."""
    return median_label("first", _count_at_end(series, NOW_READINGS))


def median_label(end: str, count: int) -> str:
    return f"the {end} reading" if count == 1 else f"median of the {end} {count}"


def _count_at_end(series: Series, readings: int) -> int:
    return min(readings, max(len(series.values) // 2, 1))
