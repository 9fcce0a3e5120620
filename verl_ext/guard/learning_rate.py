"""What the guard does to the learning rate: lower it while a rule asks for that, and raise it again.

After arXiv 2602.01826, whose runs were saved by a decay that the response length sets off: the gap between the engines
grows with the size of the updates. There the rate stays low; here it may recover.
"""

import math
from dataclasses import dataclass

from verl_ext.base.methods import require


@dataclass(frozen=True)
class LowerLr:
    """How all rules with action=lower_lr together change the rate.

    Attributes:
        factor: multiply the schedule's learning rate by this each time a rule with `action: lower_lr` lowers it.
        least: this share of the schedule's rate is always left.
        hold: after this many steps the rate is lowered again if a rule still fires, or raised by one factor if none
            does.
        recover: raise the rate again when no rule fires; false never raises it.
    """

    factor: float = 0.5
    least: float = 0.05
    hold: int = 10
    recover: bool = True

    def __post_init__(self) -> None:
        require(self, "factor", 0 < self.factor < 1, "must be between 0 and 1")
        require(self, "least", 0 < self.least <= self.factor, f"must be above 0 and at most factor={self.factor}")
        require(self, "hold", self.hold >= 1, "must be a number of steps, at least 1")


@dataclass
class LrState:
    """What survives a restart: how many times it is lowered, and the step of the last change, or of the last calm."""

    lowered: int = 0
    since: int = 0


def scale(settings: LowerLr, state: LrState) -> float:
    """Returns the factor of the schedule's rate."""
    return max(settings.factor**state.lowered, settings.least)


def lower(settings: LowerLr, state: LrState, step: int) -> None:
    """Lowers the rate once more, because a rule began to fire or still fires."""
    most = math.ceil(math.log(settings.least) / math.log(settings.factor))  # further factors would change nothing
    state.lowered, state.since = min(state.lowered + 1, most), step


def go_on(settings: LowerLr, state: LrState, step: int, firing: bool) -> bool:
    """Lowers or raises the rate at the end of a step, if it was held long enough; returns whether it changed."""
    before = scale(settings, state)
    if step - state.since >= settings.hold:
        if firing:
            lower(settings, state, step)
        elif state.lowered and settings.recover:
            state.lowered, state.since = state.lowered - 1, step
    return scale(settings, state) != before
