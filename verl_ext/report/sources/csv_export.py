"""Reads CSV tables: histories of runs, as anybody writes them, or a chart of one or several runs, as W&B exports it.

| | columns |
|---|---|
| history | one of STEP_COLUMNS, and one per metric |
| histories of several runs | also one of RUN_COLUMNS |
| chart | the x axis, and `RUN - metric`, `RUN - metric__MIN`, `RUN - metric__MAX` for every run |

An empty cell was not logged. Text is left out. W&B refuses a step that goes back, so the rows are sorted. Python's csv
reads the rows: for pandas' reader, a cut row looks like one whose last cells are empty.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from verl_ext.report.files import fingerprint, open_regular
from verl_ext.report.run import LARGEST_WHOLE, ReportError
from verl_ext.report.sources.kinds import Kind, register_kind
from verl_ext.report.sources.table import STEP_NAMES, MetricTable, TableRun, chosen_run

STEP_COLUMNS = ("Step", "_step", *STEP_NAMES, "global_steps", "iter", "train/step", "rollout/step")
# Names of a column that has the run's name, where a table has several runs.
RUN_COLUMNS = (
    "run",
    "run_name",
    "name",
    "experiment",
    "condition",
    "method",
    "algorithm",
    "model",
    "config",
    "variant",
)
SEPARATORS = ",\t;"
RUN_AND_METRIC = " - "  # between the two in the header of a chart's column
LIMITS = ("__MIN", "__MAX")
MOST_LINE = 16 << 20  # characters
TRUTH = {"true": 1.0, "false": 0.0}


class CsvSource:
    """One run of a CSV export; `which` is its number in a table of several, from 1 in the table's order."""

    def __init__(self, path: Path, which: int | None):
        self.files = (path,)
        self.name = path.stem
        self._path = path
        self._which = which
        self._chosen = False
        self._seen: tuple[object, ...] = ()
        self._table = MetricTable(rows_are_units=False)
        self._notes: tuple[str, ...] = ()

    def refresh(self) -> bool:
        """Reads the whole file again if it has changed."""
        seen = fingerprint(self.files)
        if seen == self._seen:
            return False
        with io.TextIOWrapper(open_regular(self._path), "utf-8-sig", errors="replace", newline="") as file:
            separator = separator_of(self._path)
            rows = _csv_rows(file, separator)
            header = next(rows, [])
            self._chosen = False
            step_column, columns = self._columns(header)
            self._table = MetricTable(rows_are_units=False)
            self._table.begin_unit()
            broken: list[int] = []
            run_column = next((at for at, name in enumerate(header) if name.strip().lower() in RUN_COLUMNS), -1)
            held: list[tuple[int, list[str]]] = []  # rows that may be of several runs
            for number, row in enumerate(rows, start=2):
                if separator == ";":  # where it is used, decimals have a comma
                    row = [cell.replace(",", ".") for cell in row]
                step = _cell_step(row[step_column]) if len(row) == len(header) else None
                if step is not None and run_column >= 0:
                    held.append((step, row))
                elif step is not None:
                    self._add(step, row, columns)
                elif row:
                    broken.append(number)
        if broken and broken[-1] == number and len(row) < len(header):
            broken.pop()  # the last row is cut
        if (by_run := _rows_by_run(held, run_column)) is not None:
            held = by_run[self._choose(list(by_run))]
        for step, row in held:
            self._add(step, row, columns)
        self._notes = ()
        if broken:
            self._notes = (f"rows without a step, or cut: {len(broken)} (the first is row {broken[0]}); left out",)
        self._seen = seen
        return True

    def _add(self, step: int, row: list[str], columns: list[tuple[int, str]]) -> None:
        if data := {name: value for at, name in columns if (value := _cell_number(row[at])) is not None}:
            self._table.add(step, data)

    def _columns(self, header: list[str]) -> tuple[int, list[tuple[int, str]]]:
        """Returns the step's column, and the metrics' columns with their names."""
        if {"Name", "State"} <= set(header):
            raise ReportError("this is W&B's table of runs; export one run's history, or a chart")
        lower = [name.strip().lower() for name in header]
        step = next((row.index(name) for row in (header, lower) for name in STEP_COLUMNS if name in row), None)
        others = [(at, name) for at, name in enumerate(header) if at != step and name]
        of_runs = [(at, name) for at, name in others if RUN_AND_METRIC in name]
        # A chart over another axis than the step has that axis first.
        if not of_runs or not {name for at, name in others if at} <= {name for _, name in of_runs}:
            if step is None:
                raise ReportError(f"no column for the step; one of {', '.join(STEP_COLUMNS)} is needed")
            return step, others
        names = {name for _, name in of_runs}
        found: dict[str, dict[str, int]] = {}
        for at, name in of_runs:
            if name.endswith(LIMITS) and name[: -len(LIMITS[0])] in names:
                continue
            run, metric = name.rsplit(RUN_AND_METRIC, 1)
            found.setdefault(run, {})[metric] = at
        columns = found[self._choose(list(found))]
        own_step = columns.pop("_step", None)
        if step is None and own_step is None:
            raise ReportError("no column for the step; export the chart with Step as its x axis")
        return own_step if step is None else step, [(at, metric) for metric, at in columns.items()]  # type: ignore[return-value]

    def _choose(self, runs: list[str]) -> str:
        which = self._which
        if which is None and len(runs) > 1:
            listed = ", ".join(f"{number} = {name}" for number, name in enumerate(runs[:10], start=1))
            more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
            raise ReportError(f"{len(runs)} runs in this file; choose one with --run N or FILE:N: {listed}{more}")
        self._chosen = True
        self.name = runs[chosen_run(which, len(runs)) - 1]
        return self.name

    def run(self, which: int | None) -> TableRun:
        return self._table.run(None if self._chosen else which, "no row with a step and a number in this file")

    def notes(self) -> tuple[str, ...]:
        return self._notes


def _is_table(start: bytes) -> bool:
    header = start.decode("utf-8-sig", errors="replace").lstrip().partition("\n")[0].rstrip("\r")
    for separator in SEPARATORS:
        try:
            names = next(csv.reader([header], delimiter=separator), [])
        except csv.Error:
            continue
        if len(names) > 1 and any(name in STEP_COLUMNS or name.endswith(LIMITS) for name in names):
            return True
    return False


register_kind(
    Kind(
        title="CSV or TSV",
        example="table.csv",
        remarks="a column for the step, as above, and one with the run's name if there are several; or W&B's export of "
        "a chart, with columns `RUN - metric` (`--run N` or `FILE:N` is the Nth run)",
        order=6,
        open=CsvSource,
        sniff=_is_table,
        endings=(".csv", ".tsv"),
        by_logger=False,
    )
)


def separator_of(path: Path) -> str:
    """Returns the character between the columns: the most frequent one in the header."""
    with open_regular(path) as file:
        header = file.readline(MOST_LINE)
    return max(SEPARATORS, key=lambda each: header.count(each.encode()))


def _rows_by_run(rows: list[tuple[int, list[str]]], column: int) -> dict[str, list[tuple[int, list[str]]]] | None:
    """Returns the rows of each run, if steps repeat and this column names the runs: it has texts, and within each of
    them no step repeats, and all begin with one step. (A resumed run repeats steps, but not its first one.)"""
    steps = [step for step, _ in rows]
    runs: dict[str, list[tuple[int, list[str]]]] = {}
    for step, row in rows:
        runs.setdefault(row[column], []).append((step, row))
    first, named = min(steps, default=0), all(name and _cell_number(name) is None for name in runs)
    if len(set(steps)) == len(steps) or len(runs) < 2 or not named:
        return None
    whole = (first in (by_step := dict(own)) and 1 < len(by_step) == len(own) for own in runs.values())
    return runs if all(whole) else None


def _csv_rows(file, separator: str) -> Iterator[list[str]]:
    lines = iter(lambda: file.readline(MOST_LINE), "")  # a longer line becomes several, which are broken
    rows = csv.reader(lines, delimiter=separator)
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error:  # a cell beyond csv's limit, a NUL
            yield [""]


def _cell_number(cell: str) -> float | None:
    if not cell:
        return None
    try:
        return float(cell)
    except ValueError:
        return TRUTH.get(cell.lower())


def _cell_step(cell: str) -> int | None:
    try:
        number = float(cell)
        return int(number) if number.is_integer() and abs(number) < LARGEST_WHOLE else None
    except ValueError:
        return None
