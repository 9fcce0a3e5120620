"""Rules on one logged signal each: when a rule fires and stops firing; and the learning rate that rules may lower."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import require
from verl_ext.diagnosis.growth import spread

ACTIONS = ("warn", "tighten", "lower_lr", "skip", "undo", "rollback", "stop")  # the mildest first
REFUSING = ("skip", "undo", "rollback", "stop")  # the batch makes no update
NO_SKIP = f"set action to {' or '.join(one for one in ACTIONS if one != 'skip')}"
SIDES = ("above", "below")
FEWEST_FOR_ZSCORE = 8  # readings before an adaptive rule judges


@dataclass(frozen=True)
class Rule:
    """Fires when `signal` has been past `bound` for `patience` readings in a row, until it is back past `recover`.

    Attributes:
        name: the rule's name in the event log.
        signal: a logged metric, such as `vllm_kl/k3` (docs/metrics.md).
        bound: the threshold, in the signal's unit. With `zscore_window`, it counts robust standard deviations from the
            median. A value at the bound is not past it.
        side: "above" or "below": on which side of the bound the signal is bad.
        action: what to do while the rule fires: `warn`, `tighten`, `lower_lr`, `skip`, `undo`, `rollback` or `stop`
            (docs/guard.md#rules).
        recover: the value (or distance, like the bound) at which a rule that fires stops firing. null takes the bound.
            If `least` is the threshold, the ratio of `recover` to the bound is applied to it.
        patience: how many readings in a row must be past the bound before the rule fires.
        advice: what to do, in a clause; printed with the reason.
        zscore_window: how many readings the median and the median absolute deviation are taken from, at least 8. null
            makes the threshold fixed.
        baseline: the threshold is `bound` times the mean of the signal's first `baseline` readings, and the rule judges
            from then on. null makes the threshold fixed.
        least: with `baseline`, the threshold is never below this.
        engines_only: judge only the engines' part of the gap, from trajectories of lag 0 or rescored ones. A batch of
            old rollouts without such trajectories is not judged.
        locate: add to the reason the first layer whose routers disagree and the first positions past the bound.
        setting: where the user finds the bound, for messages.
    """

    name: str
    signal: str
    bound: float
    side: str = "above"
    action: str = "warn"
    recover: float | None = None
    patience: int = 1
    zscore_window: int | None = None
    baseline: int | None = None
    least: float = 0.0
    engines_only: bool = False
    locate: bool = False
    advice: str = ""
    setting: str = ""

    def is_past(self, value: float, threshold: float) -> bool:
        return value > threshold if self.side == "above" else value < threshold


def late_skip(rule: Rule) -> ConfigError:
    """Returns the error about `action: skip` of a rule whose signal is known only after the update."""
    return ConfigError(
        f"stability.guard.rules.{rule.name}: {rule.signal} comes with the update, which can then no longer be skipped; "
        f"{NO_SKIP}, or use stability.guard.mini_batch"
    )


@dataclass
class RuleState:
    """The memory of a rule.

    Attributes:
        signal: the signal of the rule.
        streak: readings in a row past the bound.
        firing: whether the rule fires.
        history: the readings from which the threshold is computed: the last (`zscore_window`) or the first
            (`baseline`).
    """

    signal: str = ""
    streak: int = 0
    firing: bool = False
    history: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RuleOutcome:
    """The result of judging a value. `threshold` is in the signal's unit, None while there are too few readings."""

    threshold: float | None
    fires: bool
    began: bool = False
    ended: bool = False


def apply_rule(rule: Rule, state: RuleState, value: float) -> RuleOutcome:
    """Judges a finite value, and updates `state` with it."""
    threshold = threshold_of(rule, state.history, rule.bound)
    back = threshold if rule.recover is None else threshold_of(rule, state.history, rule.recover)
    if rule.zscore_window is not None:
        state.history = [*state.history, value][-rule.zscore_window :]
    elif rule.baseline is not None:
        state.history = [*state.history, value][: rule.baseline]
    if threshold is None or back is None:
        return RuleOutcome(None, fires=state.firing)
    if state.firing:
        state.firing = rule.is_past(value, back)
        if not state.firing:
            state.streak = 0
        return RuleOutcome(threshold, fires=state.firing, ended=not state.firing)
    state.streak = state.streak + 1 if rule.is_past(value, threshold) else 0
    state.firing = state.streak >= rule.patience
    return RuleOutcome(threshold, fires=state.firing, began=state.firing)


def next_bound(rule: Rule, state: RuleState) -> float | None:
    """Returns the value past which the next reading makes the rule fire, or keep firing; None if no value does."""
    threshold = threshold_of(rule, state.history, rule.bound)
    back = threshold if rule.recover is None else threshold_of(rule, state.history, rule.recover)
    if state.firing and threshold is not None:
        return back
    return threshold if state.streak + 1 >= rule.patience else None


def threshold_of(rule: Rule, history: Sequence[float], bound: float) -> float | None:
    """Returns a bound of the rule in the signal's unit; None while there are too few readings."""
    if rule.baseline is not None:
        if len(history) < rule.baseline:
            return None
        threshold = max(rule.bound * fmean(history), rule.least)
        return threshold * (bound / rule.bound) if rule.bound else threshold  # `least` must not swallow `recover`
    if rule.zscore_window is None:
        return bound
    if len(history) < min(FEWEST_FOR_ZSCORE, rule.zscore_window):
        return None
    middle, deviation = spread(history)
    if deviation == 0:
        return None  # a signal that never moved gives no scale for its first move
    return middle + (bound if rule.side == "above" else -bound) * deviation


def describe(rule: Rule, value: float, threshold: float, about: str = "") -> str:
    """Returns why the rule fires, in one clause; `about` follows the value."""
    verb = "passes" if rule.side == "above" else "is below"
    given = f" for {rule.patience} readings" if rule.patience > 1 else ""
    advice = f": {rule.advice}" if rule.advice else ""
    if rule.baseline is not None:
        means = f"{rule.bound:g} times the mean of its first {rule.baseline} readings"
        origin = means if threshold > rule.least else f"the least that the threshold can be: {means} is no more"
        return f"{rule.signal}={value:.3g}{about} {verb} {threshold:.3g}{given}, {origin} ({rule.setting}){advice}"
    if rule.zscore_window is None:
        return f"{rule.signal}={value:.3g}{about} {verb} {rule.setting}={rule.bound:g}{given}{advice}"
    return (
        f"{rule.signal}={value:.3g}{about} {verb} {threshold:.3g}{given}, {rule.setting}={rule.bound:g} robust "
        f"standard deviations from its median{advice}"
    )


@dataclass(frozen=True)
class LowerLr:
    """How all rules with action=lower_lr together lower the learning rate, and raise it again.

    Source: arXiv 2602.01826, whose runs were saved by a decay that the response length triggers: the gap between the
    engines grows with the size of the updates. In the paper the rate stays low; here it may recover.

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
    """The part that survives a restart: how many times the rate is lowered, and the step of the last change or
    recovery."""

    lowered: int = 0
    since: int = 0


def lr_scale(settings: LowerLr, state: LrState) -> float:
    """Returns the factor of the schedule's rate."""
    return max(settings.factor**state.lowered, settings.least)


def lower_rate(settings: LowerLr, state: LrState, step: int) -> None:
    """Lowers the rate once more, because a rule began to fire or still fires."""
    most = math.ceil(math.log(settings.least) / math.log(settings.factor))  # further factors would change nothing
    state.lowered, state.since = min(state.lowered + 1, most), step


def hold_rate(settings: LowerLr, state: LrState, step: int, firing: bool) -> bool:
    """Lowers or raises the rate at the end of a step, if it was held long enough; returns whether it changed."""
    before = lr_scale(settings, state)
    if step - state.since >= settings.hold:
        if firing:
            lower_rate(settings, state, step)
        elif state.lowered and settings.recover:
            state.lowered, state.since = state.lowered - 1, step
    return lr_scale(settings, state) != before
