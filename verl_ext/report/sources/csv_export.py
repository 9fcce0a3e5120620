"""Reads CSV tables: histories of runs, as anybody writes them, or a chart of one or several runs, as W&B exports it.

| | columns |
|---|---|
| history | one for the step, and one per metric (cells.py) |
| histories of several runs | also one of RUN_COLUMNS |
| chart | the x axis, and `RUN - metric`, `RUN - metric__MIN`, `RUN - metric__MAX` for every run |

An empty cell was not logged. Text is left out. W&B refuses a step that goes back, so the rows are sorted. Python's csv
reads the rows: for pandas' reader, a cut row looks like one whose last cells are empty.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.files import fingerprint, open_regular
from verl_ext.report.run import ReportError, listed
from verl_ext.report.sources.cells import Columns
from verl_ext.report.sources.kinds import Kind, register_kind
from verl_ext.report.sources.numbers import number_of
from verl_ext.report.sources.table import STEP_NAMES, MetricTable, TableRun, Which, chosen_run
from verl_ext.report.sources.text import COUNTED

# Names of a column that has the run's name, where a table has several runs.
RUN_COLUMNS = (
    *("run", "run_name", "name", "experiment", "condition"),
    *("method", "algorithm", "model", "config", "variant"),
)
SEPARATORS = ",\t;"
RUN_AND_METRIC = " - "  # between the two in the header of a chart's column
LIMITS = ("__MIN", "__MAX")
MOST_LINE = 16 << 20  # characters
MOST_LISTED = 10  # runs


class CsvSource:
    """One run of a CSV export; of several, `which` is its number, from 1 in the table's order, or its name."""

    def __init__(self, path: Path, which: Which):
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
            separator = _separator_in(file.readline(MOST_LINE))
            file.seek(0)
            rows = _csv_rows(file, separator)
            header = next(rows, [])
            self._chosen = False
            columns = self._columns(header)
            self._table = MetricTable(rows_are_units=False)
            self._table.begin_unit()
            broken: list[int] = []
            run_column = next((at for at, name in enumerate(header) if name.strip().lower() in RUN_COLUMNS), -1)
            held: list[tuple[int, list[str]]] = []  # rows that may be of several runs
            for number, row in enumerate(rows, start=2):
                if separator == ";":  # where it is used, decimals have a comma
                    row = [cell.replace(",", ".") for cell in row]
                step = columns.step_of(row, number - 1)
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
        self._notes = (COUNTED,) if columns.step is None else ()
        if broken:
            self._notes = (f"rows without a step, or cut: {len(broken)} (the first is row {broken[0]}); left out",)
        self._seen = seen
        return True

    def _add(self, step: int, row: list[str], columns: Columns) -> None:
        if data := columns.values(row):
            self._table.add(step, data)

    def _columns(self, header: list[str]) -> Columns:
        """Returns the columns of the run to read.

        Raises:
            ReportError: none has the step, and none is known; or it is a table of runs.
        """
        if {"Name", "State"} <= set(header):
            raise ReportError("this is W&B's table of runs; export one run's history, or a chart")
        columns = Columns(header)
        of_runs = [(at, name) for at, name in columns.metrics if RUN_AND_METRIC in name]
        # A chart over another axis than the step has that axis first.
        if not of_runs or not {name for at, name in columns.metrics if at} <= {name for _, name in of_runs}:
            if columns.step is None and not any(quantity_of(name) for _, name in columns.metrics):
                raise ReportError(f"no column for the step; one of {', '.join(STEP_NAMES[:6])}, ... is needed")
            return columns
        names = {name for _, name in of_runs}
        found: dict[str, dict[str, int]] = {}
        for at, name in of_runs:
            if name.endswith(LIMITS) and name[: -len(LIMITS[0])] in names:
                continue
            run, metric = name.rsplit(RUN_AND_METRIC, 1)
            found.setdefault(run, {})[metric] = at
        chosen = found[self._choose(list(found))]
        own_step = chosen.pop("_step", None)
        columns.step = own_step if columns.step is None else columns.step
        if columns.step is None:
            raise ReportError("no column for the step; export the chart with Step as its x axis")
        columns.metrics = [(at, metric) for metric, at in chosen.items()]
        return columns

    def _choose(self, runs: list[str]) -> str:
        which = self._which
        if which is None and len(runs) > 1:
            numbered = listed([f"{number} = {name}" for number, name in enumerate(runs, start=1)], MOST_LISTED)
            how = f"choose one by number or name (--run {len(runs)}, FILE:{runs[-1]}); verl-ext compare FILE takes all"
            raise ReportError(f"{len(runs)} runs in this file: {numbered}; {how}", len(runs))
        self._chosen = True
        self.name = runs[chosen_run(which, len(runs), runs) - 1]
        return self.name

    def run(self, which: Which) -> TableRun:
        return self._table.run(None if self._chosen else which, "no row with a step and a number in this file")

    def notes(self) -> tuple[str, ...]:
        return self._notes


def _is_table(start: bytes) -> bool:
    header = start.decode("utf-8-sig", errors="replace").lstrip().partition("\n")[0].rstrip("\r")
    try:
        names = next(csv.reader([header], delimiter=_separator_in(header)), [])
    except csv.Error:
        return False
    return len(names) > 1 and (Columns(names).step is not None or any(name.endswith(LIMITS) for name in names))


register_kind(
    Kind(
        title="CSV or TSV",
        example="table.csv",
        remarks="a column for the step, as above, and one with the run's name if there are several; or W&B's export of "
        "a chart, with columns `RUN - metric`. Of several runs, `--run` or `FILE:` takes one by its number or name; "
        "`verl-ext compare FILE` takes all",
        order=6,
        open=CsvSource,
        sniff=_is_table,
        endings=(".csv", ".tsv"),
        by_logger=False,
    )
)


def _separator_in(header: str) -> str:
    """Returns the character between the columns: the most frequent one in the header."""
    return max(SEPARATORS, key=header.count)


def _rows_by_run(rows: list[tuple[int, list[str]]], column: int) -> dict[str, list[tuple[int, list[str]]]] | None:
    """Returns the rows of each run, if steps repeat and this column names the runs: it has texts, and within each of
    them no step repeats, and all begin with one step. (A resumed run repeats steps, but not its first one.)"""
    steps = [step for step, _ in rows]
    runs: dict[str, list[tuple[int, list[str]]]] = {}
    for step, row in rows:
        runs.setdefault(row[column], []).append((step, row))
    first, named = min(steps, default=0), all(name and number_of(name) is None for name in runs)
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
