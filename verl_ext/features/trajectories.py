"""Token-level data of a few trajectories per step, for the report."""

from collections.abc import Iterator

from verl_ext.base.names import trajectories_path
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine


def needs(run: RunFeatures) -> Iterator[Demand]:
    if run.stability.trajectories.per_step:
        yield Demand("stability.trajectories.per_step", frozenset({Need.MEASURED_BATCHES}))


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (dump := run.stability.trajectories).per_step:
        often = "per step" if dump.every == 1 else f"every {dump.every} steps"
        yield TableLine(
            "trajectories",
            f"{dump.per_step} {often}",
            "*.trajectories.jsonl",
            proof=lambda engines: trajectories_path(run.config).name.replace("{", "{{").replace("}", "}}"),
        )


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not run.stability.trajectories.per_step:
        settings = tuple(f"trajectories.{name}" for name in ("every", "max_tokens", "max_megabytes"))
        yield Idle("", "no trajectory is written", ("stability.trajectories.per_step=4",), settings)


TRAJECTORIES = Feature(needs, lines=lines, idle=idle)
