"""Reads notebooks: what their cells have printed, in any of the line formats, and their tables, such as those of
transformers' callback. The cell that trained is chosen as a table of a document is; its error is the run's end."""

import json
from collections.abc import Iterator
from typing import Any

from verl_ext.report.run import ReportError
from verl_ext.report.sources.cells import html_tables, rows_of_the_run
from verl_ext.report.sources.ends import TRACEBACK
from verl_ext.report.sources.table import Row
from verl_ext.report.sources.text import all_rows, format_of_text, register_format


@register_format(
    "a notebook (with one of these in its output)",
    example="run.ipynb",
    remarks="any of the printed forms, or a table with the step, as transformers shows it",
    document=True,
    endings=(".ipynb",),
    order=3,
)
class Notebook:
    def __init__(self) -> None:
        self.after = b""  # what the cell that trained has printed

    def sniff(self, text: bytes) -> bool:
        return text.lstrip()[:1] == b"{" and b'"cells"' in text and b'"cell_type"' in text

    def rows(self, text: str) -> Iterator[Row]:
        try:
            cells = json.loads(text).get("cells")
        except (ValueError, RecursionError, AttributeError) as error:
            raise ReportError(f"this is not a whole notebook ({error})") from None
        tables: list[list[Row]] = []
        behind: list[bytes] = []  # what each table's cell has printed
        for printed, html in _outputs(cells):
            said = printed.encode("utf-8", errors="replace")
            form = format_of_text(said)
            found = [*([list(all_rows(said, form()))] if form else []), *html_tables(html)]
            tables += found
            behind += [said] * len(found)
        rows = list(rows_of_the_run(tables))
        last = next((at for at in reversed(range(len(tables))) if rows and tables[at][-1] is rows[-1]), None)
        self.after = b"" if last is None else behind[last]
        yield from rows


def _outputs(cells: Any) -> Iterator[tuple[str, str]]:
    """Yields what each cell shows: its text, with its error as a traceback, and its HTML."""
    for cell in cells if isinstance(cells, list) else ():
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        printed, tables = "", ""
        for output in (each for each in outputs if isinstance(each, dict)) if isinstance(outputs, list) else ():
            shown = output.get("data")
            data: dict[str, Any] = shown if isinstance(shown, dict) else {}
            printed += _joined(output.get("text")) + _joined(data.get("text/plain")) + "\n"
            tables += _joined(data.get("text/html"))
            if output.get("output_type") == "error":
                what = f"{output.get('ename')}: {output.get('evalue')}".removesuffix(": ")
                printed += f"{TRACEBACK}\n{what}\n"
        yield printed, tables


def _joined(text: Any) -> str:
    """Returns a text that a notebook may keep as a list of lines."""
    if isinstance(text, list):
        return "".join(line for line in text if isinstance(line, str))
    return text if isinstance(text, str) else ""
