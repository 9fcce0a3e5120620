"""Stores of many runs, W&B's and MLflow's: finds the processes of each run, and the run to read.

The log of one process is a unit of table.py. A process that begins at a later step than FIRST_STEPS continues the last
run of its name (verl was resumed); any other begins a run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from verl_ext.base.printable import printable
from verl_ext.report.files import fingerprint
from verl_ext.report.run import ReportError
from verl_ext.report.sources.table import FIRST_STEPS, MetricTable, TableRun, Which, chosen_run

MOST_LISTED = 10
NAME_CHARACTERS = 80  # characters of a name


@dataclass(frozen=True)
class Process:
    """One process and its log.

    Attributes:
        name: verl's name of the experiment (trainer.experiment_name).
        project: trainer.project_name.
        started: orders the processes.
        first: the first step that it logged; None if there is none yet.
        files: its files, for messages; the first shows where it is.
        add_to: puts its rows into a table, and returns notes on what could not be read.
    """

    name: str
    project: str
    started: tuple
    first: int | None
    files: tuple[Path, ...]
    add_to: Callable[[MetricTable], Iterable[str]]


class Store(Protocol):
    def files(self) -> Iterable[Path]:
        """Returns the files that change when anything is written to it."""

    def processes(self) -> list[Process]: ...


class StoreSource:
    """One run of a store; `which` counts from 1, in the order in which the runs' last processes started; the last by
    default."""

    def __init__(self, store: Store, path: Path, which: Which):
        self.files: tuple[Path, ...] = (path,)
        self.name = path.stem
        self._store = store
        self._what = "folder" if path.is_dir() else "file"
        self._empty = f"no step in this {self._what}; has the run finished its first step?"
        self._which = which
        self._seen: tuple[object, ...] | None = None
        self._notes: tuple[str, ...] = ()

    def refresh(self) -> bool:
        """Reads everything again if anything has changed."""
        seen = fingerprint(self._store.files())
        if seen == self._seen:
            return False
        self._seen = None  # stays so when there is an error
        runs = runs_of(self._store.processes())
        if not runs:
            raise ReportError(self._empty)
        self._number, self._runs = chosen_run(self._which, len(runs), [run[-1].name for run in runs]), len(runs)
        chosen = runs[self._number - 1]
        self.name, self.files = chosen[-1].name, tuple(file for process in chosen for file in process.files)
        self._table = MetricTable(rows_are_units=False)
        notes = [] if self._which is not None or len(runs) == 1 else [self._others(runs)]
        for process in chosen:
            self._table.begin_unit()
            notes += process.add_to(self._table)
        self._notes = tuple(notes)
        self._seen = seen
        return True

    def _others(self, runs: list[list[Process]]) -> str:
        of_each = [printable(f"{run[-1].project}/{run[-1].name}", NAME_CHARACTERS) for run in runs]
        shown = list(enumerate(of_each, start=1))[-MOST_LISTED:]
        listed = ", ".join(f"{number} = {name}" for number, name in shown)
        before = f"{len(runs) - MOST_LISTED} more, " if len(runs) > MOST_LISTED else ""
        return (
            f"the {self._what} has {len(runs)} runs, this is the last; --run N (or FILE:N) shows another: "
            f"{before}{listed}"
        )

    def run(self, which: Which) -> TableRun:
        """Returns the run that this source was made with; `which` is already settled."""
        return replace(self._table.run(None, self._empty), number=self._number, runs=self._runs)

    def notes(self) -> tuple[str, ...]:
        return self._notes


def runs_of(processes: Iterable[Process]) -> list[list[Process]]:
    """Returns the processes of each run by their start; the run whose last process started last is the last."""
    runs: dict[int, list[Process]] = {}
    of_name: dict[tuple[str, str], int] = {}
    for number, process in enumerate(sorted(processes, key=lambda process: process.started)):
        if process.first is None:
            continue
        key = process.project, process.name
        before = runs.pop(of_name[key]) if key in of_name and process.first > FIRST_STEPS else []
        runs[number] = [*before, process]
        of_name[key] = number
    return list(runs.values())
