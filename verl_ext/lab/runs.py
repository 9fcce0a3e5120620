"""The runs of a command that are not done yet: made, and told of."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.lab.cells import Cell, left_to_do
from verl_ext.lab.follow import Followed, follow
from verl_ext.lab.grid import run_grid

if TYPE_CHECKING:
    from rich.console import Console


def make_runs(cells: Sequence[Cell], out: Path, jobs: int | None, told: "Console") -> Followed:
    """Make those that `out` does not hold yet with these settings.

    Args:
        jobs: runs at a time; None for one a core.
    """
    from verl_ext.lab.arms import run_arm

    out.mkdir(parents=True, exist_ok=True)
    left, changed = left_to_do(list(cells), out)
    for name, keys in changed.items():
        told.print(f"{name} runs again: changed since are {', '.join(keys)}", highlight=False, markup=False)
    if done := len(cells) - len(left):
        told.print(f"{done} of {len(cells)} runs are done already, in {out}", highlight=False, markup=False)
    with closing(run_grid(left, out, run_arm, jobs or len(os.sched_getaffinity(0)))) as events:
        return follow(events, len(left), len(cells), cells[0].steps, told)
