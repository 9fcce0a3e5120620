"""JSON lines: the metrics of verl's file logger, flat objects of other loggers, and the guard's event log.

A line is `{"step": int, "data": {name: value}}`; or one object with a step and its values, which may be nested; or one
decision of the guard. The file may still be written to, may have been cut by a crash, and may be replaced.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from verl_ext.base.printable import printable
from verl_ext.guard.state import Event
from verl_ext.report.files import GrowingFile
from verl_ext.report.run import is_step
from verl_ext.report.sources.kinds import Kind, register_kind
from verl_ext.report.sources.table import STEP_NAMES, MetricTable, TableRun, Which, flat, step_name, whole_step

METRICS_LINE = re.compile(rb'"step"\s*:\s*-?\d+\s*,\s*"data"\s*:')
RECORD = re.compile(rb'\{\s*"step"\s*:')
LONGEST_WORD = 200  # characters of a text among metrics: a name, a time, a path
# int() takes a time that is quadratic in the digits, and refuses many of them in some versions of Python.
DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits))
MOST_WORDS = 1000  # characters of a reason
FIRST_LINES = 5  # lines of a file that are looked at to recognise it


class JsonLines(ABC):
    """A file of JSON lines. A subclass is given every record once, over any number of refreshes.

    A cut last line is left for the next refresh. If a part of a line cannot be read, its readable records count: a
    crash leaves half a line, and the logger of a resumed run may continue after it. A line that is too long is skipped.

    Attributes:
        broken: number of lines of which a part could not be read, except for a cut last line.
        first_broken: number of the first of them, from 1.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = GrowingFile(path, self._read_lines, self._read_tail, self._begin)
        self._begin()

    @abstractmethod
    def _start_over(self) -> None:
        """Called before the first record, and again when the file has been replaced."""

    @abstractmethod
    def _take(self, record: object) -> bool:
        """Called with each record; returns False if it does not understand it."""

    def _begin(self) -> None:
        self.broken = self.first_broken = 0
        self._lines = 0
        self._start_over()

    def notes(self) -> tuple[str, ...]:
        if not self.broken:
            return ()
        if self.broken == 1:
            return (f"line {self.first_broken} of {self.path.name} could not be read and is left out",)
        first = f"the first is line {self.first_broken}"
        return (f"{self.broken} lines of {self.path.name} could not be read and are left out ({first})",)

    def refresh(self) -> bool:
        """Reads what is new; returns True if there was anything."""
        return self._file.refresh()

    def _read_lines(self, lines: bytes, first_is_cut: bool) -> None:
        for line in lines[:-1].split(b"\n"):
            self._lines += 1
            if first_is_cut or not self._read(line):
                self.broken += 1
                self.first_broken = self.first_broken or self._lines
            first_is_cut = False

    def _read(self, line: bytes) -> bool:
        """Reads a line; returns True if all of it could be read."""
        if b"{" not in line or b"}" not in line:  # no record; raising an error takes 100 times as long as this check
            return not line.strip()
        try:
            if self._take(orjson.loads(line)):
                return True
        except orjson.JSONDecodeError:
            pass
        whole, end = True, 0
        for value, start, stop in _json_records(line):
            taken = self._take(value)
            whole = whole and taken and not line[end:start].strip()
            end = stop
        return whole and not line[end:].strip()

    def _read_tail(self, tail: bytes) -> int:
        """Reads a last line without a newline as far as it is complete: the braces of a record close."""
        end = 0
        for value, start, stop in _json_records(tail):
            if tail[end:start].strip() or not self._take(value):
                break
            end = stop
        return end


class JsonlSource(JsonLines):
    """A metrics file of JSON lines: of verl's file logger, or flat."""

    def __init__(self, path: Path):
        self.files = (path,)
        # --run-dir of `verl-ext submit` names every run's file metrics.jsonl
        self.name = path.resolve().parent.name.lstrip(".") if path.stem == "metrics" else path.stem
        super().__init__(path)

    def _start_over(self) -> None:
        self._table = MetricTable(rows_are_units=True)

    def _take(self, record: object) -> bool:
        if type(record) is not dict:
            return False
        step, data = record.get("step"), record.get("data")
        if type(data) is not dict:
            step, data = flat_row(record)
        if not is_step(step):
            return False
        self._table.add(step, data)
        return True

    def run(self, which: Which) -> TableRun:
        empty = "no complete step in this file; has the run finished its first step?"
        if self.broken:
            empty = f"no line is a JSON object with a step ({', '.join(STEP_NAMES[:3])}, ...) and numbers"
        return self._table.run(which, empty)


def flat_row(record: Mapping[str, object]) -> tuple[object, dict[str, object]]:
    """Returns the step and the values of a flat object; the step is None if this is no row of metrics.

    A row without numbers does not count, nor does one with prose: a dumped answer has a step and a score, too.
    """
    data = dict(flat(record))
    step = whole_step(data.pop(name)) if (name := step_name(data)) else None
    prose = any(isinstance(value, str) and len(value) > LONGEST_WORD for value in data.values())
    if prose or not any(isinstance(value, (int, float)) for value in data.values()):
        return None, {}
    return step, data


def _is_json_lines(start: bytes) -> bool:
    if METRICS_LINE.search(start):
        return True
    # The first lines may be the run's config, without a step.
    return any(map(_is_row, start.lstrip().splitlines()[:FIRST_LINES]))


def _is_row(line: bytes) -> bool:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    fields = record.values() if isinstance(record, dict) else [[{}]]
    if any(isinstance(each, list) and each and isinstance(each[0], dict) for each in fields):
        return False  # no object, or a whole document in one line
    return is_step(flat_row(record)[0])


register_kind(
    Kind(
        title="JSON lines of verl's file logger, or of another one, with a step",
        example="X.jsonl, metrics.jsonl",
        remarks="verl's with `trainer.logger=[console,file]`; `X.guard.jsonl` and `X.trajectories.jsonl` of the same "
        "folder are read too. Others have one object per step. The step is `step`, `global_step`, "
        "`iteration` or the like; nested objects are joined by `/`",
        order=1,
        open=lambda path, which: JsonlSource(path),
        sniff=_is_json_lines,
        endings=(".jsonl",),
    )
)


class EventReader(JsonLines):
    """The guard's event log."""

    def _start_over(self) -> None:
        self._events: list[Event] = []

    def _take(self, record: object) -> bool:
        if not isinstance(record, dict) or not is_step(record.get("step")):
            return False
        words = {name: record.get(name, "") for name in ("rule", "signal", "action", "reason")}
        numbers: dict[str, Any] = {name: record.get(name) for name in ("value", "threshold")}
        if not all(isinstance(word, str) for word in words.values()):
            return False
        if not all(number is None or isinstance(number, (int, float)) for number in numbers.values()):
            return False
        shown: dict[str, Any] = {name: printable(" ".join(word.split()), MOST_WORDS) for name, word in words.items()}
        self._events.append(Event(step=record["step"], **shown, **numbers))
        return True

    def decisions(self, part: TableRun) -> tuple[Event, ...]:
        """Returns the decisions of one run.

        No line names its run. If the log has as many parts of rising steps as there are runs, each run gets one; else
        the whole log is the last run's. A decision is left out if the run was resumed before it: a later line of the
        same run has an earlier step; or its step's metrics were abandoned, and it, or a later decision, has the value
        of an abandoned row; or nothing was logged for its step since.
        """
        events = self._events
        if part.runs > 1:
            back = [at for at in range(1, len(events)) if events[at].step < events[at - 1].step]
            bounds = [0, *back, len(events)]
            if len(bounds) - 1 == part.runs:
                events = events[bounds[part.number - 1] : bounds[part.number]]
            elif part.number < part.runs:
                return ()
        abandoned = {step for series in part.overwritten.values() for step in series.steps.tolist()}
        old = 1 + max((at for at, event in enumerate(events) if _is_overwritten(event, part)), default=-1)
        events = [event for at, event in enumerate(events) if at >= old or event.step not in abandoned]
        gone = set(part.gone.tolist())
        valid: list[Event] = []
        for event in reversed(events):
            if not valid or event.step <= valid[-1].step:
                valid.append(event)
        return tuple(event for event in reversed(valid) if event.step not in gone)


def _is_overwritten(event: Event, part: TableRun) -> bool:
    """Returns True if a decision was made on a row that a resumed run has overwritten: on its value, and not on that of
    the valid row."""
    value = math.nan if event.value is None else event.value
    rows = [series.at(event.step) for found in (part.overwritten, part.metrics) if (series := found.get(event.signal))]
    same = [np.isclose(each, value, rtol=1e-5, atol=0, equal_nan=True) for each in rows if each is not None]
    return same == [True, False]


def _json_records(text: bytes) -> Iterator[tuple[object, int, int]]:
    """Yields (value, start, end) of the JSON value at the beginning, and of every later one that begins as a record
    does.

    A record is read at most up to the beginning of the next, so each byte is read only a few times, however many
    records are broken.
    """
    value, end = _first_record(text)
    if end:
        yield value, 0, end
    starts = [found.start() for found in RECORD.finditer(text, max(end, 1))]
    for start, stop in pairwise([*starts, len(text)]):
        value, length = _first_record(text[start:stop])
        if length:
            yield value, start, start + length


def _first_record(text: bytes) -> tuple[object, int]:
    """Returns the JSON value at the beginning, and its number of bytes; 0 if it is cut or broken.

    It reads more than orjson: NaN, lone surrogates, bytes that are not UTF-8, and values with trailing bytes.
    """
    if b"}" not in text:
        return None, 0
    decoded = text.decode("utf-8", errors="surrogateescape")
    behind_space = len(decoded) - len(decoded.lstrip())
    try:
        value, end = DECODER.raw_decode(decoded, behind_space)
    except (ValueError, RecursionError):
        return None, 0
    return value, len(decoded[:end].encode("utf-8", errors="surrogateescape"))
