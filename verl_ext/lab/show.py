"""What a command of the lab prints and leaves when its runs have ended."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from verl_ext.lab.cells import Cell
from verl_ext.lab.collect import collect
from verl_ext.lab.follow import Followed
from verl_ext.lab.results import as_text, results, write_results
from verl_ext.lab.table import table
from verl_ext.lab.words import findings
from verl_ext.launch.arguments import INTERRUPTED
from verl_ext.report.command import drawing, tell

if TYPE_CHECKING:
    from verl_ext.lab.arms import Arm

SOME_FAILED = 1
WIDTH = 100  # where the output is not a terminal


def status_of(followed: Followed) -> int:
    return INTERRUPTED if followed.interrupted else SOME_FAILED if followed.failed else 0


def console_of() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def show(
    arguments: argparse.Namespace,
    arms: Sequence["Arm"],
    cells: Sequence[Cell],
    out: Path,
    followed: Followed,
    **more: Any,
) -> None:
    """The table, or its JSON; the page of a grid that has come to its end.

    Args:
        more: for results.json.
    """
    variants, runs = collect(arms, cells, out, followed.failed)
    if not any(variant.runs for variant in variants):
        return
    words = findings(variants)
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    about = {"regime": arguments.regime, "steps": cells[0].steps, "seeds": seeds, "complete": not followed.interrupted}
    found = results(about | more, variants, words)
    console = console_of()
    if arguments.json:
        print(as_text(found))
    else:
        console.print(table(variants, words))
    if followed.interrupted:
        print("interrupted: the same command goes on with what is not done yet", file=sys.stderr)
        return
    written = {"numbers": write_results(found, out)}
    if not arguments.no_page:
        from verl_ext.lab.page import write_lab_page

        title = f"The lab: {arguments.regime}"
        stand = f"{len(variants)} variants, {len(seeds)} seeds, {cells[0].steps} steps each"
        with drawing(console) as progress:
            written["page"] = write_lab_page(title, stand, variants, runs, words, out, progress)
    if not arguments.json:
        for name, file in written.items():
            tell(console, name, file)
