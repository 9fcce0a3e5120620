"""The `stability.trajectories` settings: token-level data of a few trajectories per step, for the report."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from verl_ext.base.methods import require
from verl_ext.base.names import trajectories_path
from verl_ext.features.feature import Feature, Needs, Part, RunFeatures, TableLine


@dataclass(frozen=True)
class TrajectoryDump:
    """A few trajectories of each step are written token by token, for the report (docs/report.md#trajectories).

    Attributes:
        per_step: how many trajectories are written per step: half of them (rounded up) those with the largest mean
            |log k|, the others at random. 0 writes none; any other number turns `vllm_kl/*` on.
        every: write every this many steps.
        max_tokens: how many tokens of a response are written; of a longer one, half from its start and half from its
            end.
        max_megabytes: the size on disk, in two files. Past it the older file is dropped; the newest half is always
            there.
    """

    per_step: int = 0
    every: int = 1
    max_tokens: int = 4096
    max_megabytes: float = 200.0

    def __post_init__(self) -> None:
        for name, least in (("per_step", 0), ("every", 1), ("max_tokens", 2)):
            require(self, name, getattr(self, name) >= least, f"must be at least {least}")
        require(self, "max_megabytes", 0 < self.max_megabytes < math.inf, "must be above 0 and finite")


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (dump := run.stability.trajectories).per_step:
        often = "per step" if dump.every == 1 else f"every {dump.every} steps"
        yield TableLine(
            *("trajectories", f"{dump.per_step} {often}", "*.trajectories.jsonl", frozenset({Part.MEASURE})),
            proof=lambda engines: trajectories_path(run.config).name.replace("{", "{{").replace("}", "}}"),
        )


NEEDS = Needs(
    ("trajectories.every", "trajectories.max_tokens", "trajectories.max_megabytes"),
    met=lambda run: run.stability.trajectories.per_step > 0,
    why="no trajectory is written",
    switch="stability.trajectories.per_step=4",
)
TRAJECTORIES = Feature(lines, needs=(NEEDS,))
