"""Reads notebooks: the text that their cells have printed, in any of the line formats, and the table of transformers'
notebook callback."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from verl_ext.report.run import ReportError
from verl_ext.report.sources.dictionaries import numbers_of
from verl_ext.report.sources.text import FORMATS, Row, register_format, rows_in

TABLE = re.compile(r"<th[^>]*>\s*Step\s*</th>", re.IGNORECASE)


@register_format(
    "a notebook (with one of these in its output)",
    example="run.ipynb",
    remarks="any of the printed forms, or the table of transformers",
    document=True,
    endings=(".ipynb",),
    order=3,
)
class Notebook:
    def sniff(self, text: bytes) -> bool:
        return text.lstrip()[:1] == b"{" and b'"cells"' in text and b'"cell_type"' in text

    def rows(self, text: str) -> Iterator[Row]:
        try:
            cells = json.loads(text).get("cells")
        except (ValueError, RecursionError, AttributeError) as error:
            raise ReportError(f"this is not a whole notebook ({error})") from None
        printed, tables = "", ""
        for plain, html in _outputs(cells):
            printed += plain + "\n"
            tables += html
        text_bytes = printed.encode("utf-8", errors="replace")
        for form in FORMATS:
            if not form.document and (rows := list(rows_in(text_bytes, form()))):
                yield from rows
                return
        if TABLE.search(tables):
            yield from _Table.rows_of(tables)


def _outputs(cells: Any) -> Iterator[tuple[str, str]]:
    """Yields what the cells show, as text and as HTML."""
    for cell in cells if isinstance(cells, list) else ():
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        for output in (each for each in outputs if isinstance(each, dict)) if isinstance(outputs, list) else ():
            shown = output.get("data")
            data: dict[str, Any] = shown if isinstance(shown, dict) else {}
            yield _joined(output.get("text")) + _joined(data.get("text/plain")), _joined(data.get("text/html"))


def _joined(text: Any) -> str:
    """Returns a text that a notebook may keep as a list of lines."""
    if isinstance(text, list):
        return "".join(line for line in text if isinstance(line, str))
    return text if isinstance(text, str) else ""


class _Table(HTMLParser):
    """Reads tables with a header that begins with Step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.lines.append([])
        self._in_cell = tag in ("th", "td")
        if self._in_cell and self.lines:
            self.lines[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        if self._in_cell and self.lines and self.lines[-1]:
            self.lines[-1][-1] += data.strip()

    @classmethod
    def rows_of(cls, html: str) -> Iterator[Row]:
        table = cls()
        table.feed(html)
        header: list[str] = []
        for line in table.lines:
            if line[:1] == ["Step"]:
                header = [name.replace(" / ", "/") for name in line]  # Unsloth's "completions / mean_length"
            elif header and len(line) == len(header):
                values = numbers_of(dict(zip(header, line, strict=True)))
                step = values.pop("Step", None)
                if step is not None and step.is_integer():
                    yield int(step), values
