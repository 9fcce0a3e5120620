"""Logs and documents that were written for people, with metrics somewhere in them: one small class per format.

A format is a class in a file next to this one, under `@register_format`:

- `sniff(text)`: whether this text, one line or many, may have a row of the format; it is called on all text, so it must
  be fast;
- `rows(line)`: the rows of a line: each a step and its values by name. The step is None if the format has none; rows
  are then counted from 1. A line without a newline at its end may be cut.

A document (`document=True`) is sniffed by its beginning, and `rows` takes all of it. Documents are tried before logs,
but those that any text may be (from `LAST` on) after them.
Of several formats that find a row in a log, the one with the lowest `order` reads it; of several with the same order,
the one that finds the most readings which the report knows.

A format may also have `every`, the steps from one row without a step to the next, `torn`, the rows within which the
text so far ends, `notes` on what it left out, and a document `after`, what was printed after its last row.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from verl_ext.guard.state import Event
from verl_ext.report.files import MOST_LINE, READ_BYTES, GrowingFile, fingerprint, open_regular
from verl_ext.report.run import ReportError, is_step
from verl_ext.report.sources.ends import Ends
from verl_ext.report.sources.lines import printed, without_colours
from verl_ext.report.sources.table import MetricTable, Row, TableRun, Which, known_readings, only_validates

MOST_DOCUMENT = 256 << 20  # bytes
LAST = 9  # the order of documents that are tried after the logs
COUNTED = "the rows have no steps: they are counted from 1"
OVERFLOW = re.compile(rb"(?i)overflow.{0,40}skipping step")  # of the loss scalers of DeepSpeed and Apex


class Format(Protocol):
    """Reads the rows of one format. Each file gets its own instance, which may remember what it has read."""

    title: ClassVar[str]
    example: ClassVar[str]
    remarks: ClassVar[str]
    document: ClassVar[bool]
    fewest: ClassVar[int]
    endings: ClassVar[tuple[str, ...]]
    order: ClassVar[int]

    def sniff(self, text: bytes) -> bool: ...

    def rows(self, text: str) -> Iterable[Row]: ...


FORMATS: list[type[Format]] = []


def register_format(
    title: str,
    *,
    example: str = "run.log",
    remarks: str = "",
    document: bool = False,
    fewest: int = 1,
    endings: tuple[str, ...] = (".log", ".out", ".err", ".txt"),
    order: int = 0,
) -> Callable[[type], type]:
    """Registers a class as a format that `verl-ext report` reads.

    Args:
        title: its name in messages, in the help and in docs/report.md.
        example: what a user types to name such a run, for docs/report.md.
        remarks: further remarks for docs/report.md.
        document: the file is read as a whole.
        fewest: how many rows a block of a log must have; more than 1 if other text may have a row by chance.
        endings: files that are looked into when they lie in a folder; a named file is tried whatever its name is.
        order: its place among the formats; of equals, the one that was registered last is tried first.
    """

    def register(made: Any) -> type:
        made.title, made.example, made.remarks = title, example, remarks
        made.document, made.fewest, made.endings, made.order = document, fewest, endings, order
        FORMATS.insert(0, made)
        FORMATS.sort(key=lambda form: (form.order >= LAST, not form.document, form.order))
        return made

    return register


def detect_format(path: Path) -> type[Format] | None:
    """Returns the format of a file; None if no format finds a row in it."""
    with open_regular(path) as file:
        beginning = block = file.read(READ_BYTES)
        documents = [each for each in FORMATS if each.document]
        if found := next((each for each in documents if each.order < LAST and each().sniff(block)), None):
            return found
        left, rest = _log_formats(), b""
        while block:
            lines, newline, rest = (rest + block).rpartition(b"\n")
            found, left = _first_that_sniffs(left, lines if newline else b"", found)
            rest = rest[-MOST_LINE:]
            block = file.read(READ_BYTES) if left else b""
        found, _ = _first_that_sniffs(left, rest, found)
        return found or next((each for each in documents if each.order >= LAST and each().sniff(beginning)), None)


def format_of_text(text: bytes) -> type[Format] | None:
    """Returns the format of a whole log; None if no format finds a row in it."""
    return _first_that_sniffs(_log_formats(), text, None)[0]


def _log_formats() -> list[type[Format]]:
    return [each for each in FORMATS if not each.document]


def _first_that_sniffs(
    left: list[type[Format]], text: bytes, found: type[Format] | None
) -> tuple[type[Format] | None, list[type[Format]]]:
    """Returns the first of the formats in `left` that finds a row, else `found`; and those that would be better."""
    counted: list[type[Format]] = []  # what has rows, but without steps: they may be printed samples
    for order, group in groupby(left, key=lambda form: form.order):
        forms = [*group, *counted]
        most = forms[0].fewest if len(forms) == 1 else None
        rows = {form: list(islice(all_rows(text, form()), most)) for form in forms}
        fitting = [form for form in forms if len(rows[form]) >= form.fewest]
        best = max(fitting, key=lambda form: sum(known_readings(rows[form]).values()), default=None)
        if best is not None and (best in counted or any(step is not None for step, _ in rows[best])):
            return best, [form for form in left if form.order < order]
        counted = fitting
    return (counted[0] if counted else found), left


def rows_in(text: bytes, read: Format) -> Iterator[Row]:
    """Yields the rows in the lines of a text."""
    text = without_colours(text)
    if read.sniff(text):
        for line in text.splitlines(keepends=True):
            if read.sniff(line):
                yield from read.rows(printed(line))


def all_rows(text: bytes, read: Format) -> Iterator[Row]:
    """Yields the rows of a whole text, and what it has of one within which it ends."""
    yield from rows_in(text, read)
    yield from getattr(read, "torn", list)()


def first_step(path: Path, form: type[Format]) -> int:
    """Returns the step of the first row of a log; 0 if its rows have none."""
    read = form()
    with open_regular(path) as file:
        while line := file.readline(MOST_LINE):
            for step, _ in rows_in(line, read):
                return step or 0
    return 0


class TextSource:
    """The metrics in one or several texts of a run, in the order of their writing, and how its processes ended."""

    def __init__(self, paths: Sequence[Path], form: type[Format]):
        self.files = tuple(paths)
        self.name = paths[0].stem
        self._form = form
        self._seen: tuple[object, ...] = ()
        self._every_row_is_a_step = False  # the steps of a row were more than the run has
        self._start_over()

    def _start_over(self) -> None:
        self._table = MetricTable(rows_are_units=True, of_text=True)
        self._ends = Ends()
        self._overflows = 0  # updates that a loss scaler skipped
        self._read = self._form()
        self._is_torn = False  # whether the last row may grow
        self._epochs: list[float] = []  # of the rows without a step, in TRL's epochs
        self._logs = [GrowingFile(path, self._take_lines, self._take_tail, self._replaced) for path in self.files]

    @property
    def _every(self) -> int:
        """The steps from one row without a step to the next."""
        return 1 if self._every_row_is_a_step else getattr(self._read, "every", 1)

    def _replaced(self) -> None:
        raise _ReplacedError

    def refresh(self) -> bool:
        """Reads what is new. Everything is read again if a file that is not the last one has changed."""
        seen = fingerprint(self.files)
        if seen == self._seen:
            return False
        earlier_changed = self._seen and seen[:-1] != self._seen[:-1]
        if self._form.document or earlier_changed or self._is_torn:
            self._start_over()
        try:
            self._refresh()
        except _ReplacedError:
            self._start_over()
            self._refresh()
        self._seen = seen
        return True

    def _refresh(self) -> None:
        if self._form.document:
            for path in self.files:
                with open_regular(path) as file:
                    text = file.read(MOST_DOCUMENT + 1)
                if len(text) > MOST_DOCUMENT:
                    raise ReportError(f"{self._form.title} of more than {MOST_DOCUMENT >> 20} MiB is not read")
                self._add(self._read.rows(text.decode("utf-8", errors="replace")))
                self._ends.add(getattr(self._read, "after", b""))
            return
        for log in self._logs:
            log.refresh()
        torn: list[Row] = getattr(self._read, "torn", list)()
        self._is_torn = bool(torn)
        self._add(torn, torn=True)

    def _take_lines(self, lines: bytes, first_is_cut: bool) -> None:
        lines = without_colours(lines)
        if b"verflow" in lines or b"VERFLOW" in lines:  # searching for either case takes much longer
            self._overflows += len(OVERFLOW.findall(lines))
        if not self._read.sniff(lines):
            self._ends.add(lines)
            return
        for line in lines.splitlines(keepends=True)[first_is_cut:]:
            if not self._add_row(line):
                self._ends.add(line)

    def _take_tail(self, tail: bytes) -> int:
        """Reads a last line without a newline. It is given again with its newline, so only a row that is counted, which
        would be counted twice, is taken for good."""
        counted, tail_length = len(self._epochs), len(tail)
        tail = without_colours(tail)
        self._ends.tail = b"" if self._add_row(tail) else tail
        return tail_length if len(self._epochs) != counted else 0

    def _add_row(self, line: bytes) -> bool:
        """Adds the rows of a line; returns False if it has none."""
        if not self._read.sniff(line):
            return False
        size = len(self._table)
        self._add(self._read.rows(printed(line)))
        return len(self._table) > size

    def _add(self, rows: Iterable[Row], torn: bool = False) -> None:
        for step, values in rows:
            if step is None and self._epochs and only_validates(values):
                step = len(self._epochs) * self._every
            elif step is None:
                step = self._count(values)
                if self._every > 1 and 0 < getattr(self._read, "total", 0) < step * self._every:
                    self._every_row_is_a_step = True
                    raise _ReplacedError
                step *= self._every
            if values and is_step(step):
                self._table.add(step, values)
                self._ends.row(step, validates=only_validates(values), torn=torn)

    def _count(self, values: Mapping[str, object]) -> int:
        """Returns the number of a row without a step. If its epoch is earlier than the last one's, the run was started
        again, and the count goes back to this epoch."""
        last = self._epochs[-1] if self._epochs else 0.0
        epoch = values.get("epoch", last)
        epoch = epoch if isinstance(epoch, float) else last
        if epoch < last:
            while self._epochs and self._epochs[-1] >= epoch:
                self._epochs.pop()
        self._epochs.append(epoch)
        return len(self._epochs)

    def run(self, which: Which) -> TableRun:
        if not len(self._table) and self._ends.events(range(0)):
            return TableRun.before_the_first_step()
        empty = f"no row of {self._form.title} in this file yet; has the run finished its first step?"
        if self._form.document:
            empty = (
                f"this is {self._form.title.partition(' (')[0]}, and no table and no line in it has metrics of a step"
            )
        return self._table.run(which, empty)

    def events(self, part: TableRun) -> tuple[Event, ...]:
        """Returns how the processes of one run ended, if they ended by an error."""
        return self._ends.events(part.rows)

    def trainer(self) -> str:
        """Returns the trainer in whose code the log ends, by the frames of a traceback; "" if none is known."""
        return self._ends.trainer()

    def notes(self) -> tuple[str, ...]:
        every, notes = self._every, list(self._ends.notes(self._every))
        notes += getattr(self._read, "notes", list)()
        if self._overflows:
            notes.append(f"updates that the log says were skipped, because a gradient overflowed: {self._overflows}")
        unit = f"; {every} steps a row, as the log shows" if every > 1 else ""
        return (COUNTED + unit, *notes) if self._epochs else tuple(notes)


class _ReplacedError(Exception):
    """The texts are to be read again from the beginning."""
