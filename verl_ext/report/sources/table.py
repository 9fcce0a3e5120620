"""Metrics in compact columns, row by row as they were logged, and the rows that belong to each run.

A run may have been resumed, or started again in the same place. A unit is what one process wrote in order: a line of a
metrics file, or a whole event file of TensorBoard. Its run follows from the steps alone, because nothing else in these
files separates the processes:

- A unit that goes back to step 0 or 1 begins another run: verl counts from there.
- A unit that goes back to a later step s is a resumed run. Earlier rows of steps after s are abandoned; step s itself
  is merged, because a resumed run may only validate there.
- A unit with only validation decides neither: it may come late, or be the first of a resumed run.
- In a text, what would be another run is the same one if it has the same steps, and no other values of what both have:
  two tables of one run, or one that was pasted twice.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from verl_ext.base.arguments import similar_names
from verl_ext.base.printable import printable
from verl_ext.diagnosis.names import is_by_words, normal, quantity_of
from verl_ext.diagnosis.series import LARGEST, Series
from verl_ext.report.run import LARGEST_WHOLE, ReportError, is_step, is_validation

Row: TypeAlias = tuple[int | None, Mapping[str, object]]  # a step, None if it has none, and its values by name
Which: TypeAlias = int | str | None  # of several runs: the number, from 1, or the name; None for the usual one

FLUSH_VALUES = 1 << 18  # values
KEPT_LAYOUTS = 256
VALIDATION = ("val-", "val/", "eval/", "eval_")  # val-core/, val-aux/, the SFT trainer's val/loss; TRL's
# Names of the step, in their normal form, in order of preference. W&B's own `_step` counts calls of its logger.
STEP_NAMES = (
    *("step", "global_step", "training/global_step", "trainer/global_step", "train/global_step", "global_steps"),
    *("global_step/max_steps", "iteration", "iter", "train/step", "rollout/step", "training_step", "train_step"),
    *("current_steps", "steps", "progress/batch", "update", "rollout", "rollout_id", "_step", "episode"),
    *("system/step",),
)
DEEPEST = 8  # nested objects
MOST_PARTS = 10  # of one file, that are compared with each other
FIRST_STEPS = 1  # 0 if the run validates before training, else 1


def only_validates(names: Iterable[str]) -> bool:
    """Returns True for the names of a row of validation: all are scores of a validation set, or next to these."""
    return all(name.startswith(VALIDATION) or is_validation(name) for name in names)


def known_readings(rows: Iterable[Row]) -> dict[str, int]:
    """Returns at how many steps some rows have each quantity of the table; a row without a step is one."""
    found = {
        (quantity.name, number if step is None else step)
        for number, (step, values) in enumerate(rows)
        for name in values
        if (quantity := quantity_of(name)) is not None and not is_by_words(name)
    }
    return Counter(name for name, _ in found)


def whole_step(value: object) -> int | None:
    """Returns a step that was written as an int, as 12.0, or as text such as "12" or ms-swift's "12/200"; else None."""
    if isinstance(value, str):
        digits = value.partition("/")[0].strip()
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else None
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE:
        value = int(value)
    return value if is_step(value) else None


def step_name(names: Iterable[str]) -> str | None:
    """Returns which of these names is the step's, by the order of STEP_NAMES; None if none is."""
    named = {normal(name): name for name in names}
    return next((named[name] for name in STEP_NAMES if name in named), None)


def flat(record: Mapping[str, object], before: str = "", joint: str = "/", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the entries of an object, those of nested objects under `outer/inner`; none of W&B's tables and images."""
    for name, value in record.items():
        if not isinstance(value, dict):
            yield f"{before}{name}", value
        elif depth < DEEPEST and "_type" not in value:
            # A long name before many others would be copied for each.
            yield from flat(value, f"{before}{printable(str(name))}{joint}", joint, depth + 1)


def chosen_run(which: Which, runs: int, names: Sequence[str] = ()) -> int:
    """Returns the number of the run to read, from 1: the last by default."""
    if isinstance(which, str):
        if which not in names:
            raise ReportError(f"there is no run of the name {which}{similar_names(which, names)}")
        return len(names) - [*names][::-1].index(which)
    if which is not None and not 1 <= which <= runs:
        raise ReportError(f"there is no run {which}: {'1 run is' if runs == 1 else f'{runs} runs are'} in it")
    return which or runs


@dataclass(frozen=True)
class TableRun:
    """One run of a table.

    Attributes:
        gone: steps that were logged, but are not valid any more (see the module).
        overwritten: the readings of abandoned rows.
        rows: numbers of its rows in the table, from 0, abandoned ones included.
    """

    steps: np.ndarray
    metrics: dict[str, Series]
    gone: np.ndarray
    overwritten: dict[str, Series]
    notes: tuple[str, ...]
    rows: range
    number: int  # of this run, from 1
    runs: int  # number of runs in the table

    @classmethod
    def before_the_first_step(cls) -> "TableRun":
        """Returns a run that ended before it logged anything: step 0 without metrics."""
        none: np.ndarray = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(1, dtype=np.int64), {}, none, {}, (), range(0), 1, 1)


@dataclass(frozen=True)
class _Units:
    """Each unit's lowest and highest step (of training, if it has any), and whether it only validates."""

    low: np.ndarray
    high: np.ndarray
    validation: np.ndarray

    def __getitem__(self, part: slice | np.ndarray) -> "_Units":
        return _Units(self.low[part], self.high[part], self.validation[part])

    def training(self) -> np.ndarray:
        return np.flatnonzero(~self.validation)


class MetricTable:
    """Rows of (step, values by name); 12 bytes per value.

    Args:
        rows_are_units: a row may begin another run or resume one; else only a unit that `begin_unit` announces.
        of_text: a run may be there in several parts (see the module).
    """

    def __init__(self, *, rows_are_units: bool, of_text: bool = False):
        self._of_text = of_text
        self._steps = array("q")
        self._validation = bytearray()  # by row
        self._unit_starts: array | None = None if rows_are_units else array("q")
        self._numbers: dict[str, int] = {}  # of the columns, by name
        self._values: list[array] = []  # by column
        self._rows: list[array] = []  # by column: the row of each value
        self._layouts: dict[tuple[str, ...], tuple[array, bool]] = {}
        # Values that are not in their columns yet: several rows, one after the other.
        self._new_values = array("d")
        self._new_numbers = array("i")
        self._new_lengths = array("i")

    def __len__(self) -> int:
        return len(self._steps)

    def begin_unit(self) -> None:
        assert self._unit_starts is not None
        self._unit_starts.append(len(self._steps))

    def add(self, step: int, data: Mapping[str, object]) -> None:
        """Adds a row of a step (`is_step`). What is no number is left out; None is NaN. Names become printable."""
        self._steps.append(step)
        values = self._new_values
        before = len(values)
        try:
            values.extend(data.values())  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            del values[before:]
            data = {name: number for name, value in data.items() if (number := _as_number(value)) is not None}
            values.extend(data.values())  # type: ignore[arg-type]
        numbers, validation = self._layout(tuple(data))
        self._new_numbers.extend(numbers)
        self._new_lengths.append(len(numbers))
        self._validation.append(validation)
        if len(values) >= FLUSH_VALUES:
            self._flush()

    def _layout(self, names: tuple[str, ...]) -> tuple[array, bool]:
        """Returns the columns of a row's values, and whether all belong to a validation. A run has few layouts."""
        if (layout := self._layouts.get(names)) is None:
            numbers = array("i", (self._numbers.setdefault(printable(name), len(self._numbers)) for name in names))
            validation = bool(names) and only_validates(names)
            if len(self._layouts) >= KEPT_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[names] = numbers, validation
        return layout

    def _flush(self) -> None:
        for _ in range(len(self._numbers) - len(self._values)):
            self._values.append(array("d"))
            self._rows.append(array("i"))
        lengths = np.array(self._new_lengths)
        first_row = len(self._steps) - lengths.size
        rows: np.ndarray = np.repeat(np.arange(first_row, len(self._steps), dtype=np.int32), lengths)
        numbers = np.array(self._new_numbers)
        order = np.argsort(numbers, kind="stable")
        numbers, rows, values = numbers[order], rows[order], np.array(self._new_values)[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for start, end in pairwise([*starts, numbers.size]):
            self._values[numbers[start]].frombytes(values[start:end].tobytes())
            self._rows[numbers[start]].frombytes(rows[start:end].tobytes())
        for pending in (self._new_values, self._new_numbers, self._new_lengths):
            del pending[:]

    def run(self, which: Which, empty: str) -> TableRun:
        """Returns one run of the table: the last, or the one with this number, from 1. ReportError `empty` if none."""
        if not len(self):
            raise ReportError(empty)
        self._flush()
        steps = np.array(self._steps)
        validation = np.frombuffer(bytes(self._validation), bool)
        units, unit_of_row = self._units(steps, validation)
        starts = [*_run_starts(units), units.low.size]
        ends = [int(np.searchsorted(unit_of_row, start)) for start in starts]  # of the rows of each part
        whole = [at for at in range(len(ends)) if not self._goes_on(steps, ends, at)]
        runs = len(whole) - 1
        number = chosen_run(which, runs)
        chosen = range(whole[number - 1], whole[number])  # its parts
        first, last = ends[chosen.start], ends[chosen.stop]
        keep = np.zeros(steps.size, bool)
        gone: np.ndarray = steps[:0]
        notes: list[str] = []
        for part in chosen:
            rows = slice(ends[part], ends[part + 1])
            keep[rows], left_out, noted = _valid_rows(
                units[starts[part] : starts[part + 1]], unit_of_row[rows] - starts[part], steps[rows], validation[rows]
            )
            gone, notes = np.union1d(gone, left_out), notes + noted
        gone = np.setdiff1d(gone, steps[keep])
        if runs > 1 and which is None:
            all_others = f"--run 1 to --run {runs - 1} (or FILE:1 to FILE:{runs - 1}) show the others"
            other = "--run 1 (or FILE:1) shows the first" if runs == 2 else all_others
            notes.insert(0, f"the file has {runs} runs, this is the last; {other}")
        run_steps = np.unique(steps[keep])
        abandoned = ~keep
        abandoned[:first] = abandoned[last:] = False  # rows of other runs
        overwritten = self._series(steps, abandoned, np.unique(steps[abandoned])) if abandoned.any() else {}
        metrics = self._series(steps, keep, run_steps)
        return TableRun(run_steps, metrics, gone, overwritten, tuple(notes), range(first, last), number, runs)

    def _goes_on(self, steps: np.ndarray, ends: list[int], at: int) -> bool:
        """Returns True if a part has the steps of the part before it, and no other values of what both have."""
        if not (self._of_text and 0 < at < len(ends) - 1 <= MOST_PARTS):
            return False
        part_of_row = np.searchsorted(ends, np.arange(steps.size), side="right") - 1
        masks = [part_of_row == at - 1, part_of_row == at]
        before, own = (self._series(steps, keep, np.unique(steps[keep])) for keep in masks)
        shared = np.isin(steps[masks[1]], steps[masks[0]]).all()
        return bool(shared) and all(_agree(before[name], own[name]) for name in before.keys() & own.keys())

    def _units(self, steps: np.ndarray, validation: np.ndarray) -> tuple[_Units, np.ndarray]:
        """Returns the units, and the unit of each row."""
        if self._unit_starts is None:
            return _Units(steps, steps, validation), np.arange(steps.size)
        starts = np.unique(np.array(self._unit_starts))
        starts = starts[starts < steps.size]  # a unit without rows does not count
        only = np.logical_and.reduceat(validation, starts)
        unit_of_row: np.ndarray = np.repeat(np.arange(starts.size), np.diff(starts, append=steps.size))
        ignored = validation & ~only[unit_of_row]
        limits = np.iinfo(np.int64)
        low = np.minimum.reduceat(np.where(ignored, limits.max, steps), starts)
        high = np.maximum.reduceat(np.where(ignored, limits.min, steps), starts)
        return _Units(low, high, only), unit_of_row

    def _series(self, steps: np.ndarray, keep: np.ndarray, run_steps: np.ndarray) -> dict[str, Series]:
        everything = bool(keep.all())
        in_order = bool((np.diff(steps[keep]) >= 0).all())
        metrics = {}
        common = run_steps  # most metrics are logged at the same steps as the one before, and share one array
        for name, number in self._numbers.items():
            rows, values = np.array(self._rows[number]), np.array(self._values[number])
            values[np.abs(values) > LARGEST] *= math.inf
            if not everything:
                kept = keep[rows]
                rows, values = rows[kept], values[kept]
            if not rows.size:
                continue
            own = steps[rows]
            if not in_order:
                order = np.argsort(own, kind="stable")
                own, values = own[order], values[order]
            last = np.append(own[1:] != own[:-1], True)
            if not last.all():
                own, values = own[last], values[last]
            common = common if np.array_equal(own, common) else own
            metrics[name] = Series(common, values)
        return metrics


def _as_number(value: object) -> float | None:
    """Returns a number, NaN for None, None for values that are not metrics (text, lists)."""
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond 1e308
        return math.inf if value > 0 else -math.inf


def _agree(one: Series, other: Series) -> bool:
    """Returns True if two series have common steps, with the same values."""
    _, at_one, at_other = np.intersect1d(one.steps, other.steps, return_indices=True)
    return at_one.size > 0 and np.array_equal(one.values[at_one], other.values[at_other], equal_nan=True)


def _run_starts(units: _Units) -> list[int]:
    """Returns the first unit of every run."""
    training = units.training()
    low, high = units.low[training], units.high[training]
    starts = [0]
    for index in np.flatnonzero((low[1:] < high[:-1]) & (low[1:] <= FIRST_STEPS)):
        previous, start = int(training[index]), int(training[index + 1])
        while start - 1 > previous and units.low[start - 1] <= units.low[start]:
            start -= 1  # the validation before the training
        starts.append(start)
    return starts


def _valid_rows(
    units: _Units, unit_of_row: np.ndarray, steps: np.ndarray, validation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns which rows of one run are valid, the steps that have no valid row, and notes. All but `units` are by row.

    A step has no valid row if the run was resumed before it, and has not reached it again.
    """
    training = units.training()
    low, high = units.low[training], units.high[training]
    back = np.flatnonzero(low[1:] < high[:-1]) + 1
    if not back.size:
        return np.ones(steps.size, bool), steps[:0], []
    highest = np.iinfo(np.int64).max
    lows = np.append(np.where(units.validation, highest, units.low), highest)
    lowest_later = np.minimum.accumulate(lows[::-1])[::-1][1:]
    keep = steps <= lowest_later[unit_of_row]
    # Validation rows are left out of `again`: a resumed run repeats that of the step it starts from.
    trained = ~validation
    resumed = np.zeros_like(units.low)
    resumed[training[back]] = 1
    attempt = np.cumsum(resumed)[unit_of_row[trained]]
    order = np.argsort(steps[trained], kind="stable")  # attempts stay in order within a step
    of_step, attempt = steps[trained][order], attempt[order]
    twice = (of_step[1:] == of_step[:-1]) & (attempt[1:] != attempt[:-1])
    again, gone = np.unique(of_step[1:][twice]), np.setdiff1d(steps[~keep], steps[keep])
    notes = []
    if again.size:
        notes.append(f"{_spans(again, steps)} logged twice (the run was resumed); the later values count")
    if gone.size:
        notes.append(f"{_spans(gone, steps)} logged before the run was resumed, and not since: left out")
    return keep, gone, notes


def _spans(some: np.ndarray, steps: np.ndarray) -> str:
    """Returns text such as `steps 6 to 8 were`; consecutive entries of `steps` are one span."""
    if some.size == 1:
        return f"step {some[0]} was"
    at = np.searchsorted(np.union1d(steps, some), some)
    parts = np.split(some, np.flatnonzero(np.diff(at) > 1) + 1)
    words = [str(part[0]) if part.size == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    more = f" and {len(words) - 3} more spans" if len(words) > 3 else ""
    return f"steps {', '.join(words[:3])}{more} were"
