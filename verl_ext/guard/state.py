"""What the guard decides, and what it remembers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from verl_ext.guard.learning_rate import LrState
from verl_ext.guard.rules import FEWEST, REFUSING, RuleState
from verl_ext.guard.saved import read_saved
from verl_ext.methods import require


@dataclass(frozen=True)
class Event:
    """One decision; a line of the event log. `threshold` is None where there is none (NaN, an empty batch)."""

    step: int
    rule: str
    signal: str
    value: float | None
    threshold: float | None
    action: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """What one judgement decided, mildest and strongest together."""

    events: tuple[Event, ...] = ()

    def first(self, *actions: str) -> Event | None:
        """The first event with one of these actions."""
        return next((event for event in self.events if event.action in actions), None)

    @property
    def refusal(self) -> Event | None:
        """Why the batch may not update the weights; None where it may."""
        return self.first(*REFUSING)


@dataclass(frozen=True)
class Boundary:
    """What is extrapolated: the steps left until `signal` passes `value`, from its last `window` readings."""

    signal: str = "vllm_kl/k3"
    value: float = 0.1
    window: int = 32

    def __post_init__(self) -> None:
        require(self, "value", 0 < self.value < math.inf, "must be above 0 and finite")
        require(self, "window", self.window >= FEWEST, f"must be at least {FEWEST} steps")


@dataclass
class GuardState:
    """What survives a restart: it is saved with verl's checkpoint.

    Attributes:
        skips, in_a_row: updates skipped so far, and how many steps just now went without a good update.
        rollbacks, undos: how many so far.
        calm_from: the first step at which another may follow.
        given_up: the last step at whose end weights were given up by one of them.
        lr: what is done to the learning rate.
        rules: name -> state.
        growth, growth_of: (step, delta), the window of the extrapolation, and the signal that delta is.
        growth_alone: the same of the engines alone, where rollouts are older than the policy.
        dropped, mask_blind: (step, share) of tokens that the mask drops; whether it drops fewer while delta grows.
        record: name -> (step, value), in which a collapse of the reward is looked for.
        collapsed, recovers_at: whether there was one, and the level of the reward above which it is over.
        gaps, gaps_alone, jumped: the last readings of GAP, those of the engines alone, and whether it stands above a
            jump that has been told.
        good: steps of checkpoints whose weights have been measured and found good, ascending.
        unproven: (step of a checkpoint, step at whose end the weights were its) until a later step has measured them.
        updated: whether an update of the last step was made.
        rollback_due, undo_due: why one was asked for that has not been carried out yet; else empty.
    """

    skips: int = 0
    in_a_row: int = 0
    rollbacks: int = 0
    undos: int = 0
    calm_from: int = 0
    given_up: int = 0
    lr: LrState = field(default_factory=LrState)
    rules: dict[str, RuleState] = field(default_factory=dict)
    growth: list[tuple[int, float]] = field(default_factory=list)
    growth_of: str = ""
    growth_alone: list[tuple[int, float]] = field(default_factory=list)
    dropped: list[tuple[int, float]] = field(default_factory=list)
    mask_blind: bool = False
    record: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    collapsed: bool = False
    recovers_at: float = 0.0
    gaps: list[float] = field(default_factory=list)
    gaps_alone: list[float] = field(default_factory=list)
    jumped: bool = False
    good: list[int] = field(default_factory=list)
    unproven: list[tuple[int, int]] = field(default_factory=list)
    updated: bool = False
    rollback_due: str = ""
    undo_due: str = ""

    def forget(self, after: int) -> None:
        """What was measured of weights that were given up: all after this step."""
        self.growth = _until(after, self.growth)
        self.growth_alone = _until(after, self.growth_alone)
        self.dropped = _until(after, self.dropped)
        self.record = {name: _until(after, readings) for name, readings in self.record.items()}
        self.mask_blind = self.collapsed = False


def _until(step: int, readings: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [reading for reading in readings if reading[0] <= step]


def read_state(saved: Mapping[str, Any]) -> GuardState:
    """The state whose `asdict` was saved; what it lacks is as at the start of a run.

    Raises:
        ValueError: it is no such state; names the entry.
    """
    state = read_saved(GuardState, saved, "the state")
    series = {name: getattr(state, name) for name in ("growth", "growth_alone", "dropped")}
    for name, readings in (series | {f"record.{name}": each for name, each in state.record.items()}).items():
        if any(earlier >= later for (earlier, _), (later, _) in pairwise(readings)):
            raise ValueError(f"{name} does not ascend in its steps")
    return state
