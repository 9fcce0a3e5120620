"""Tables: rows of cells below a header. One recogniser of the step's column, of numbers, and of rows in a text.

| table | cells |
|---|---|
| CSV, TSV (csv_export.py), or such lines in a log | between `,`, `;`, tabs, or several blanks, as the header has them |
| Markdown, psql, rich, tabulate | between `|` or the vertical lines of a box |
| HTML, in a notebook | `<th>` and `<td>` |
| JSON | a list of objects; an object of lists; objects by step |
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from itertools import pairwise, zip_longest
from typing import Any

from verl_ext.diagnosis.names import PART, REWARD, is_by_words, normal, quantity_of
from verl_ext.report.run import ReportError
from verl_ext.report.sources.numbers import (
    BOX,
    DECORATION,
    NAME,
    SUMMARY,
    is_heading,
    named_numbers,
    number_of,
    numbers_of,
    row_of,
    section_of,
    split_cells,
)
from verl_ext.report.sources.table import Row, flat, known_readings, step_name, whole_step
from verl_ext.report.sources.text import register_format

COUNTS = ("", "index", "unnamed:_0", "x", "#")  # a first column that counts the rows
BLANKS = re.compile(r"\s+")  # aligned columns whose names are single words, as pandas prints them
SEPARATORS = (BOX, *(re.compile(each) for each in (r"\t", ";", ",", r"\s{2,}")), BLANKS)
STEPS_NAME = re.compile(r"(?i)(?:^|[\W_])(?:step|iteration)s?(?=$|[\W\d_])")  # in a header, or beside the number
# What may stand beside a step: its name, the beginning of a range, a remark in parentheses.
BESIDE_STEP = re.compile(r"(?i)^(?:global[ _]?)?steps?\s*(?=\d)|^\d+\s?[-\u2013\u2014]\s?(?=\d)|(?<=\d)\s+\([^()]*\)$")
FEWEST_EVEN = 5  # steps of a column without such a word, at equal distances: a sweep has fewer, or doubles
OF_RUNS = re.compile(
    r"(?i)seed|run|rank|gpu|node|layer|head|expert|prompt|sample|fold|^\W*(?:k|n|#|id|no)\W*$"
)  # counts of other things
DEEPEST = 4  # levels of a JSON document
MOST_CELLS = 500
EDGE, PAD = rb"[|\t,;]|\xe2\x94[\x82\x83]|\xe2\x95\x91", rb"[ *`]{0,40}"  # a bound, so that blanks take linear time
HEADER = re.compile(
    rb"(?im)(?:^|\s|%b)%b(?:global[ _])?(?:step|iter|iteration|update|rollout)s?%b(?:%b|\s\s|\r?$)"
    rb"|^ {0,40}(?:step|iter|iteration) +[a-z]|^ {0,3}(?:#|(?:\||\xe2\x94[\x82\x83]) {0,40}[`*a-z])"
    % (EDGE, PAD, PAD, EDGE)
)
CODE = re.compile("`([^`]+)`")
HTML_CELL = re.compile(r"(?is)<t[hd]\b[^<>]*>(.*?)(?=</?t[hdr]\b|</table|$)")
TAG = re.compile(r"<[^<>]*>")
NUMBERS = re.compile(rb"(?m)\d%%?%b(?:%b|\s|\r?$)" % (PAD, EDGE))


class Columns:
    """The columns of a table: which has the step, and which have metrics.

    Args:
        rows: its first rows, by which the first column may be the step's where no header says so.

    Attributes:
        step: the number of the step's column, from 0; None if none has it.
        metrics: (number, name) of each other column with a name.
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]] = ()):
        names = _names_of_columns(header)
        counted = 0 if names and (normal(names[0]) in COUNTS or _are_steps_of_a_run(header[0], rows)) else None
        self.step = names.index(name) if (name := step_name(names)) is not None else counted
        self.width = len(header)
        self.metrics = [(at, name) for at, name in enumerate(names) if at != self.step and name]

    def step_of(self, cells: Sequence[str], count: int | None = None) -> int | None:
        """Returns the step of a row; `count` if no column has it, None if the row has another number of cells."""
        if len(cells) != self.width:
            return None
        if self.step is None:
            return count
        return _step_in(cells[self.step])

    def values(self, cells: Sequence[str]) -> dict[str, object]:
        return {name: value for at, name in self.metrics if (value := number_of(cells[at])) is not None}


def _step_in(cell: str) -> int | None:
    cell = BESIDE_STEP.sub("", BESIDE_STEP.sub("", cell.strip(DECORATION)))  # of 1-20, the end
    return whole_step(cell if (number := number_of(cell)) is None else number)


def _names_of_columns(header: Sequence[str]) -> list[str]:
    """Returns the columns' names: a code span is the name in a header such as "Typical `gen_kl_error`"."""
    whole = [cell.replace("`", "").strip(DECORATION + "\ufeff") for cell in header]
    code = [CODE.findall(cell) for cell in header]
    names = [
        each[0] if len(each) == 1 and not PART.search(normal(name)) else name
        for each, name in zip(code, whole, strict=True)
    ]
    return names if len({*names}) == len(names) else whole


def found_names(text: str) -> list[str]:
    """Returns the names in a text that a quantity of the table has: in front of a number, quoted, or in a table."""
    lines = text.splitlines()
    names = [name for line in lines for name in (*named_numbers(line), *re.findall(NAME, line))]
    names += [name for line in lines if BOX.search(line) for name in _names_of_columns(split_cells(line, BOX))]
    return [name for name in dict.fromkeys(names) if quantity_of(name) is not None and not is_by_words(name)]


def _are_steps_of_a_run(name: str, rows: Sequence[Sequence[str]]) -> bool:
    """Returns True for a column of whole numbers that rise, and that are steps by a word or by equal distances."""
    steps = [_step_in(row[0]) if row else None for row in rows]
    distances = {two - one for one, two in pairwise(steps) if one is not None and two is not None}
    if not steps or None in steps or min(distances, default=1) <= 0:
        return False
    by_word = STEPS_NAME.search(name) is not None or all(STEPS_NAME.search(row[0]) for row in rows)
    return by_word or (len(distances) == 1 and len(steps) >= FEWEST_EVEN and not OF_RUNS.search(name))


@register_format(
    "a table in a text (Markdown, rich, psql, aligned columns)",
    remarks="`| Step | Reward |`: a header, and rows of as many cells. The step's column has a name of the step, or is "
    "the first and has `Steps 1-20 (early)`, ..., or five whole numbers at equal distances. Below a heading such as "
    "`## val accuracy`, the names are a validation's",
    order=5,
)
class TextTable:
    def __init__(self) -> None:
        self._columns: Columns | None = None
        self._separator = BOX
        self._header: list[str] = []  # of a table whose step's column is not known yet
        self._held: list[list[str]] = []  # its rows so far
        self._section = ""  # of the tables below a heading for a validation

    def sniff(self, text: bytes) -> bool:
        return HEADER.search(text) is not None or (self._columns is not None and NUMBERS.search(text) is not None)

    def rows(self, text: str) -> Iterator[Row]:
        if is_heading(text):
            self._section = section_of(text)
            return
        if (columns := self._columns) is not None:
            cells = self._cells(text, columns.width)
            is_row = len(cells) == columns.width and bool(columns.values(cells))
            rows = [*self._held, cells] if columns.step is None and is_row else [cells]
            if columns.step is None and is_row:
                columns = Columns(self._header, rows)
                # A line without a newline is given again. A table whose first rows have no step has none.
                self._held = rows if columns.step is None and text.endswith("\n") else self._held
                self._columns = columns if columns.step is not None or len(rows) < FEWEST_EVEN else None
            if columns.step_of(cells) is not None:
                for row in rows:
                    if (step := columns.step_of(row)) is not None and (values := columns.values(row)):
                        yield step, {self._section + name: value for name, value in values.items()}
                return
        self._take_header(text)

    def _cells(self, text: str, width: int) -> list[str]:
        """Returns the cells of a line; of one that may be cut, because it has no newline, without the last one."""
        cells = split_cells(text, self._separator)
        if len(cells) == width + 1:  # pandas prints an index without a name
            cells = cells[1:]
        if not text.endswith("\n") and not BOX.match(text.rstrip()[-1:]):
            missing = width - len(cells) if self._separator is BOX else 0
            cells = [*cells[:-1], *[""] * (missing + 1)]
        return cells

    def _take_header(self, text: str) -> None:
        for separator in SEPARATORS if self._columns is None else SEPARATORS[:-1]:
            header = split_cells(text, separator)
            if 1 < len(header) < MOST_CELLS and all(number_of(cell) is None for cell in header):
                columns = Columns(header)
                known = any(quantity_of(name) or quantity_of(self._section + name) for _, name in columns.metrics)
                if known and (columns.step is not None or separator is BOX):
                    self._columns, self._separator, self._header, self._held = columns, separator, header, []
                    return


@register_format(
    "trainer_state.json, or another JSON document with a history",
    example="trainer_state.json, history.json",
    remarks="TRL and transformers; a list of objects, an object of lists, or objects by step. In a folder of "
    "checkpoints, the last checkpoint's file is read",
    document=True,
    endings=("trainer_state.json",),
    order=4,
)
class JsonHistory:
    def sniff(self, text: bytes) -> bool:
        return re.match(rb'\s*(?:\[\s*\{|\{(?=[^\n]*?:\s*[\[{]|\s*\n)\s*"[^"\n]{0,200}"\s*:)', text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError(f"this is not whole JSON ({error}); is it still being written?") from None
        yield from rows_of_the_run([list(rows) for rows in _json_tables(read)])


def _json_tables(read: Any, depth: int = 0) -> Iterator[Iterable[Row]]:
    """Yields the rows of each table in a JSON document."""
    if isinstance(read, list):
        entries = (dict(flat(entry)) for entry in read if isinstance(entry, dict) and SUMMARY not in entry)
        yield map(row_of, entries)
        if depth < DEEPEST:
            for entry in read[:MOST_CELLS]:
                yield from _json_tables(entry, depth + 1)
    elif isinstance(read, dict):
        lists = {name: each for name, each in read.items() if isinstance(each, list) and len(each) > 1}
        if lists := {name: each for name, each in lists.items() if isinstance(each[0], (int, float))}:
            columns = Columns([*lists])
            for at, cells in enumerate(zip_longest(*lists.values()), start=1):
                texts = ["" if cell is None else str(cell) for cell in cells]
                yield [(columns.step_of(texts, at), columns.values(texts))]
        inner = {name: each for name, each in read.items() if isinstance(each, dict) and each}
        if inner and _are_steps(inner):
            yield ((whole_step(at), numbers_of(each)) for at, each in inner.items())
        elif by_name := {name: numbers_of(each) for name, each in inner.items() if _are_steps(each)}:
            steps = sorted({at for each in by_name.values() for at in each}, key=lambda at: whole_step(at) or 0)
            yield ((whole_step(at), {name: each[at] for name, each in by_name.items() if at in each}) for at in steps)
        if depth < DEEPEST:
            for each in read.values():
                yield from _json_tables(each, depth + 1)


def _are_steps(names: Iterable[object]) -> bool:
    return all(whole_step(name) is not None for name in names)


def rows_of_the_run(tables: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """Yields the rows of the tables that are the run's, where a document has several.

    The one that knows a reward comes first, then the one with the most readings that the report knows. Others with all
    of its quantities are further parts of it, or further runs.
    """
    known = [known_readings(rows) for rows in tables]
    ranks = [(REWARD in names, sum(names.values())) for names in known]
    best = known[ranks.index(max(ranks))] if ranks else {}
    for rows, names in zip(tables, known, strict=True):
        if best.keys() <= names.keys():
            yield from rows


def html_tables(html: str) -> Iterator[list[Row]]:
    """Yields the rows of each table of a page that has a header with the step."""
    for table in re.split("(?i)<table", html)[1:]:
        lines = (HTML_CELL.findall(line) for line in re.split("(?i)<tr", table))
        header, *rows = [[unescape(TAG.sub("", cell)).strip() for cell in line] for line in lines if line] or [[]]
        columns = Columns(header, rows[:FEWEST_EVEN])
        if found := [(step, columns.values(row)) for row in rows if (step := columns.step_of(row)) is not None]:
            yield list(found)
