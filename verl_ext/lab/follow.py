"""How far the grid is, while it runs; and whether it came to its end."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_ext.lab.cells import Cell
from verl_ext.lab.worker import End, Step

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Followed:
    """What became of the runs that are not done.

    Attributes:
        failed: with an error in a line each.
        interrupted: by Ctrl-C.
    """

    failed: dict[Cell, str] = field(default_factory=dict)
    interrupted: bool = False


def follow(events: Iterator[Step | End], left: int, runs: int, steps: int, console: "Console") -> Followed:
    """Show the events of a grid until it ends: a bar in a terminal, elsewhere a line for each run that has ended.

    Args:
        left: runs that the grid makes, of `runs` in all; the others were done before.
        steps: of a run.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[ended]} of {task.fields[runs]} runs,"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    followed, at, ended = Followed(), Counter[Cell](), runs - left
    with Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=runs * steps, completed=ended * steps, ended=ended, runs=runs)
        try:
            for event in events:
                reached = event.step if isinstance(event, Step) else steps  # a run may end before its last step
                bar.advance(task, max(reached - at[event.cell], 0))
                at[event.cell] = max(reached, at[event.cell])
                if isinstance(event, End):
                    ended += 1
                    bar.update(task, ended=ended)
                    _told(event, followed, f"{ended} of {runs}", console)
        except KeyboardInterrupt:
            followed.interrupted = True
    return followed


def _told(end: End, followed: Followed, count: str, console: "Console") -> None:
    if end.error:
        followed.failed[end.cell] = end.error
        console.print(f"{end.cell} failed: {end.error}", markup=False, highlight=False, soft_wrap=True)
    elif not console.is_terminal:
        console.print(f"{count}: {end.cell}", markup=False, highlight=False, soft_wrap=True)
