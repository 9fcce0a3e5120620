"""MLflow's two stores: folders of text files, and a SQLite database. Both are read without MLflow.

verl's project is MLflow's experiment, and verl's experiment is the name of MLflow's run.

Files are in `mlruns/EXPERIMENT/RUN`: `meta.yaml`, and one file per metric with one line per value.

    metrics/critic/score/mean       TIMESTAMP VALUE STEP (then a data set's name and digest, if there is one)

The database is verl's default: sqlite:////tmp/mlruns.db. Three of its tables are read.

| table | columns |
|---|---|
| experiments | experiment_id, name: verl's project |
| runs | run_uuid, experiment_id, name: verl's experiment; start_time, lifecycle_stage |
| metrics | run_uuid, key, value, is_nan, step |
"""

import math
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from verl_ext.report.files import is_regular, open_regular
from verl_ext.report.run import ReportError, is_step
from verl_ext.report.sources.kinds import Kind, register_kind
from verl_ext.report.sources.store import Process, StoreSource
from verl_ext.report.sources.table import MetricTable

META, METRICS = "meta.yaml", "metrics"
SYSTEM = "system/"  # metrics of the machine, with MLflow's own steps
MOST_DEPTH = 10  # folders in the name of a metric
MOST_LINE = 4096  # bytes
MOST_META = 1 << 16
AT = re.compile(r"_at_(?=[0-9])")
ENTRY = re.compile(r"^(name|run_name|start_time|lifecycle_stage):(.*)$", re.MULTILINE)
DATABASE_ENDINGS = (".db", ".sqlite", ".sqlite3")
DATABASE_NAMES = ("mlruns.db", "mlflow.db")  # verl's default, and MLflow's
FIRST_BYTES = b"SQLite format 3\0"
TABLES = ("experiments", "runs", "metrics")
FUNCTIONS = {"min", "like"}
CHECK_INSTRUCTIONS = 1000  # instructions of SQLite's virtual machine between two checks
LEAST_INSTRUCTIONS, INSTRUCTIONS_PER_BYTE = 1_000_000, 1  # instructions; reading every row takes 0.05 per byte
NOT_TABLES = f"SELECT name FROM sqlite_master WHERE name IN {TABLES} AND (type != 'table' OR rootpage = 0)"
COMPUTED_COLUMNS = "SELECT name FROM pragma_table_xinfo(?) WHERE hidden != 0"
FIRST_STEPS_OF_RUNS = f"SELECT run_uuid, min(step) FROM metrics WHERE key NOT LIKE '{SYSTEM}%' GROUP BY run_uuid"
RUNS = "SELECT rowid, run_uuid, name, experiment_id, start_time FROM runs WHERE lifecycle_stage != 'deleted'"
VALUES = f"""
    SELECT step, key, value, is_nan FROM metrics
    WHERE run_uuid = (SELECT run_uuid FROM runs WHERE rowid = ?) AND key NOT LIKE '{SYSTEM}%' ORDER BY metrics.rowid
"""


class MlflowFolder:
    """A folder of experiments, one experiment, or one run."""

    def __init__(self, path: Path):
        self._path = path

    def _runs(self) -> list[Path]:
        if is_run(self._path):
            return [self._path]
        found = [*self._path.iterdir(), *self._path.glob("*/*")]
        return sorted(folder for folder in found if is_run(folder))

    def files(self) -> Iterable[Path]:
        return (file for run in self._runs() for file in (run / META, *(file for _, file in _metric_files(run))))

    def processes(self) -> list[Process]:
        found = [(run, _meta(run / META)) for run in self._runs()]
        return [_mlflow_process(run, meta) for run, meta in found if meta.get("lifecycle_stage") != "deleted"]


def is_run(folder: Path) -> bool:
    return is_regular(folder / META) and (folder / METRICS).is_dir()


def _mlflow_folder(folder: Path, files: Sequence[str], depth: int) -> list[Path]:
    """Returns the folder of all experiments, but none above the one that was named."""
    return [[folder, *folder.parents][min(depth, 2)]] if is_run(folder) else []


register_kind(
    Kind(
        title="MLflow's file store, or the folder of an experiment or a run in it",
        example="mlruns, mlruns/EXPERIMENT/RUN",
        remarks="`trainer.logger=[console,mlflow]` with `MLFLOW_TRACKING_URI=file:...`",
        order=3,
        open=lambda path, which: StoreSource(MlflowFolder(path), path, which),
        in_folder=_mlflow_folder,
        owns_folder=True,
    )
)


class MlflowDatabase:
    """A SQLite database of MLflow."""

    def __init__(self, path: Path):
        self._path = path

    def files(self) -> Iterable[Path]:
        journal = self._path.with_name(f"{self._path.name}-wal")
        return (file for file in (self._path, journal) if file.exists())

    def processes(self) -> list[Process]:
        with self._rows() as rows:
            projects = {number: _as_text(name) for number, name in rows("SELECT experiment_id, name FROM experiments")}
            first = dict(rows(FIRST_STEPS_OF_RUNS))
            return [
                Process(
                    name=_as_text(name) or _as_text(run),
                    project=projects.get(experiment, ""),
                    started=(started if is_step(started) else 0, _as_text(run)),
                    first=first[run] if is_step(first.get(run)) else None,
                    files=(self._path,),
                    add_to=partial(self._add_values, row),
                )
                for row, run, name, experiment, started in rows(RUNS)
            ]

    def _add_values(self, row: int, table: MetricTable) -> Iterable[str]:
        unreadable = 0
        with self._rows() as rows:
            for step, key, value, is_nan in rows(VALUES, row):
                if is_step(step) and isinstance(key, str):
                    table.add(step, {_verls_name(key): math.nan if is_nan else value})
                else:
                    unreadable += 1
        if unreadable:
            yield f"rows without a step, or a name: {unreadable}; left out"

    @contextmanager
    def _rows(self) -> Iterator[Callable[..., Iterator[tuple]]]:
        """Yields a function that runs a query. Nothing is written, and no code that a foreign file defines is run."""
        with open_regular(self._path) as file:
            if not FIRST_BYTES.startswith(file.read(len(FIRST_BYTES))):
                raise ReportError("this is not a SQLite database")
            most = LEAST_INSTRUCTIONS + INSTRUCTIONS_PER_BYTE * file.seek(0, 2)
        steps = iter(range(most // CHECK_INSTRUCTIONS))
        try:
            database = sqlite3.connect(f"file:{quote(str(self._path.absolute()))}?mode=ro", uri=True)
            try:
                database.text_factory = _as_text
                database.execute("PRAGMA trusted_schema = off")
                for query, values in ((NOT_TABLES, ()), *((COMPUTED_COLUMNS, (table,)) for table in TABLES)):
                    if database.execute(query, values).fetchone():
                        raise ReportError("not MLflow's database: one of its tables is computed")
                database.set_authorizer(_authorize)
                database.set_progress_handler(lambda: next(steps, None) is None, CHECK_INSTRUCTIONS)
                yield lambda query, *values: database.execute(query, values)
            finally:
                database.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the second if SQLite's message quotes bytes beyond UTF-8
            raise ReportError(f"cannot be read as MLflow's database: {error}") from error


register_kind(
    Kind(
        title="MLflow's SQLite file (.db, .sqlite)",
        example="/tmp/mlruns.db",
        remarks="the same, verl's default",
        order=4,
        open=lambda path, which: StoreSource(MlflowDatabase(path), path, which),
        is_named=lambda path: path.suffix.lower() in DATABASE_ENDINGS,
        in_folder=lambda folder, files, depth: [folder / file for file in DATABASE_NAMES if is_regular(folder / file)],
    )
)


def _mlflow_process(run: Path, meta: dict[str, str]) -> Process:
    above = run.resolve().parent
    project = _meta(above / META).get("name", "") if is_regular(above / META) else ""
    first = min(
        (step for _, file in _metric_files(run) for step, _ in islice(_metric_lines(file, []), 1)), default=None
    )
    started = int(meta["start_time"]) if re.fullmatch("[0-9]{1,18}", meta.get("start_time", "")) else 0
    return Process(
        meta.get("run_name") or run.name,
        project or above.name,
        (started, run.name),
        first,
        (run / META,),
        lambda table: _add_metric_files(run, table),
    )


def _add_metric_files(run: Path, table: MetricTable) -> Iterable[str]:
    broken: list[str] = []
    for name, file in _metric_files(run):
        for step, value in _metric_lines(file, broken):
            table.add(step, {name: value})
    if broken:
        yield f"lines of {run.name} that could not be read: {len(broken)} (the first is of {broken[0]}); left out"


def _metric_files(run: Path) -> Iterator[tuple[str, Path]]:
    """Yields name and file of each metric."""
    root = run / METRICS
    for name, folders, files in os.walk(root):
        here = Path(name)
        level = len(here.relative_to(root).parts)
        folders[:] = sorted(folders) if level < MOST_DEPTH else []
        for file in sorted(files):
            metric = (here / file).relative_to(root).as_posix()
            if is_regular(here / file) and not metric.startswith(SYSTEM):
                yield _verls_name(metric), here / file


def _verls_name(metric: str) -> str:
    """Restores verl's name. MLflow allows no `@`: verl logs val-core/gsm8k/acc/mean@1 as mean_at_1 there."""
    return AT.sub("@", metric)


def _metric_lines(file: Path, broken: list[str]) -> Iterator[tuple[int, float]]:
    """Yields (step, value) of each line; unreadable lines go to `broken`, except a cut last line."""
    with open_regular(file) as opened:
        while line := opened.readline(MOST_LINE):
            whole = line.endswith(b"\n")
            found = _parse_metric_line(line)
            if found and whole:
                yield found
            elif whole or len(line) == MOST_LINE:
                broken.append(file.name)


def _parse_metric_line(line: bytes) -> tuple[int, float] | None:
    try:
        _, value, step, *_ = line.split()
        found = int(step), float(value)
    except ValueError:
        return None
    return found if is_step(found[0]) else None


def _meta(file: Path) -> dict[str, str]:
    """Returns the needed entries. A YAML parser is open to attacks: aliases, deep nesting, long run times."""
    with open_regular(file) as opened:
        text = opened.read(MOST_META).decode("utf-8", errors="surrogateescape")
    return {key: _unquote(value.strip()) for key, value in ENTRY.findall(text)}


def _unquote(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1].replace("''", "'")
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _authorize(action: int, name: str | None, function: str | None, _: str | None, inside: str | None) -> int:
    """Allows only reading the three tables."""
    reading = action == sqlite3.SQLITE_READ and name in TABLES and inside is None
    calling = action == sqlite3.SQLITE_FUNCTION and function in FUNCTIONS
    return sqlite3.SQLITE_OK if reading or calling or action == sqlite3.SQLITE_SELECT else sqlite3.SQLITE_DENY


def _as_text(value: object) -> str:
    return value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else str(value or "")
