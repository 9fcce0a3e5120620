"""Kinds of files and folders with a structure of their own: JSON lines, tables, the stores of loggers.

A reader registers its kind. Logs and documents, which have rows somewhere in a text, are formats (`text.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verl_ext.report.sources.table import TableRun, Which


class RunSource(Protocol):
    """Metrics of one run, or of several in one place. Its errors need not name the file: load.py does."""

    name: str

    @property
    def files(self) -> tuple[Path, ...]: ...

    def refresh(self) -> bool:
        """Reads new data; returns True if there was any."""

    def run(self, which: Which) -> TableRun: ...

    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind, and how it is recognised.

    Attributes:
        title: its name in the help and in docs/report.md.
        example: what a user types to name such a run.
        remarks: further remarks for docs/report.md.
        order: of several kinds of one run in a folder, the one with the lowest number is read.
        open: returns the source that reads the run of this path; its second argument is the number or name of the run.
        is_named: whether a file is of this kind, by its name alone.
        sniff: whether a file is of this kind, by its beginning.
        endings: files that are looked into when they lie in a folder. A named file with such an ending is taken for
            this kind if nothing else reads it.
        in_folder: returns the runs of this kind that the names of the files in a folder show; `depth` is how far the
            folder is below the one that the user named.
        owns_folder: a folder below which everything belongs to such a run.
        by_logger: written by a trainer's logger, so that a folder may have the same run in other kinds too.
    """

    title: str
    example: str
    remarks: str
    order: int
    open: Callable[[Path, Which], RunSource]
    is_named: Callable[[Path], bool] = lambda path: False
    sniff: Callable[[bytes], bool] = lambda start: False
    endings: tuple[str, ...] = ()
    in_folder: Callable[[Path, Sequence[str], int], list[Path]] = lambda folder, files, depth: []
    owns_folder: bool = False
    by_logger: bool = True


KINDS: list[Kind] = []


def register_kind(kind: Kind) -> None:
    KINDS.append(kind)
    KINDS.sort(key=lambda each: each.order)
