"""Scoring a few trajectories again, with the weights that sampled them."""

from dataclasses import dataclass

from verl_ext.methods import require


@dataclass(frozen=True)
class Rescoring:
    """Which trajectories, and how often.

    Attributes:
        every: steps from one rescoring to the next; 0 never does.
        trajectories: of a batch, at random among those that one kept version sampled.
        versions: how many old versions of the weights stay in the host's memory. The first is verl's own copy.
    """

    every: int = 0
    trajectories: int = 16
    versions: int = 1

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be a number of steps, or 0 for never")
        for name in ("trajectories", "versions"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")

    def __str__(self) -> str:
        often = "a step" if self.every == 1 else f"every {self.every} steps"
        return f"{self.trajectories} trajectories {often}, {self.versions} version(s) back"
