"""Figures without a course, as people paste them: a run's summary by W&B, a list of names with numbers, one line of a
log, or a table with a column for each step. What no other reader takes is read so.

A name counts if a quantity of the table has it, and if it stands there with one number only: printed samples have many.
Its step is that of the column; else the one that the text names; else UNDATED.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from verl_ext.diagnosis.names import is_by_words, quantity_of
from verl_ext.report.sources.cells import SEPARATORS, split_cells
from verl_ext.report.sources.lines import BAR, split_front
from verl_ext.report.sources.numbers import BOX, dictionaries_in, named_numbers, number_of, step_counts
from verl_ext.report.sources.pairs import BULLET, LONGEST_LINE, SAMPLE, SETTINGS
from verl_ext.report.sources.table import STEP_NAMES, Row, step_name, whole_step
from verl_ext.report.sources.text import register_format

STEP_CELL = re.compile(r"(?i)[*`(]*(?:global[ _]?)?(?:step|iter|iteration)[ _#:=]*(\d{1,12})\b[^\d]{0,40}")
MOST_LINES = 100_000
ANSWER = re.compile(r'"[^"\n]{100}')  # a dumped one in quotation marks
UNDATED = 10  # past the first steps, of which several findings speak


@register_format(
    "figures without a course",
    remarks="what no other reader takes: the summary that W&B prints, names with one number each, or a table with a "
    "column for each step, `| metric | step 50 | step 100 |`. Where the text names no step, they count as step 10",
    document=True,
    endings=(),
    order=9,
)
class Figures:
    def __init__(self) -> None:
        self._is_undated = False

    def sniff(self, text: bytes) -> bool:
        return any(values for _, values in self.rows(text.decode("utf-8", errors="replace")))

    def rows(self, text: str) -> Iterator[Row]:
        self.after = text.encode("utf-8", errors="replace")  # how the run ended may stand anywhere in it
        columns: list[int] = []  # the steps of the table's columns
        in_columns: dict[int, dict[str, float]] = {}
        alone: dict[str, set[float]] = {}
        named: set[int] = set()  # steps in words
        for line in islice(text.splitlines(), MOST_LINES):
            line = split_front(line)[1]
            if len(line) > LONGEST_LINE or any(each.search(line) for each in (BAR, SAMPLE, ANSWER)):
                continue
            if header := _steps_of_columns(line):
                columns = header
            elif (row := _row_of_columns(line, len(columns))) is not None:
                name, values = row
                for step, value in zip(columns, values, strict=True):
                    if value is not None:
                        in_columns.setdefault(step, {})[name] = value
            else:
                named |= {int(found[1]) for found in step_counts(line)}
                for name, value in _figures(line).items():
                    alone.setdefault(name, set()).add(value)
        yield from sorted(in_columns.items())
        once = {name: min(values) for name, values in alone.items() if len(values) == 1}
        known = {name: value for name, value in once.items() if _is_known(name)}
        if known and not in_columns:
            at = step_name(once)
            said = named if len(named) == 1 else {whole_step(once[at])} if at is not None else {None}
            self._is_undated = said == {None}
            yield UNDATED if self._is_undated else said.pop(), known

    def notes(self) -> list[str]:
        said = f"the text names no step: its figures count as step {UNDATED}, so that nothing takes them for the first"
        return [said] if self._is_undated else []


def _steps_of_columns(line: str) -> list[int]:
    """Returns the steps of a header such as `metric | step 1 | step 50`; none for another line."""
    for separator in SEPARATORS[:-1]:
        first, *cells = split_cells(line, separator) or [""]
        steps = [found for cell in cells if (found := STEP_CELL.fullmatch(cell.strip()))]
        if first and number_of(first) is None and cells and len(steps) == len(cells):
            return [int(found[1]) for found in steps]
    return []


def _row_of_columns(line: str, width: int) -> tuple[str, Sequence[float | None]] | None:
    """Returns the name and the numbers of a row below such a header; None for another line."""
    for separator in SEPARATORS[:-1] if width else ():
        name, *cells = split_cells(line, separator) or [""]
        name, values = name.strip("*` "), [number_of(cell) for cell in cells]
        if len(values) == width and _is_known(name) and any(value is not None for value in values):
            return name, values
    return None


def _figures(line: str) -> dict[str, float]:
    """Returns the names with numbers in a line, those of a dictionary too."""
    values = named_numbers(BOX.sub("|", BULLET.sub(" | ", line.rstrip())))
    for _, found in dictionaries_in(line):
        values |= found
    return {name: value for name, value in values.items() if _is_known(name) or name in STEP_NAMES}


def _is_known(name: str) -> bool:
    quantity = quantity_of(name)
    return quantity is not None and not is_by_words(name) and quantity.name not in SETTINGS
