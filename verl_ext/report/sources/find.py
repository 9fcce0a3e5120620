"""Which file, or folder of event files, is the run that the user named."""

import csv
import os
import re
from pathlib import Path

from verl_ext.report.run import ReportError
from verl_ext.report.sources.csv_export import LIMITS, STEP_COLUMNS
from verl_ext.report.sources.tensorboard import EVENT_FILE
from verl_ext.run_files import EVENTS, TRAJECTORIES, older_part

DEPTH = 3  # tensorboard_log/PROJECT/EXPERIMENT
LISTED = 10
NOT_METRICS = {
    EVENTS: "the guard's event log",
    TRAJECTORIES: "a log of trajectories",
    older_part(Path(TRAJECTORIES)).name: "the older part of a log of trajectories",
}
METRICS_LINE = re.compile(rb'"step"\s*:\s*-?\d+\s*,\s*"data"\s*:')
SKIPPED_FOLDERS = re.compile(r"\.|global_step_\d+$|__pycache__$")  # checkpoints have thousands of files
ADVICE = "trainer.logger=[console,file] gives a .jsonl file (add tensorboard for TensorBoard's)"


def find(path: Path) -> Path:
    """The file to read, or the folder with the event files.

    A folder stands for the only run in it: one that lies in it directly, else one up to three folders below. The
    metrics file goes before TensorBoard's files, which hold the same numbers with fewer digits.
    """
    if path.is_file():
        for ending, what in NOT_METRICS.items():
            if path.name.endswith(ending):
                raise ReportError(f"{path}: this is {what}; name the metrics file beside it")
        return path
    if not path.is_dir():
        raise ReportError(f"{path}: no such file or folder")
    here = _runs(path, depth=0)
    candidates = here or _runs(path, depth=DEPTH)
    if not candidates:
        raise ReportError(f"{path}: no metrics in this folder; {ADVICE}")
    lines = [run for run in candidates if run.suffix == ".jsonl"]
    folders = [run for run in candidates if run.is_dir()]
    if len(lines) == 1 and len(folders) <= 1:
        candidates = [run for run in candidates if run not in folders]
    if len(candidates) > 1:
        names = [str(run.relative_to(path)) for run in candidates]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise ReportError(f"{path}: several runs in this folder; name one of {', '.join(names[:LISTED])}{more}")
    return candidates[0]


def _runs(folder: Path, depth: int) -> list[Path]:
    found, empty = [], []
    for name, folders, files in os.walk(folder):
        here = Path(name)
        level = len(here.relative_to(folder).parts)
        folders[:] = [] if level >= depth else sorted(each for each in folders if not SKIPPED_FOLDERS.match(each))
        if any(EVENT_FILE in file for file in files):
            found.append(here)
        for file in sorted(files):
            if file.endswith(".jsonl") and not file.endswith(tuple(NOT_METRICS)):
                start = _start(here / file)
                if METRICS_LINE.search(start):
                    found.append(here / file)
                elif not start.strip():
                    empty.append(here / file)
            elif file.endswith(".csv") and _is_export(_start(here / file)):
                found.append(here / file)
    return found or empty  # an empty one may be of a run that has just begun


def _start(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(1 << 16)
    except OSError:
        return b""


def _is_export(start: bytes) -> bool:
    header = next(csv.reader([start.decode("utf-8-sig", errors="replace").partition("\n")[0]]), [])
    return any(name in STEP_COLUMNS or name.endswith(LIMITS) for name in header)
