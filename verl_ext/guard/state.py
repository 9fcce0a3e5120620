"""The guard's decisions, its memory, and the reading of a saved state."""

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from itertools import pairwise
from typing import Any, get_args, get_origin, get_type_hints

from verl_ext.base.methods import require
from verl_ext.diagnosis.growth import BOUNDARY, FEWEST_FOR_GROWTH, GROWTH_READINGS
from verl_ext.diagnosis.names import K3
from verl_ext.guard.rules import REFUSING, LrState, RuleState

LARGEST = 2**63 - 1  # a whole number in a saved state
# Type of an entry of a saved state -> its name in messages, and whether a value from JSON fits it.
KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: _is_kind(value, int) and 0 <= value <= LARGEST),
    float: (
        "a finite number",
        lambda value: _is_kind(value, int | float) and abs(value) <= sys.float_info.max,
    ),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    list: ("a list", lambda value: isinstance(value, list | tuple)),
    tuple: ("a pair", lambda value: isinstance(value, list | tuple)),
    dict: ("a mapping", lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value)),
}


def _is_kind(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class Event:
    """One line of the event log. `threshold` is None if there is none (NaN, an empty batch)."""

    step: int
    rule: str
    signal: str
    value: float | None
    threshold: float | None
    action: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """All events of one judgement, whatever their action."""

    events: tuple[Event, ...] = ()

    def first(self, *actions: str) -> Event | None:
        """Returns the first event with one of these actions."""
        return next((event for event in self.events if event.action in actions), None)

    @property
    def refusal(self) -> Event | None:
        """The event that forbids the batch to update the weights; None if there is none."""
        return self.first(*REFUSING)


@dataclass(frozen=True)
class Boundary:
    """The extrapolation: the steps left until `signal` passes `value`, from its last `window` readings.

    Attributes:
        signal: the signal that is extrapolated for `guard/steps_to_boundary`.
        value: the mismatch that `guard/steps_to_boundary` counts down to.
        window: how many readings the line is fitted to, at least 8.
    """

    signal: str = K3
    value: float = BOUNDARY
    window: int = GROWTH_READINGS

    def __post_init__(self) -> None:
        require(self, "value", 0 < self.value < math.inf, "must be above 0 and finite")
        require(self, "window", self.window >= FEWEST_FOR_GROWTH, f"must be at least {FEWEST_FOR_GROWTH} steps")


@dataclass
class GuardState:
    """The guard's memory, which survives a restart: it is saved with verl's checkpoint.

    Attributes:
        skips, in_a_row: updates skipped so far, and the number of steps in a row, up to now, without a good update.
        rollbacks, undos: how many there were so far.
        calm_from: the first step at which another rollback or undo may follow.
        given_up: the last step at whose end a rollback or an undo gave up the weights.
        lr: the state of the learning rate.
        rules: name -> state.
        growth, growth_of: the window of the extrapolation, (step, value) each, and the signal of these values.
        growth_alone: the same for the engines' part, if rollouts are older than the policy.
        dropped, mask_blind: (step, share) of tokens that the mask drops; whether it drops fewer while the gap grows.
        record: name -> (step, value), the readings that are searched for a collapse of the reward.
        collapsed, recovers_at: whether the reward has collapsed, and the reward above which it has recovered.
        gaps, gaps_alone, jumped: the last readings of the mean |log k|, those of its engines' part, and whether a
            reported jump still lasts.
        good: steps of checkpoints whose weights have been measured and found good, ascending.
        unproven: (step of a checkpoint, step at whose end the run had its weights), until a later step measures them.
        updated: whether the last step made an update.
        rollback_due, undo_due: the reason of a rollback or undo that is not carried out yet; else empty.
        first_load: the counts that `router/load_moved` compares with, `ExpertLoad.first`: the workers lose them when
            the run stops.
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
    first_load: list[list[int]] = field(default_factory=list)

    def as_of(self, to: int, now: int) -> "GuardState":
        """Returns the state for a restart from step `to`, to which the run went back in step `now`.

        The run itself counts on from `now`, and the restart from `to`, so steps to wait for are moved to keep their
        distance. Counts, a lowered learning rate and the windows of the rules stay.
        """
        state = copy.deepcopy(self)
        state.forget(after=to)
        ago = now - to
        state.calm_from = max(state.calm_from - ago, 0)
        state.lr.since = max(state.lr.since - ago, 0)
        state.given_up = to
        state.unproven = [(to, to)]
        return state

    def forget(self, after: int) -> None:
        """Drops all readings after this step, because they measured weights that were given up."""
        self.growth = _keep_until(after, self.growth)
        self.growth_alone = _keep_until(after, self.growth_alone)
        self.dropped = _keep_until(after, self.dropped)
        self.record = {name: _keep_until(after, readings) for name, readings in self.record.items()}
        self.mask_blind = self.collapsed = False


def _keep_until(step: int, readings: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [reading for reading in readings if reading[0] <= step]


def read_state(saved: Mapping[str, Any]) -> GuardState:
    """Returns the state whose `asdict` was saved; missing entries are as at the start of a run.

    Raises:
        ValueError: an entry is unknown, not of its field's type, or not in the order of its steps; the text names it.
    """
    state: GuardState = _restore(GuardState, saved)
    series = {name: getattr(state, name) for name in ("growth", "growth_alone", "dropped")}
    for name, readings in (series | {f"record.{name}": each for name, each in state.record.items()}).items():
        if any(earlier >= later for (earlier, _), (later, _) in pairwise(readings)):
            raise ValueError(f"the steps of {name} do not ascend")
    return state


def _restore(kind: Any, value: Any, path: str = "") -> Any:
    """Returns a value of this type from JSON, which may be incomplete, or written by another version or program.

    Types may be int (0 to 2^63 - 1), float (finite), bool, str, dataclasses, and lists, pairs and mappings of these.
    """
    where = path or "the state"
    hints = get_type_hints(kind) if is_dataclass(kind) else None
    outer, inner = dict if hints else get_origin(kind) or kind, get_args(kind)
    name, fits = KINDS[outer]
    if not fits(value) or (outer is tuple and len(value) != len(inner)):
        raise ValueError(f"{where} is not {name}")
    if hints:
        if unknown := [key for key in value if key not in hints]:
            raise ValueError(f"{where} has an unknown entry {unknown[0]}")
        return kind(**{key: _restore(hints[key], each, f"{path}.{key}".lstrip(".")) for key, each in value.items()})
    if outer is list:
        return [_restore(inner[0], each, path) for each in value]
    if outer is tuple:
        return tuple(_restore(part, each, path) for part, each in zip(inner, value, strict=True))
    if outer is dict:
        return {key: _restore(inner[1], each, f"{path}.{key}") for key, each in value.items()}
    return value
