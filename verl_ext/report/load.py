"""Reads a run's metrics and the guard's decisions: once, or repeatedly while it runs.

`Reader` finds the file or folder that the user named, detects who wrote it, and gives it to one of `sources`.
"""

import csv
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from verl_ext.base.names import EVENTS, TRAJECTORIES, older_part
from verl_ext.base.printable import printable
from verl_ext.report.files import is_regular, not_a_file, open_regular
from verl_ext.report.run import MOST_MESSAGE, ReportError, Run, own_steps
from verl_ext.report.sources.csv_export import LIMITS, STEP_COLUMNS, CsvSource
from verl_ext.report.sources.jsonl import EventReader, JsonlSource
from verl_ext.report.sources.mlflow import DATABASE_ENDINGS, DATABASE_NAMES, MlflowDatabase, MlflowFolder, is_run
from verl_ext.report.sources.store import StoreSource
from verl_ext.report.sources.table import TableRun
from verl_ext.report.sources.tensorboard import EVENT_FILE, TensorBoardSource
from verl_ext.report.sources.wandb import FILE as WANDB_FILE
from verl_ext.report.sources.wandb import WandbFolder

DEPTH = 3  # tensorboard_log/PROJECT/EXPERIMENT, mlruns/PROJECT/RUN
LISTED = 10
START = 1 << 16  # bytes of a file that identify its kind
ENDINGS = (".jsonl", ".csv")
NOT_METRICS = {
    EVENTS: "the guard's event log",
    TRAJECTORIES: "a log of trajectories",
    older_part(Path(TRAJECTORIES)).name: "the older part of a log of trajectories",
}
METRICS_LINE = re.compile(rb'"step"\s*:\s*-?\d+\s*,\s*"data"\s*:')
SKIPPED_FOLDERS = re.compile(r"\.|global_step_\d+$|__pycache__$")  # checkpoints have thousands of files
ADVICE = "trainer.logger=[console,file] gives a .jsonl file (add tensorboard for TensorBoard's)"

Kind = Literal["jsonl", "wandb", "mlflow", "mlflow database", "tensorboard", "csv"]


class RunSource(Protocol):
    """Metrics of one kind of file. Its errors need not name the file: `Reader` does."""

    name: str

    @property
    def files(self) -> tuple[Path, ...]: ...

    def refresh(self) -> bool:
        """Reads new data; returns whether there was any."""

    def run(self, which: int | None) -> TableRun: ...

    def notes(self) -> tuple[str, ...]: ...


SOURCES: dict[Kind, Callable[[Path, int | None], RunSource]] = {
    "jsonl": lambda path, which: JsonlSource(path),
    "wandb": lambda path, which: StoreSource(WandbFolder(path), path, which),
    "mlflow": lambda path, which: StoreSource(MlflowFolder(path), path, which),
    "mlflow database": lambda path, which: StoreSource(MlflowDatabase(path), path, which),
    "tensorboard": lambda path, which: TensorBoardSource(path),
    "csv": CsvSource,
}
# One run's numbers may be in several of these: the first has every digit, the last but one has seven.
BEST_FIRST = tuple(SOURCES)


@dataclass(frozen=True)
class Found:
    kind: Kind
    path: Path


class Reader:
    """A run that may still be running.

    Args:
        path: a metrics file of verl's file logger (.jsonl), a file or folder of TensorBoard's, of W&B's or of MLflow's,
            a CSV export of W&B, or a folder with one of these; `_find` decides which one is read. PATH:N is
            the Nth run of PATH.
        which: the number of the run, counted from 1, if there are several; the last by default.
    """

    def __init__(self, path: Path, *, which: int | None = None):
        self._path = Path(path)
        self._which = which
        self._source: RunSource | None = None
        self._events: EventReader | None = None
        self._run: Run | None = None

    def refresh(self) -> Run:
        """Returns the run as it is now; the same object as before if nothing is new.

        Raises:
            ReportError: nothing can be read. A later refresh may succeed, if the run has just begun.
        """
        try:
            if self._source is None:
                path, self._which = _numbered(self._path, self._which)
                found = _find(path)
                self._source = SOURCES[found.kind](found.path, self._which)
            changed = self._source.refresh()
            if self._events is None and (log := _events_file(self._source.files)) is not None:
                self._events = EventReader(log)
            try:
                changed = (self._events is not None and self._events.refresh()) or changed
            except FileNotFoundError:
                self._events, changed = None, True
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

    def _build(self, source: RunSource) -> Run:
        part = source.run(self._which)
        log = self._events
        decisions = () if log is None else log.decisions(part)
        events, strange = own_steps(decisions, int(part.steps[-1]), "decision of the guard", "decisions of the guard")
        name = printable(source.name)
        return Run(
            # Several runs of one file may be compared.
            name=name if self._which is None or part.runs == 1 else f"{name}:{part.number}",
            sources=source.files if log is None else (*source.files, log.path),
            steps=part.steps.astype(np.int64, copy=False),
            metrics=part.metrics,
            events=tuple(events),
            notes=(*part.notes, *source.notes(), *(() if log is None else log.notes()), *strange),
            last=part.number == part.runs,
        )


def read_run(path: Path, which: int | None = None) -> Run:
    """Reads a run as it is on disk now; ReportError, in one line, if there is none."""
    return Reader(path, which=which).refresh()


def _numbered(path: Path, which: int | None) -> tuple[Path, int | None]:
    """Splits FILE:N into the file and the number of a run in it, unless a file has that name."""
    file, colon, number = str(path).rpartition(":")
    if not (file and colon and number.isascii() and number.isdigit()) or path.exists() or not Path(file).exists():
        return path, which
    if which not in (None, int(number)):
        raise ReportError(f"{path}: --run {which} is given too; use only one of the two")
    return Path(file), int(number)


def _events_file(files: tuple[Path, ...]) -> Path | None:
    """Returns the guard's log: X.guard.jsonl for X.jsonl. For another kind of file, the only one in its folder; none
    for a database."""
    if not files or files[0].suffix in DATABASE_ENDINGS:  # they have just been removed; a database may be in /tmp
        return None
    metrics = files[0]
    if metrics.suffix == ".jsonl":
        own = metrics.with_suffix(EVENTS)
        return own if is_regular(own) else None
    found = [file for file in metrics.parent.glob(f"*{EVENTS}") if is_regular(file)]
    return found[0] if len(found) == 1 else None


def _find(path: Path) -> Found:
    """Returns the file to read, or the folder of event files or of runs.

    A folder stands for the only run in it: one directly in it, else one up to three folders below. If several loggers
    wrote one each, the first of BEST_FIRST is read.
    """
    if is_regular(path):
        for ending, what in NOT_METRICS.items():
            if path.name.endswith(ending):
                raise ReportError(f"{path}: this is {what}; name the metrics file next to it")
        return Found(_kind_of_file(path), path)
    if not path.is_dir():
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            raise ReportError(f"{path}: no such file or folder") from None
        raise not_a_file(path, mode)
    candidates, refused = _runs(path, depth=0)
    if not candidates:
        candidates, refused = _runs(path, depth=DEPTH)
    if not candidates:
        also = f"; not read: {', '.join(refused[:LISTED])}" if refused else ""
        raise ReportError(f"{path}: no metrics in this folder{also}; {ADVICE}")
    kinds = [run.kind for run in candidates]
    if len(set(kinds)) == len(kinds) and "csv" not in kinds:
        return min(candidates, key=lambda run: BEST_FIRST.index(run.kind))
    if len(candidates) > 1:
        names = [str(run.path.relative_to(path)) for run in candidates]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise ReportError(f"{path}: several runs in this folder; name one of {', '.join(names[:LISTED])}{more}")
    return candidates[0]


def _kind_of_file(path: Path) -> Kind:
    if EVENT_FILE in path.name:
        return "tensorboard"
    ending = path.suffix.lower()
    if ending in DATABASE_ENDINGS:
        return "mlflow database"
    return {".csv": "csv", WANDB_FILE: "wandb"}.get(ending, "jsonl")  # type: ignore[return-value]


def _runs(folder: Path, depth: int) -> tuple[list[Found], list[str]]:
    """Returns what may be a run, and what could not be read, with the reason; OSError if `folder` cannot be read."""
    found: list[Found] = []
    empty: list[Found] = []
    refused: list[str] = []

    def refuse(error: OSError) -> None:
        if (place := Path(error.filename)) == folder:
            raise error
        refused.append(f"{place.relative_to(folder)} ({error.strerror})")

    for name, folders, files in os.walk(folder, onerror=refuse):
        here = Path(name)
        level = len(here.relative_to(folder).parts)
        folders[:] = [] if level >= depth else sorted(each for each in folders if not SKIPPED_FOLDERS.match(each))
        if store := _store(here, files, level):
            folders[:] = []  # they hold other files of a run: artifacts, tables
            found += [] if store in found else [store]
            continue
        if any(EVENT_FILE in file and is_regular(here / file) for file in files):
            found.append(Found("tensorboard", here))
        found += [
            Found("mlflow database", here / file)
            for file in DATABASE_NAMES
            if file in files and is_regular(here / file)
        ]
        for file in sorted(each for each in files if each.endswith(ENDINGS) and not each.endswith(tuple(NOT_METRICS))):
            try:
                with open_regular(here / file) as opened:
                    start = opened.read(START)
            except OSError as error:
                refuse(error)
                continue
            if file.endswith(".csv"):
                found += [Found("csv", here / file)] if _is_export(start) else []
            elif METRICS_LINE.search(start):
                found.append(Found("jsonl", here / file))
            elif not start.strip():
                empty.append(Found("jsonl", here / file))
    return found or empty, refused  # an empty one may belong to a run that has just begun


def _store(here: Path, files: list[str], level: int) -> Found | None:
    """Returns the folder of all runs if `here` is a run of W&B or MLflow, but none above the folder that was named."""
    if any(file.endswith(WANDB_FILE) and is_regular(here / file) for file in files):
        return Found("wandb", here if level == 0 else here.parent)
    if is_run(here):
        return Found("mlflow", [here, *here.parents][min(level, 2)])
    return None


def _is_export(start: bytes) -> bool:
    try:
        header = next(csv.reader([start.decode("utf-8-sig", errors="replace").partition("\n")[0]]), [])
    except csv.Error:
        return False
    return any(name in STEP_COLUMNS or name.endswith(LIMITS) for name in header)
