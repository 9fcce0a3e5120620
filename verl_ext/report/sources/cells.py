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
from itertools import zip_longest
from typing import Any

from verl_ext.diagnosis.names import REWARD, normal, quantity_of
from verl_ext.report.run import ReportError
from verl_ext.report.sources.numbers import BOX, DECORATION, SUMMARY, number_of, numbers_of, row_of, split_cells
from verl_ext.report.sources.table import Row, flat, known_readings, step_name, whole_step
from verl_ext.report.sources.text import register_format

COUNTS = ("", "index", "unnamed:_0", "x", "#")  # a first column that counts the rows
BLANKS = re.compile(r"\s+")  # aligned columns whose names are single words, as pandas prints them
SEPARATORS = (BOX, *(re.compile(each) for each in (r"\t", ";", ",", r"\s{2,}")), BLANKS)
# What may stand beside a step: its name, the beginning of a range, a remark in parentheses.
BESIDE_STEP = re.compile(r"(?i)^(?:global[ _]?)?steps?\s*(?=\d)|^\d+\s?[-\u2013\u2014]\s?(?=\d)|(?<=\d)\s+\([^()]*\)$")
DEEPEST = 4  # levels of a JSON document
MOST_CELLS = 500
EDGE, PAD = rb"[|\t,;]|\xe2\x94[\x82\x83]|\xe2\x95\x91", rb"[ *`]{0,40}"  # a bound, so that blanks take linear time
HEADER = re.compile(
    rb"(?im)(?:^|\s|%b)%b(?:global[ _])?(?:step|iter|iteration|update|rollout)s?%b(?:%b|\s\s|\r?$)"
    rb"|^ {0,40}(?:step|iter|iteration) +[a-z]" % (EDGE, PAD, PAD, EDGE)
)
HTML_CELL = re.compile(r"(?is)<t[hd]\b[^<>]*>(.*?)(?=</?t[hdr]\b|</table|$)")
TAG = re.compile(r"<[^<>]*>")
NUMBERS = re.compile(rb"(?m)\d%%?%b(?:%b|\s|\r?$)" % (PAD, EDGE))


class Columns:
    """The columns of a table: which has the step, and which have metrics.

    Attributes:
        step: the number of the step's column, from 0; None if none has it.
        metrics: (number, name) of each other column with a name.
    """

    def __init__(self, header: Sequence[str]):
        names = [name.strip(DECORATION + "\ufeff") for name in header]
        counted = 0 if names and normal(names[0]) in COUNTS else None
        self.step = names.index(name) if (name := step_name(names)) is not None else counted
        self.width = len(header)
        self.metrics = [
            (at, name.strip(DECORATION)) for at, name in enumerate(header) if at != self.step and name.strip()
        ]

    def step_of(self, cells: Sequence[str], count: int | None = None) -> int | None:
        """Returns the step of a row; `count` if no column has it, None if the row has another number of cells."""
        if len(cells) != self.width:
            return None
        if self.step is None:
            return count
        cell = BESIDE_STEP.sub("", BESIDE_STEP.sub("", cells[self.step].strip(DECORATION)))  # of 1-20, the end
        return whole_step(cell if (number := number_of(cell)) is None else number)

    def values(self, cells: Sequence[str]) -> dict[str, object]:
        return {name: value for at, name in self.metrics if (value := number_of(cells[at])) is not None}


@register_format(
    "a table in a text (Markdown, rich, psql, aligned columns)",
    remarks="`| Step | Reward |`: a header with the step, and rows of as many cells",
    order=5,
)
class TextTable:
    def __init__(self) -> None:
        self._columns: Columns | None = None
        self._separator = BOX

    def sniff(self, text: bytes) -> bool:
        return HEADER.search(text) is not None or (self._columns is not None and NUMBERS.search(text) is not None)

    def rows(self, text: str) -> Iterator[Row]:
        if self._columns is not None:
            cells = split_cells(text, self._separator)
            if len(cells) == self._columns.width + 1:  # pandas prints an index without a name
                cells = cells[1:]
            if (step := self._columns.step_of(cells)) is not None:
                if values := self._columns.values(cells):
                    yield step, values
                return
        for separator in SEPARATORS if self._columns is None else SEPARATORS[:-1]:
            header = split_cells(text, separator)
            if 1 < len(header) < MOST_CELLS and all(number_of(cell) is None for cell in header):
                columns = Columns(header)
                if columns.step is not None and any(quantity_of(name) for _, name in columns.metrics):
                    self._columns, self._separator = columns, separator
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
        columns = Columns(header)
        if found := [(step, columns.values(row)) for row in rows if (step := columns.step_of(row)) is not None]:
            yield list(found)
