"""The `stability.sync_canary` settings: does what training updates reach the rollout?"""

from dataclasses import dataclass

from verl_ext.base.methods import require


@dataclass(frozen=True)
class SyncCanarySettings:
    """Which trajectories show whether a weight sync happened, and how often.

    Attributes:
        trajectories: how many trajectories of the first batch both engines score again at weight syncs, to check that
            the weights arrived (docs/guard.md#a-weight-sync-that-did-not-happen). 0 turns the check off.
        every: check every so many syncs.
    """

    trajectories: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        require(self, "trajectories", self.trajectories >= 0, "must be at least 0")
        require(self, "every", self.every >= 1, "must be at least 1")
