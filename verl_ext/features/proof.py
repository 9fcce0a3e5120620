"""What is active and how it was hooked, proven on the started engines and printed once."""

from collections.abc import Iterable
from typing import NamedTuple

from verl_ext.base.errors import HookError
from verl_ext.features.feature import Engines, Part, RunFeatures
from verl_ext.features.table import FEATURES


class Proven(NamedTuple):
    """A row of the start-up table: something that is on, and the place where it was found."""

    name: str
    setting: str
    where: str


def verify(run: RunFeatures, trainer_class: type, engines: Engines) -> list[Proven]:
    """The lines of the run's features, each with the place where it was found on the started engines.

    Raises:
        HookError: a feature is not hooked.
    """
    places = {"trainer": next(cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.startswith("verl."))}
    if run.uses(Part.LOSS):
        places["loss"] = f"worker_loss on {len(engines.losses)} rank(s)"
    if run.uses(Part.ROUTERS):
        places["routers"] = engines.routers
    for feature in FEATURES:
        feature.prove(run, engines)
    rows = []
    for line in run.lines:
        if line.in_loss and not all(line.in_loss(told) for told in engines.losses):
            raise HookError(f"{line.name} ({line.setting}) is switched on, and a worker's loss does without it")
        at = line.proof(engines) if line.proof else line.at
        rows.append(Proven(line.name, line.setting, at.format(**places)))
    return rows


def print_table(rows: Iterable[Proven]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "setting", "where", title="verl_ext: active features", title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets in a rule's name or signal are no markup
    # Ray prefixes each line with the process's name, so the terminal's own width would be too much.
    Console(width=100).print(table)
