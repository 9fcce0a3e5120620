"""Finds the file, files or folder that hold a run, and what can read them.

A file's kind follows from its contents, except for databases and event files. A folder is read as the only run in it:
the run is directly in it, or up to three folders below.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl_ext.base.arguments import similar_names
from verl_ext.base.names import EVENTS, TRAJECTORIES, older_part
from verl_ext.report.files import is_regular, not_a_file, open_regular
from verl_ext.report.run import ReportError, listed
from verl_ext.report.sources import FORMATS, KINDS
from verl_ext.report.sources.cells import found_names
from verl_ext.report.sources.csv_export import SEPARATORS
from verl_ext.report.sources.ends import Search, progress
from verl_ext.report.sources.kinds import Kind, RunSource
from verl_ext.report.sources.table import Which
from verl_ext.report.sources.text import Format, TextSource, detect_format, first_step

MOST_DEPTH = 3  # tensorboard_log/PROJECT/EXPERIMENT, mlruns/PROJECT/RUN
MOST_LISTED = 10
START_BYTES = 1 << 16  # of a file, which identify its kind
END_BYTES = 1 << 20  # of a file, which may have the error that ended its process
NOT_METRICS = {
    EVENTS: "the guard's event log",
    TRAJECTORIES: "a log of trajectories",
    older_part(Path(TRAJECTORIES)).name: "the older part of a log of trajectories",
}
MARKUP = re.compile(rb"\s*<(?:!doctype|html|\?xml)", re.IGNORECASE)
SKIPPED_FOLDERS = re.compile(r"\.|global_step_\d+$|__pycache__$")  # checkpoints have thousands of files
ADVICE = "trainer.logger=[console,file] gives a .jsonl file (add tensorboard for TensorBoard's)"
# How other files begin, and what would make their run readable.
OTHERS = (
    (b"\x1f\x8b", "a gzip archive: unpack it first (gunzip -k FILE)"),
    (b"PK\x03\x04", "a zip archive or a checkpoint of torch: name the run's log or metrics file instead"),
    (b"PAR1", "a Parquet file: export it as CSV, with a column for the step"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first (unzstd FILE)"),
    (b"BZh", "a bzip2 archive: unpack it first (bunzip2 -k FILE)"),
    (b"\xfd7zXZ", "an xz archive: unpack it first (unxz -k FILE)"),
    (b"\x89PNG", "a picture: export the run's history as CSV instead"),
    (b"\xff\xd8\xff", "a picture: export the run's history as CSV instead"),
    (b"%PDF", "a PDF: export the run's history as CSV instead"),
    (b"\xff\xfe", "text in UTF-16: convert it first (iconv -f UTF-16 -t UTF-8 FILE)"),
    (b"\x80", "a pickle, which is not opened: name the run's log or metrics file instead"),
)

Found = tuple[Kind, Path]  # a run on disk


def find_source(path: Path, which: Which) -> RunSource:
    """Returns the source that reads the run of this file or folder.

    Raises:
        ReportError: there is none, or there are several.
    """
    if is_regular(path):
        return _source_of_file(path, which)
    if not path.is_dir():
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            near = similar_names(path.name, (each.name for each in path.parent.glob("*")))
            raise ReportError(f"{path}: no such file or folder{near}") from None
        raise not_a_file(path, mode)
    found, refused = _runs(path, depth=0)
    if not found:
        if logs := _logs_in(path):
            return logs
        if states := sorted(path.glob("checkpoint-*/trainer_state.json"), key=_natural):
            return _source_of_file(states[-1], which)  # the last one has the history of those before
        found, refused = _runs(path, depth=MOST_DEPTH)
    if not found:
        also = f"; not read: {', '.join(refused[:MOST_LISTED])}" if refused else ""
        raise ReportError(f"{path}: no metrics in this folder{also}; {ADVICE}")
    titles = {kind.title for kind, _ in found}
    by_several_loggers = len(titles) == len(found) and all(kind.by_logger for kind, _ in found)
    if len(found) > 1 and not by_several_loggers:
        names = [str(place.relative_to(path)) for _, place in found]
        raise ReportError(f"{path}: several runs in this folder; name one of {listed(names, MOST_LISTED)}")
    kind, place = min(found, key=lambda run: run[0].order)
    return kind.open(place, which)


def join_logs(paths: Sequence[Path]) -> RunSource:
    """Returns the source that reads several logs of one run: of the processes of a job, or of successive jobs.

    Raises:
        ReportError: one of them is no log, or has another format than the first.
    """
    forms: dict[Path, type[Format]] = {}
    for path in paths:
        if (form := detect_format(path)) is None or form.document:
            raise ReportError(f"{path}: only logs with rows of metrics are read together; report this file alone")
        forms[path] = form
        if form is not (first := forms[paths[0]]):
            raise ReportError(f"{path} is {form.title}, and {paths[0]} is {first.title}: they are not of one run")
    return _in_order(paths, forms[paths[0]])


def _in_order(paths: Iterable[Path], form: type[Format]) -> TextSource:
    return TextSource(sorted(paths, key=lambda path: (first_step(path, form), _natural(path))), form)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Orders names as people do: job-9 before job-10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", str(path))]


def _source_of_file(path: Path, which: Which) -> RunSource:
    for ending, what in NOT_METRICS.items():
        if path.name.endswith(ending):
            raise ReportError(f"{path}: this is {what}; name the metrics file next to it")
    named = next((kind for kind in KINDS if kind.is_named(path)), None)
    if named is not None:
        return named.open(path, which)
    with open_regular(path) as file:
        start = file.read(START_BYTES)
    if kind := _kind_of(start):
        return kind.open(path, which)
    if not MARKUP.match(start) and (form := detect_format(path)):
        return TextSource([path], form)
    if kind := _kind_of_ending(path.name.lower()):  # its own error says more
        return kind.open(path, which)
    if not start.strip():  # an empty file may belong to a run that has just begun
        return KINDS[0].open(path, which)
    with open_regular(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - END_BYTES, 0))
        end = file.read(END_BYTES) if b"\0" not in start else b""
    if Search(end, Counter(), whole=True).root():
        return TextSource([path], FORMATS[-1])
    found = progress(end)
    where = f"; its progress ends at {found[0]} of {found[1]}" if found else ""
    raise ReportError(f"{path}: {_what_else(start)}{where}")


def _kind_of(start: bytes) -> Kind | None:
    """Returns the kind of a file by its beginning."""
    return next((kind for kind in KINDS if kind.sniff(start)), None)


def _kind_of_ending(name: str) -> Kind | None:
    return next((kind for kind in KINDS if name.endswith(kind.endings)), None)


def _what_else(start: bytes) -> str:
    """Returns what a file that nothing reads seems to be, and what would make its run readable."""
    for magic, what in OTHERS:
        if start.startswith(magic):
            return f"this is {what}"
    if b"\0" in start[:4096]:
        return "this is a binary file that no reader knows; name the run's log or metrics file instead"
    if re.match(rb"\s*(?:\{|\[\s*[\[{\"\d])", start):
        return (
            "this is JSON, but neither trainer_state.json nor lines of objects with a step; write one object a line, "
            'such as {"step": 1, "reward": 0.5}'
        )
    first, *second = start.decode("utf-8", errors="replace").splitlines()[:2] or [""]
    counts = {separator: first.count(separator) for separator in SEPARATORS}
    alike = any(count > 1 and all(line.count(each) == count for line in second) for each, count in counts.items())
    if alike and not re.search(r"[:=] ?[-+.\d]", first):  # which no header has
        return "this may be a table, but no column is the step; name one of them step"
    found = listed(found_names(start.decode("utf-8", errors="replace")), MOST_LISTED)
    without = f" (found without one: {found})" if found else ""
    return (
        f"this is text, but no line has a step with its metrics{without}; verl prints them with "
        "trainer.logger=[console], TRL as dictionaries, and a line such as `step: 3, reward: 0.5` is read too"
    )


def _logs_in(folder: Path) -> TextSource | None:
    """Returns the source that reads the logs with metrics directly in a folder, in the first of FORMATS that fits."""
    endings = tuple(ending for form in FORMATS for ending in form.endings)
    here = [path for path in sorted(folder.iterdir()) if path.name.endswith(endings) and is_regular(path)]
    forms = {path: form for path in here if (form := detect_format(path)) is not None}
    if not forms:
        return None
    best = min(forms.values(), key=FORMATS.index)
    return _in_order((path for path, form in forms.items() if form is best), best)


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
        depth_here = len(here.relative_to(folder).parts)
        folders[:] = [] if depth_here >= depth else sorted(each for each in folders if not SKIPPED_FOLDERS.match(each))
        shown = [(kind, path) for kind in KINDS for path in kind.in_folder(here, files, depth_here)]
        if owner := next((run for run in shown if run[0].owns_folder), None):
            folders[:] = []  # they hold other files of a run: artifacts, tables
            if owner not in found:
                found.append(owner)
            continue
        found += shown
        for file in sorted(files):
            if _kind_of_ending(file) is None or file.endswith(tuple(NOT_METRICS)):
                continue
            try:
                with open_regular(here / file) as opened:
                    start = opened.read(START_BYTES)
            except OSError as error:
                refuse(error)
                continue
            if kind := _kind_of(start):
                found.append((kind, here / file))
            elif not start.strip() and (kind := _kind_of_ending(file)) and kind.by_logger:
                empty.append((kind, here / file))
    return found or empty, refused  # an empty one may belong to a run that has just begun
