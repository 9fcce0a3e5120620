"""The `stability.trajectories` settings: token-level data of a few trajectories a step, for the report."""

import math
from dataclasses import dataclass

from verl_ext.methods import require


@dataclass(frozen=True)
class TrajectoryDump:
    """Attributes:
    per_step: trajectories written at a step: half of them (rounded up) those with the largest mean |log k|, the others
        at random. 0 writes none.
    every: steps from one that writes to the next.
    max_tokens: of a trajectory; of a longer one, half of them from its start and half from its end.
    max_megabytes: on disk, in two files; past it, the older half of what was written goes.
    """

    per_step: int = 0
    every: int = 1
    max_tokens: int = 4096
    max_megabytes: float = 200.0

    def __post_init__(self) -> None:
        for name, least in (("per_step", 0), ("every", 1), ("max_tokens", 2)):
            require(self, name, getattr(self, name) >= least, f"must be at least {least}")
        require(self, "max_megabytes", 0 < self.max_megabytes < math.inf, "must be above 0 and finite")
