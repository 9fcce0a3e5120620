"""The `stability.trajectories` settings: token-level data of a few trajectories a step, for the report."""

import math
from dataclasses import dataclass

from verl_ext.errors import ConfigError


@dataclass
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
            if getattr(self, name) < least:
                raise ConfigError(f"stability.trajectories.{name}={getattr(self, name)} must be at least {least}")
        if not 0 < self.max_megabytes < math.inf:
            raise ConfigError(f"stability.trajectories.max_megabytes={self.max_megabytes:g} must be above 0 and finite")
