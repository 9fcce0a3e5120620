"""What happens in the process of one run."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.errors import UserError
from verl_ext.lab.cells import LOG, Cell
from verl_ext.printable import printable

if TYPE_CHECKING:
    from verl_ext.lab.arms import Arm

RunArm = Callable[["Arm", int, Path, Callable[[int], None]], None]


@dataclass(frozen=True)
class Step:
    """A run has made this many steps."""

    cell: Cell
    step: int


@dataclass(frozen=True)
class End:
    """A run has ended: well where `error`, a line, is empty."""

    cell: Cell
    error: str = ""


def work(run: RunArm, cell: Cell, out: Path, events: Connection) -> None:
    """Run one cell; what it prints goes to the log in its folder, its steps and its end to `events`.

    Where nobody listens any more, the next step ends it: no worker outlives the command.
    """
    start = time.monotonic()
    try:
        folder = cell.begin(out)
        _print_to(folder / LOG)
        run(cell.arm, cell.seed, folder, lambda step: events.send(Step(cell, step)))
        cell.mark_done(out, time.monotonic() - start)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        events.send(End(cell, _line(f"{kind}{error}")))
    else:
        events.send(End(cell))


def _print_to(log: Path) -> None:
    """Libraries print what would tear the progress bar; C code among them, so the descriptors are moved."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _line(text: str) -> str:
    return printable(" ".join(text.split()))
