"""Makes foreign text (from files, folder names, command lines) safe to show in a terminal, on a page, in a figure.

A terminal obeys ESC and the C1 controls; a lone surrogate (a JSON escape, a file name that is not UTF-8) can be neither
printed nor written; XML, and so every SVG figure, allows no NUL and no U+FFFF; U+202E reverses the text. The text of an
error may have a key in it, and a report is sent to others.
"""

import os
import re
import sys
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST = 400  # characters of a name; no name that a person chose is longer
WIDTH = 120  # columns
LEAST_LABEL = 16  # columns to which a table may wrap its text
# Characters after which a long name may be broken, the best first, and the least share of a line in front of one.
BREAKS = (("/=, ", 1 / 2), (".", 1 / 2), ("/=, ._-", 1 / 3))
# Controls, formats (some turn the direction of text), surrogates, private use, not assigned, line separators.
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# A key by its own form, or what follows a name for one; the groups are what stays in front of it.
SECRET = re.compile(
    r"""
    \b(?:(?:hf|api_org|gh[opsur]|github_pat|wandb_v\d)_\w{20,}|(?:sk|glpat|xox[abeoprs])-[\w-]{16,}
        |(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{30,}|eyJ[\w-]{10,500}\.[\w-]+\.[\w-]*)
    |(?<=_)(?:(?:hf|gh[opsur])_[A-Za-z0-9]{20,}|sk-[\w-]{16,})
    |(://[^\s/:@]*:)[^\s/@]+(?=@)
    |(://)[^\s/:@]{16,}(?=@)
    |(\b[Bb](?:earer|asic)\s+)[\w.~+/=-]{16,}
    |(?i:((?:authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token)\s+|(?!bearer|basic|token))
        |(?:api|access|secret|private)[_-]?key(?:[_-]id)?["']?\s*[:=]\s*["']?
        |(?:passw(?:or)?d|secret|signature|(?:auth|access|refresh|hub|hf|api|security)[_-]token)["']?\s*[:=]\s*["']?
        |(?<![a-z])token["']?\s*[:=]\s*["']?(?=[\w.-]{8})))[^\s"'&,;)\]}]{4,})
    """,
    re.VERBOSE,
)
HIDDEN_SECRET = "***"


def without_secrets(text: str) -> str:
    """Returns the text with stars for keys, tokens and passwords."""
    return SECRET.sub(lambda found: "".join(each for each in found.groups() if each) + HIDDEN_SECRET, text)


def printable(text: str, most: int | None = MOST) -> str:
    """Returns the text in one line, unchanged if it only has visible characters and spaces, and no secrets.

    Every other character becomes Python's escape for it (`\\x1b`, `\\n`, `\\u202e`, `\\udc80`), so that different names
    stay different. If there are more than `most` characters, the middle is left out; None keeps all. The result is
    valid UTF-8 and XML text. It is not escaped for HTML, nor for rich's markup.
    """
    text = without_secrets(text)
    if most is not None and len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]}...{text[len(text) - half :]}"
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode("ascii") if unicodedata.category(each) in HIDDEN else each for each in text
    )


def one_line(text: str) -> str:
    """Returns a whole text in one printable line, with single spaces."""
    return printable(" ".join(text.split()), most=None)


def wide_console() -> "Console":
    """Returns a console. If the output is not a terminal (a file, a log of CI), it has $COLUMNS columns, or WIDTH."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else WIDTH, highlight=False)


def wrap_name(name: str, width: int) -> str:
    """Breaks a name into lines of at most `width`, after one of BREAKS if there is one."""
    lines = []
    while len(name) > width:
        ends = (max(name.rfind(mark, int(width * least), width) for mark in marks) + 1 for marks, least in BREAKS)
        at = next(filter(None, ends), width)
        lines.append(name[:at].rstrip())
        name = name[at:]
    return "\n".join([*lines, name])


def wrapped(text: str, width: int, *, whole: bool = False) -> str:
    """Breaks a text into lines of at most `width`, indented like the first; a longer word is broken as a name, or left
    whole."""
    indent, lines = text[: len(text) - len(text.lstrip())], [""]
    for word in text.split():
        first, *rest = [word] if whole else wrap_name(word, width - len(indent)).split("\n")
        if lines[-1] and len(indent + lines[-1]) + len(first) >= width:
            lines.append("")
        lines[-1] += f" {first}" if lines[-1] else first
        lines += rest
    return "\n".join(indent + line for line in lines)


def print_text(console: "Console", text: str) -> None:
    """Prints a paragraph: wrapped in a terminal, elsewhere as one line. Words stay whole: an override is copied."""
    said = wrapped(text, console.width, whole=True) if console.is_terminal else text
    console.print(said, markup=False, soft_wrap=True)


def number_table(*columns: str, labels: int = 1, title: str | None = None) -> "Table":
    """Returns a table for rich. The first `labels` columns are text, the others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        text = number < labels
        table.add_column(column, justify="left" if text else "right", no_wrap=not text)
    return table


def print_number_table(console: "Console", table: "Table") -> None:
    """Prints a table of `number_table`; as a line per row, numbers first, where the terminal is too narrow for them."""
    from rich.measure import Measurement

    longest = [max(map(len, map(str, column.cells))) for column in table.columns if not column.no_wrap and table.rows]
    narrowest = Measurement.get(console, console.options.update_width(1000), table).maximum - sum(
        max(length - LEAST_LABEL, 0) for length in longest
    )
    if narrowest <= console.width:
        console.print(table)
        return
    lines = [str(table.title or f"{table.columns[0].header}:")]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        each = [(column, cell) for column, cell in zip(table.columns[1:], cells, strict=True) if cell]
        numbers = ", ".join(f"{column.header} {cell}" for column, cell in each if column.no_wrap)
        texts = "; ".join(str(cell) for column, cell in each if not column.no_wrap)
        lines.append(f"- {name}: {numbers}" + (f" ({texts})" if texts else ""))
    console.print("\n".join(wrapped(line, console.width) for line in lines), markup=False)
