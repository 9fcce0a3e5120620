"""Which file, or folder of event files, is the run that the user named."""

import csv
import os
import re
from pathlib import Path

from verl_ext.report.files import is_regular, not_a_file, open_regular
from verl_ext.report.run import ReportError
from verl_ext.report.sources.csv_export import LIMITS, STEP_COLUMNS
from verl_ext.report.sources.tensorboard import EVENT_FILE
from verl_ext.run_files import EVENTS, TRAJECTORIES, older_part

DEPTH = 3  # tensorboard_log/PROJECT/EXPERIMENT
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


def find(path: Path) -> Path:
    """The file to read, or the folder with the event files.

    A folder stands for the only run in it: one that lies in it directly, else one up to three folders below. The
    metrics file goes before TensorBoard's files, which hold the same numbers with fewer digits.
    """
    if is_regular(path):
        for ending, what in NOT_METRICS.items():
            if path.name.endswith(ending):
                raise ReportError(f"{path}: this is {what}; name the metrics file beside it")
        return path
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
    lines = [run for run in candidates if run.suffix == ".jsonl"]
    folders = [run for run in candidates if run.is_dir()]
    if len(lines) == 1 and len(folders) <= 1:
        candidates = [run for run in candidates if run not in folders]
    if len(candidates) > 1:
        names = [str(run.relative_to(path)) for run in candidates]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise ReportError(f"{path}: several runs in this folder; name one of {', '.join(names[:LISTED])}{more}")
    return candidates[0]


def _runs(folder: Path, depth: int) -> tuple[list[Path], list[str]]:
    """What can be a run, and what could not be looked at, with the reason. OSError where that is the folder itself."""
    found: list[Path] = []
    empty: list[Path] = []
    refused: list[str] = []

    def refuse(error: OSError) -> None:
        if (place := Path(error.filename)) == folder:
            raise error
        refused.append(f"{place.relative_to(folder)} ({error.strerror})")

    for name, folders, files in os.walk(folder, onerror=refuse):
        here = Path(name)
        level = len(here.relative_to(folder).parts)
        folders[:] = [] if level >= depth else sorted(each for each in folders if not SKIPPED_FOLDERS.match(each))
        if any(EVENT_FILE in file and is_regular(here / file) for file in files):
            found.append(here)
        for file in sorted(each for each in files if each.endswith(ENDINGS) and not each.endswith(tuple(NOT_METRICS))):
            try:
                with open_regular(here / file) as opened:
                    start = opened.read(START)
            except OSError as error:
                refuse(error)
                continue
            if file.endswith(".csv"):
                found += [here / file] if _is_export(start) else []
            elif METRICS_LINE.search(start):
                found.append(here / file)
            elif not start.strip():
                empty.append(here / file)
    return found or empty, refused  # an empty one may be of a run that has just begun


def _is_export(start: bytes) -> bool:
    try:
        header = next(csv.reader([start.decode("utf-8-sig", errors="replace").partition("\n")[0]]), [])
    except csv.Error:
        return False
    return any(name in STEP_COLUMNS or name.endswith(LIMITS) for name in header)
