"""MLflow's file store: `mlruns/EXPERIMENT/RUN`, in it `meta.yaml`, and a file a metric with a line a value.

    metrics/critic/score/mean       TIMESTAMP VALUE STEP (then a data set's name and digest, where there is one)

verl's project is MLflow's experiment, and verl's experiment is the name of MLflow's run.
"""

import os
import re
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from verl_ext.report.files import is_regular, open_regular
from verl_ext.report.run import is_step
from verl_ext.report.sources.store import Process
from verl_ext.report.sources.table import Table

META, METRICS = "meta.yaml", "metrics"
SYSTEM = "system/"  # metrics of the machine, which MLflow counts by steps of its own
DEPTH = 10  # folders in the name of a metric
MOST_LINE = 4096  # bytes
MOST_META = 1 << 16
AT = re.compile(r"_at_(?=[0-9])")
ENTRY = re.compile(r"^(name|run_name|start_time|lifecycle_stage):(.*)$", re.MULTILINE)


class MlflowFolder:
    """A folder of experiments, one experiment, or one run."""

    what = "folder"

    def __init__(self, path: Path):
        self._path = path

    def _runs(self) -> list[Path]:
        if is_run(self._path):
            return [self._path]
        found = [*self._path.iterdir(), *self._path.glob("*/*")]
        return sorted(folder for folder in found if is_run(folder))

    def state(self) -> Hashable:
        files = [file for run in self._runs() for file in (run / META, *(file for _, file in _metrics(run)))]
        statuses = [(file, file.stat()) for file in files]
        return tuple((file, status.st_ino, status.st_size, status.st_mtime_ns) for file, status in statuses)

    def processes(self) -> list[Process]:
        found = [(run, _meta(run / META)) for run in self._runs()]
        return [_process(run, meta) for run, meta in found if meta.get("lifecycle_stage") != "deleted"]


def is_run(folder: Path) -> bool:
    return is_regular(folder / META) and (folder / METRICS).is_dir()


def _process(run: Path, meta: dict[str, str]) -> Process:
    above = run.resolve().parent
    project = _meta(above / META).get("name", "") if is_regular(above / META) else ""
    first = min((step for _, file in _metrics(run) for step, _ in islice(_lines(file, []), 1)), default=None)
    started = int(meta["start_time"]) if re.fullmatch("[0-9]{1,18}", meta.get("start_time", "")) else 0
    return Process(
        meta.get("run_name") or run.name,
        project or above.name,
        (started, run.name),
        first,
        (run / META,),
        lambda table: _read(run, table),
    )


def _read(run: Path, table: Table) -> Iterable[str]:
    broken: list[str] = []
    for name, file in _metrics(run):
        for step, value in _lines(file, broken):
            table.add(step, {name: value})
    if broken:
        yield f"lines of {run.name} that could not be read: {len(broken)} (the first is of {broken[0]}); left out"


def _metrics(run: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of each metric."""
    root = run / METRICS
    for name, folders, files in os.walk(root):
        here = Path(name)
        level = len(here.relative_to(root).parts)
        folders[:] = sorted(folders) if level < DEPTH else []
        for file in sorted(files):
            metric = (here / file).relative_to(root).as_posix()
            if is_regular(here / file) and not metric.startswith(SYSTEM):
                yield verls_name(metric), here / file


def verls_name(metric: str) -> str:
    """MLflow has no `@` in a name: verl logs val-core/gsm8k/acc/mean@1 as mean_at_1 there."""
    return AT.sub("@", metric)


def _lines(file: Path, broken: list[str]) -> Iterator[tuple[int, float]]:
    """(step, value) of each line; what cannot be read goes to `broken`, but for a last line that is cut."""
    with open_regular(file) as opened:
        while line := opened.readline(MOST_LINE):
            whole = line.endswith(b"\n")
            found = _value(line)
            if found and whole:
                yield found
            elif whole or len(line) == MOST_LINE:
                broken.append(file.name)


def _value(line: bytes) -> tuple[int, float] | None:
    try:
        _, value, step, *_ = line.split()
        found = int(step), float(value)
    except ValueError:
        return None
    return found if is_step(found[0]) else None


def _meta(file: Path) -> dict[str, str]:
    """The entries that are needed. A YAML reader would take what an enemy gives it: aliases, depth, time."""
    with open_regular(file) as opened:
        text = opened.read(MOST_META).decode("utf-8", errors="surrogateescape")
    return {key: _unquoted(value.strip()) for key, value in ENTRY.findall(text)}


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1].replace("''", "'")
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
