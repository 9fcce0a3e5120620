"""Which file, or folder, is the run that the user named, and who wrote it."""

import csv
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_ext.report.files import is_regular, not_a_file, open_regular
from verl_ext.report.run import ReportError
from verl_ext.report.sources.csv_export import LIMITS, STEP_COLUMNS
from verl_ext.report.sources.mlflow_database import ENDINGS as DATABASES
from verl_ext.report.sources.mlflow_database import NAMES
from verl_ext.report.sources.mlflow_folder import is_run
from verl_ext.report.sources.tensorboard import EVENT_FILE
from verl_ext.report.sources.wandb_folder import FILE as WANDB_FILE
from verl_ext.run_files import EVENTS, TRAJECTORIES, older_part

DEPTH = 3  # tensorboard_log/PROJECT/EXPERIMENT, mlruns/PROJECT/RUN
LISTED = 10
START = 1 << 16  # bytes of a file that tell what it is
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
# One run's numbers may lie in several of these: the first has every digit, the last has seven.
SAME_RUN: tuple[Kind, ...] = ("jsonl", "wandb", "mlflow", "mlflow database", "tensorboard")


@dataclass(frozen=True)
class Found:
    kind: Kind
    path: Path


def find(path: Path) -> Found:
    """The file to read, or the folder: of event files, or of runs.

    A folder stands for the only run in it: one that lies in it directly, else one up to three folders below. Of several
    loggers with one each, the first of SAME_RUN is read.
    """
    if is_regular(path):
        for ending, what in NOT_METRICS.items():
            if path.name.endswith(ending):
                raise ReportError(f"{path}: this is {what}; name the metrics file beside it")
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
        return min(candidates, key=lambda run: SAME_RUN.index(run.kind))
    if len(candidates) > 1:
        names = [str(run.path.relative_to(path)) for run in candidates]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise ReportError(f"{path}: several runs in this folder; name one of {', '.join(names[:LISTED])}{more}")
    return candidates[0]


def _kind_of_file(path: Path) -> Kind:
    if EVENT_FILE in path.name:
        return "tensorboard"
    ending = path.suffix.lower()
    if ending in DATABASES:
        return "mlflow database"
    return {".csv": "csv", WANDB_FILE: "wandb"}.get(ending, "jsonl")  # type: ignore[return-value]


def _runs(folder: Path, depth: int) -> tuple[list[Found], list[str]]:
    """What can be a run, and what could not be looked at, with the reason. OSError where that is the folder itself."""
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
            folders[:] = []  # what else a run keeps there: artifacts, tables
            found += [] if store in found else [store]
            continue
        if any(EVENT_FILE in file and is_regular(here / file) for file in files):
            found.append(Found("tensorboard", here))
        found += [Found("mlflow database", here / file) for file in NAMES if file in files and is_regular(here / file)]
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
    return found or empty, refused  # an empty one may be of a run that has just begun


def _store(here: Path, files: list[str], level: int) -> Found | None:
    """The folder of all runs, where this is one of W&B's or MLflow's; not above the one that was named."""
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
