"""From the folders of the runs to the variants."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.lab.cells import METRICS, Cell
from verl_ext.lab.seeds import Variant
from verl_ext.lab.summary import Summary, summarise
from verl_ext.report.load import read_run
from verl_ext.report.run import ReportError, Run

if TYPE_CHECKING:
    from verl_ext.lab.arms import Arm


def collect(
    arms: "Sequence[Arm]", cells: Sequence[Cell], out: Path, failed: Mapping[Cell, str]
) -> tuple[list[Variant], dict[str, list[Run]]]:
    """The variants, and the runs of each by its name. A run that is not done is in neither, nor one that failed."""
    runs: dict[str, dict[int, Run]] = {arm.name: {} for arm in arms}
    summaries: dict[str, dict[int, Summary]] = {arm.name: {} for arm in arms}
    errors: dict[str, dict[int, str]] = {arm.name: {} for arm in arms}
    for cell in cells:
        name = cell.arm.name
        if cell in failed:
            errors[name][cell.seed] = failed[cell]
        elif cell.settings_done(out) == cell.settings:
            try:
                run = read_run(cell.folder(out) / METRICS)
            except ReportError as error:
                errors[name][cell.seed] = str(error)
                continue
            summary = summarise(run, cell.steps)
            if summary.steps < cell.steps and summary.stopped is None:
                errors[name][cell.seed] = (
                    f"it ended at step {summary.steps} of {cell.steps}, and not by the guard; "
                    f"remove {cell.folder(out)} to run it again"
                )
            else:
                runs[name][cell.seed], summaries[name][cell.seed] = run, summary
    variants = [Variant(arm.name, arm.overrides, summaries[arm.name], errors[arm.name]) for arm in arms]
    return variants, {name: list(each.values()) for name, each in runs.items()}
