"""MLflow's SQLite store, where verl logs to by default: sqlite:////tmp/mlruns.db. Three tables of it are read.

| table | columns |
|---|---|
| experiments | experiment_id, name: verl's project |
| runs | run_uuid, experiment_id, name: verl's experiment; start_time, lifecycle_stage |
| metrics | run_uuid, key, value, is_nan, step |
"""

import math
import sqlite3
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from verl_ext.report.files import open_regular
from verl_ext.report.run import ReportError, is_step
from verl_ext.report.sources.mlflow_folder import SYSTEM, verls_name
from verl_ext.report.sources.store import Process
from verl_ext.report.sources.table import Table

ENDINGS = (".db", ".sqlite", ".sqlite3")
NAMES = ("mlruns.db", "mlflow.db")  # verl's default, and MLflow's
BEGINNING = b"SQLite format 3\0"
TABLES = ("experiments", "runs", "metrics")
FUNCTIONS = {"min", "like"}
EVERY = 1000  # instructions of SQLite's machine
LEAST, PER_BYTE = 1_000_000, 1  # of them; reading every row takes 0.05 a byte
FOREIGN = f"SELECT name FROM sqlite_master WHERE name IN {TABLES} AND (type != 'table' OR rootpage = 0)"
MADE = "SELECT name FROM pragma_table_xinfo(?) WHERE hidden != 0"
FIRST_STEPS_OF_RUNS = f"SELECT run_uuid, min(step) FROM metrics WHERE key NOT LIKE '{SYSTEM}%' GROUP BY run_uuid"
RUNS = "SELECT rowid, run_uuid, name, experiment_id, start_time FROM runs WHERE lifecycle_stage != 'deleted'"
VALUES = f"""
    SELECT step, key, value, is_nan FROM metrics
    WHERE run_uuid = (SELECT run_uuid FROM runs WHERE rowid = ?) AND key NOT LIKE '{SYSTEM}%' ORDER BY metrics.rowid
"""


class MlflowDatabase:
    what = "file"

    def __init__(self, path: Path):
        self._path = path

    def state(self) -> Hashable:
        journal = self._path.with_name(f"{self._path.name}-wal")
        statuses = [file.stat() for file in (self._path, journal) if file.exists()]
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses)

    def processes(self) -> list[Process]:
        with self._rows() as rows:
            projects = {number: _text(name) for number, name in rows("SELECT experiment_id, name FROM experiments")}
            first = dict(rows(FIRST_STEPS_OF_RUNS))
            return [
                Process(
                    name=_text(name) or _text(run),
                    project=projects.get(experiment, ""),
                    started=(started if is_step(started) else 0, _text(run)),
                    first=first[run] if is_step(first.get(run)) else None,
                    files=(self._path,),
                    add_to=partial(self._read, row),
                )
                for row, run, name, experiment, started in rows(RUNS)
            ]

    def _read(self, row: int, table: Table) -> Iterable[str]:
        unreadable = 0
        with self._rows() as rows:
            for step, key, value, is_nan in rows(VALUES, row):
                if is_step(step) and isinstance(key, str):
                    table.add(step, {verls_name(key): math.nan if is_nan else value})
                else:
                    unreadable += 1
        if unreadable:
            yield f"rows without a step, or a name: {unreadable}; left out"

    @contextmanager
    def _rows(self) -> Iterator[Callable[..., Iterator[tuple]]]:
        """What gives the rows of a query. Nothing is written, and what a foreign file defines is not run."""
        with open_regular(self._path) as file:
            if not BEGINNING.startswith(file.read(len(BEGINNING))):
                raise ReportError("this is not a SQLite database")
            most = LEAST + PER_BYTE * file.seek(0, 2)
        steps = iter(range(most // EVERY))
        try:
            database = sqlite3.connect(f"file:{quote(str(self._path.absolute()))}?mode=ro", uri=True)
            try:
                database.text_factory = _text
                database.execute("PRAGMA trusted_schema = off")
                for query, values in ((FOREIGN, ()), *((MADE, (table,)) for table in TABLES)):
                    if database.execute(query, values).fetchone():
                        raise ReportError("not MLflow's database: a table of it is computed")
                database.set_authorizer(_allowed)
                database.set_progress_handler(lambda: next(steps, None) is None, EVERY)
                yield lambda query, *values: database.execute(query, values)
            finally:
                database.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the second: of SQLite's own message, naming such a thing
            raise ReportError(f"cannot be read as MLflow's database: {error}") from error


def _allowed(action: int, name: str | None, function: str | None, _: str | None, inside: str | None) -> int:
    """Nothing but reading the three tables."""
    reading = action == sqlite3.SQLITE_READ and name in TABLES and inside is None
    calling = action == sqlite3.SQLITE_FUNCTION and function in FUNCTIONS
    return sqlite3.SQLITE_OK if reading or calling or action == sqlite3.SQLITE_SELECT else sqlite3.SQLITE_DENY


def _text(value: object) -> str:
    return value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else str(value or "")
