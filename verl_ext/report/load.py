"""Reads a run's metrics and the guard's decisions: once, or repeatedly while it runs."""

import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from verl_ext.base.arguments import run_of, similar_names
from verl_ext.base.errors import file_error_text
from verl_ext.base.names import EVENTS
from verl_ext.base.printable import printable
from verl_ext.diagnosis.causes import known_causes
from verl_ext.diagnosis.findings.registry import RULES
from verl_ext.diagnosis.names import REWARD, by_quantity, combined, quantity_of, unread_names
from verl_ext.diagnosis.series import Series
from verl_ext.report.files import fingerprint, is_regular
from verl_ext.report.find import find_source, join_logs
from verl_ext.report.run import MOST_MESSAGE, ReportError, Run, listed, own_steps
from verl_ext.report.sources.jsonl import EventReader
from verl_ext.report.sources.kinds import RunSource
from verl_ext.report.sources.lines import uncut
from verl_ext.report.sources.mlflow import DATABASE_ENDINGS
from verl_ext.report.sources.table import Which
from verl_ext.report.sources.text import TextSource

STANDARD_INPUT = Path("-")
MOST_NAMES = 8
CHECKPOINT = re.compile(r"checkpoint-\d+")  # of transformers, in the folder of the run
OF_PAIRS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
FEWEST_OF_PAIRS = 2
MOST_PASTE = 4 << 20  # bytes
KEPT_NAME = "standard input"  # the file that it is kept in, which names the run


class Reader:
    """A run that may still be running.

    Args:
        path: a file or folder, in any of the forms of docs/report.md; `find_source` decides which one is read. PATH:N
            is the Nth run of PATH, and PATH:NAME the one of this name. `-` is the standard input.
        which: the number of the run, counted from 1, or its name, if there are several; the last by default.
        more: further logs of the same run.
        names: names of the run's own metrics, and the names under which the report knows them.
    """

    def __init__(
        self, path: Path, *, which: Which = None, more: Sequence[Path] = (), names: Mapping[str, str] | None = None
    ):
        self._paths: Sequence[Path] = (Path(path), *more)
        self._which = which
        self._names = names or {}
        self._source: RunSource | None = None
        self._events: EventReader | None = None
        self._run: Run | None = None
        self._kept: Path | None = None  # the folder of what came from the standard input
        self._cut: Path | None = None  # the file, if the copy is read
        self._seen: tuple[object, ...] = ()  # its fingerprint when it was copied
        self._lines = ""  # that go on in the next line

    def refresh(self) -> Run:
        """Returns the run as it is now; the same object as before if nothing is new.

        Raises:
            ReportError: nothing can be read. A later refresh may succeed, if the run has just begun.
        """
        try:
            if self._cut is not None and fingerprint((self._cut,)) != self._seen:
                self._source = self._cut = None  # the copy does not grow with the file
            if self._source is None:
                self._source = self._find()
            changed = self._source.refresh()
            if self._events is None and (log := _events_file(self._files(self._source))) is not None:
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
            read = self._files(self._source)[0] if self._source and self._source.files else self._paths[0]
            if self._kept is not None:
                text, read = text.removeprefix(f"{self._kept / KEPT_NAME}: "), Path(f"the {KEPT_NAME}")
            where = printable(str(read), MOST_MESSAGE)
            raise ReportError(text if text.startswith(where) else f"{where}: {text}", error.runs) from error
        except OSError as error:
            error.filename = error.filename or self._paths[0]
            raise ReportError(file_error_text(error)) from error
        return self._run

    def _find(self) -> RunSource:
        if len(self._paths) > 1:
            return join_logs(self._paths)
        path, self._which = _numbered(self._paths[0], self._which)
        if path == STANDARD_INPUT:
            self._kept = self._folder
            path = self._kept / KEPT_NAME
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        if (whole := self._with_whole_lines(path)) is not None and self._content(whole) > self._content(path):
            self._cut = path
            return find_source(whole, self._which)
        return find_source(path, self._which)

    def _with_whole_lines(self, path: Path) -> Path | None:
        """Returns a copy of a small file whose lines look cut, as a paste from a terminal has them."""
        if not is_regular(path) or path.stat().st_size > MOST_PASTE:
            return None
        if (found := uncut(path.read_bytes().decode("utf-8", errors="replace"))) is None:
            return None
        text, self._lines = found
        self._seen = fingerprint((path,))
        whole = self._folder / "whole" / path.name
        whole.parent.mkdir(exist_ok=True)
        whole.write_text(text, encoding="utf-8")
        return whole

    @cached_property
    def _folder(self) -> Path:
        """A folder that is removed with this object, or when the process ends."""
        folder = tempfile.mkdtemp(prefix="verl_ext_")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _content(self, path: Path) -> tuple[int, int]:
        """Returns how many readings a file has of quantities that the report knows, and how much it says of ends."""
        try:
            source = find_source(path, self._which)
            source.refresh()
            run = self._build(source)
        except ReportError:
            return 0, 0
        known = (len(series.steps) for name, series in run.metrics.items() if quantity_of(name) is not None)
        return sum(known), sum(len(event.reason) for event in run.events)

    def _files(self, source: RunSource) -> tuple[Path, ...]:
        """Returns the files of the run; of a file whose lines are cut, a copy is read."""
        return source.files if self._cut is None else (self._cut,)

    def _build(self, source: RunSource) -> Run:
        part = source.run(self._which)
        log = self._events
        decisions = () if log is None else log.decisions(part)
        ended_in = ""
        if isinstance(source, TextSource):
            ends = source.events(part)
            decisions, ended_in = (*decisions, *ends), source.trainer() if ends else ""
        events, strange = own_steps(decisions, int(part.steps[-1]), "decision of the guard", "decisions of the guard")
        name = printable(_name_of(source.name, self._files(source)))
        given = {self._names[own]: series for own, series in part.metrics.items() if own in self._names}
        metrics = {own: series for own, series in part.metrics.items() if own not in self._names} | given
        metrics |= _combined(metrics)
        absent = [own for own in self._names if own not in part.metrics]
        return Run(
            # Several runs of one file may be compared.
            name=name if self._which is None or part.runs == 1 else f"{name}:{part.number}",
            sources=self._files(source) if log is None else (*self._files(source), log.path),
            steps=part.steps.astype(np.int64, copy=False),
            metrics=metrics,
            events=tuple(sorted(events, key=lambda event: event.step)),
            notes=(
                *(part.notes + source.notes() + (() if log is None else log.notes())),
                *strange,
                *([f"{self._lines} go on in the next line"] if self._cut is not None else []),
                *(f"--name: the run has no metric {own}{similar_names(own, part.metrics)}" for own in absent),
                *_notes_on_names(metrics),
            ),
            last=part.number == part.runs,
            ended_in=ended_in,
            renamed=frozenset(given),
        )


def read_run(path: Path, which: Which = None, more: Sequence[Path] = (), names: Mapping[str, str] | None = None) -> Run:
    """Reads a run as it is on disk now; ReportError, in one line, if there is none."""
    return Reader(path, which=which, more=more, names=names).refresh()


def read_runs(path: Path, names: Mapping[str, str] | None = None) -> list[Run]:
    """Reads the run of a path, or all runs of a file that has several and no last one."""
    try:
        return [read_run(path, names=names)]
    except ReportError as error:
        if not error.runs:
            raise
        return [read_run(path, number, names=names) for number in range(1, error.runs + 1)]


def _name_of(name: str, files: Sequence[Path]) -> str:
    """Returns a run's name; it is that of the output folder, if its file is one that every run of a trainer has."""
    if name != "trainer_state" or not files:
        return name
    return next((each.name for each in files[0].resolve().parents if not CHECKPOINT.fullmatch(each.name)), "") or name


def _combined(metrics: Mapping[str, Series]) -> dict[str, Series]:
    """Returns the differences and ratios of two metrics that are a quantity which the run did not log (names.toml)."""
    found = {}
    for name, first, sign, second in combined():
        one, other = metrics.get(first), metrics.get(second)
        if one is not None and other is not None:
            steps, at_one, at_other = np.intersect1d(one.steps, other.steps, return_indices=True)
            left, right = one.values[at_one], other.values[at_other]
            with np.errstate(divide="ignore", invalid="ignore"):
                found[name] = Series(steps, left - right if sign == "-" else left / right)
    return found


def _notes_on_names(metrics: Mapping[str, Series]) -> list[str]:
    """Returns notes on the reward, if it is taken by its words, and on metrics that nothing reads, and that look as if
    they mattered."""
    found = by_quantity(metrics)
    rewards = found.get(REWARD, {})
    notes = [f"{name} is taken for the reward, by its words" for name, alias in rewards.items() if alias.by_words]
    if len(paired := [name for canonical in OF_PAIRS for name in found.get(canonical, ())]) >= FEWEST_OF_PAIRS:
        notes.append(
            f"a run on preferred and rejected answers (DPO, KTO), by {', '.join(paired[:FEWEST_OF_PAIRS])}: it has no "
            "rollout and no reward of one. Its gradient is judged, and whether all numbers are finite; not its margins "
            "and log-probabilities"
        )
    if likely := unread_names(metrics):
        known_causes()  # a package that brings causes brings their findings too
    read = {name for names in found.values() for name in names if name not in found}
    read |= {name for rule in RULES.values() for name in rule.needs}
    if names := [name for name in likely if name not in read]:
        remedy = "to have one read, add --name OWN=KNOWN; docs/report.md#names-that-the-report-knows lists the known"
        notes.append(f"not read, because the report does not know them: {listed(names, MOST_NAMES)}; {remedy}")
    return notes


def _numbered(path: Path, which: Which) -> tuple[Path, Which]:
    """Splits FILE:RUN into the file and the number or name of a run in it, unless a file has that name."""
    file, _, run = str(path).rpartition(":")
    if not (file and run) or path.exists() or not Path(file).exists():
        return path, which
    if which not in (None, run_of(run)):
        raise ReportError(f"{path}: --run {which} is given too; use only one of the two")
    return Path(file), run_of(run)


def _events_file(files: tuple[Path, ...]) -> Path | None:
    """Returns the guard's log: X.guard.jsonl for X.jsonl; else the only one in the folder, but none for a database."""
    if not files or files[0].suffix in DATABASE_ENDINGS:  # they have just been removed; a database may be in /tmp
        return None
    metrics = files[0]
    if metrics.suffix == ".jsonl":
        own = metrics.with_suffix(EVENTS)
        return own if is_regular(own) else None
    found = [file for file in metrics.parent.glob(f"*{EVENTS}") if is_regular(file)]
    return found[0] if len(found) == 1 else None
