"""The `stability.sync_canary` settings: does what training updates reach the rollout?"""

from dataclasses import dataclass

from verl_ext.methods import require


@dataclass(frozen=True)
class SyncCanarySettings:
    """Attributes:
    trajectories: of the first batch, that both engines score again at weight syncs; 0 asks nothing.
    every: syncs from one that is looked at to the next.
    """

    trajectories: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        require(self, "trajectories", self.trajectories >= 0, "must be at least 0")
        require(self, "every", self.every >= 1, "must be at least 1")
