"""Read a run's metrics and the guard's decisions: once, or again and again while it runs."""

from pathlib import Path
from typing import Protocol

import numpy as np

from verl_ext.guard.state import Event
from verl_ext.printable import printable
from verl_ext.report.files import is_regular
from verl_ext.report.run import MOST_MESSAGE, ReportError, Run
from verl_ext.report.sources.csv_export import CsvSource
from verl_ext.report.sources.events import EventLog
from verl_ext.report.sources.find import Found, find
from verl_ext.report.sources.jsonl import JsonlSource
from verl_ext.report.sources.mlflow_database import ENDINGS as DATABASES
from verl_ext.report.sources.mlflow_database import MlflowDatabase
from verl_ext.report.sources.mlflow_folder import MlflowFolder
from verl_ext.report.sources.store import StoreSource
from verl_ext.report.sources.table import Part
from verl_ext.report.sources.tensorboard import TensorBoardSource
from verl_ext.report.sources.wandb_folder import WandbFolder
from verl_ext.run_files import EVENTS


class Source(Protocol):
    """Metrics of one kind of file. Its errors need not name the file: `Reader` does."""

    name: str

    @property
    def files(self) -> tuple[Path, ...]: ...

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""

    def run(self, which: int | None) -> Part: ...

    def notes(self) -> tuple[str, ...]: ...


class Reader:
    """A run that may still be going on.

    Args:
        path: a metrics file of verl's file logger (.jsonl), a file or folder of TensorBoard's, of W&B's or of MLflow's,
            a CSV export of W&B, or a folder that holds one of these; sources/find.py says which is taken. PATH:N is
            the Nth run of PATH.
        which: of several runs in one place, counted from 1; the last by default.
    """

    def __init__(self, path: Path, *, which: int | None = None):
        self._path = Path(path)
        self._which = which
        self._source: Source | None = None
        self._events: EventLog | None = None
        self._run: Run | None = None

    def refresh(self) -> Run:
        """The run as it stands now; the same object as before when nothing is new.

        Raises:
            ReportError: nothing can be read. A later refresh may, when the run has just begun.
        """
        try:
            if self._source is None:
                path, self._which = _numbered(self._path, self._which)
                self._source = _open(find(path), self._which)
            changed = self._source.refresh()
            if self._events is None and (log := _events_file(self._source.files)) is not None:
                self._events = EventLog(log)
            if self._events is not None:
                changed = self._refresh_events() or changed
            if self._run is None or changed:
                self._run = None  # stays so when there is an error
                self._run = self._build(self._source)
        except ReportError as error:
            text = str(error)
            read = self._source.files[0] if self._source and self._source.files else self._path
            where = printable(str(read), MOST_MESSAGE)
            raise ReportError(text if text.startswith(where) else f"{where}: {text}") from error
        except OSError as error:
            raise ReportError(f"{error.filename or self._path}: {error.strerror}") from error
        return self._run

    def _refresh_events(self) -> bool:
        assert self._events is not None
        try:
            return self._events.refresh()
        except FileNotFoundError:
            self._events = None
            return True

    def _build(self, source: Source) -> Run:
        part = source.run(self._which)
        log = self._events
        events, strange = _of_steps(() if log is None else log.of(part), int(part.steps[-1]))
        name = printable(source.name)
        return Run(
            # Several runs of one file may be compared.
            name=name if self._which is None or part.runs == 1 else f"{name}:{part.number}",
            sources=source.files if log is None else (*source.files, log.path),
            steps=part.steps.astype(np.int64, copy=False),
            metrics=part.metrics,
            events=events,
            notes=(*part.notes, *source.notes(), *(() if log is None else log.notes()), *strange),
            last=part.number == part.runs,
        )


def read_run(path: Path, which: int | None = None) -> Run:
    """A run as it stands on disk. ReportError, in one line, where there is none."""
    return Reader(path, which=which).refresh()


def _numbered(path: Path, which: int | None) -> tuple[Path, int | None]:
    """Which run of which file: FILE:N is one of FILE, unless a file has that name."""
    file, colon, number = str(path).rpartition(":")
    if not (file and colon and number.isascii() and number.isdigit()) or path.exists() or not Path(file).exists():
        return path, which
    if which not in (None, int(number)):
        raise ReportError(f"{path}: --run says {which}; give one of the two")
    return Path(file), int(number)


def _of_steps(events: tuple[Event, ...], last: int) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """Decisions that can be of a run with this last step, and a note on the others.

    One of the step after it can be: the metrics of a step at which the guard stops the run may not be logged.
    """
    own = tuple(event for event in events if event.step <= last + 1)
    if not (strange := len(events) - len(own)):
        return own, ()
    if strange == 1:
        return own, ("1 decision of the guard is of a later step than the metrics: left out; it is another run's",)
    return own, (
        f"{strange} decisions of the guard are of later steps than the metrics: left out; they are another run's",
    )


def _open(found: Found, which: int | None) -> Source:
    path = found.path
    match found.kind:
        case "tensorboard":
            return TensorBoardSource(path)
        case "wandb":
            return StoreSource(WandbFolder(path), path, which)
        case "mlflow":
            return StoreSource(MlflowFolder(path), path, which)
        case "mlflow database":
            return StoreSource(MlflowDatabase(path), path, which)
        case "csv":
            return CsvSource(path, which)
    return JsonlSource(path)


def _events_file(files: tuple[Path, ...]) -> Path | None:
    """X.guard.jsonl for X.jsonl; beside other kinds of files, the only one that there is; none beside a database."""
    if not files or files[0].suffix in DATABASES:  # they have just been removed; it may lie in /tmp
        return None
    metrics = files[0]
    if metrics.suffix == ".jsonl":
        own = metrics.with_suffix(EVENTS)
        return own if is_regular(own) else None
    found = [file for file in metrics.parent.glob(f"*{EVENTS}") if is_regular(file)]
    return found[0] if len(found) == 1 else None
