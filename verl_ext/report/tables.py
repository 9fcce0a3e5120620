"""Tables of text: one description of columns and rows, which the terminal prints and a page shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_ext.base.printable import number_table, print_number_table


@dataclass(frozen=True)
class ShownTable:
    """A table for the terminal and for a page.

    Attributes:
        columns: the headers; the first `labels` columns are text, the others numbers.
        rows: one text per column.
        marked: number of the highlighted row, if there is one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    marked: int | None = None

    def print(self, console: Console) -> None:
        drawn = number_table(*self.columns, labels=self.labels, title=self.title)
        for number, row in enumerate(self.rows):
            drawn.add_row(*map(Text, row), style="bold" if number == self.marked else "")
        print_number_table(console, drawn)


def ruled_table(width: int | None = None) -> Table:
    """Returns a table for rich with a line below the header and no others, which the caller fills."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, width=width)
