"""Decides which batches may update the weights, and what else to do when a run leaves its bounds.

The guard is a state machine without clock, files or verl: the trainer feeds it scalars and carries out its decisions.
The same signals in the same order give the same decisions, also across `state_dict` and `load_state_dict`. In a step:

    begin -> (foresee -> judge -> count) for each update -> judge_late -> close -> judge_late on the last logged metrics
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from verl_ext.base.metrics import MUST_BE_FINITE
from verl_ext.guard import levels
from verl_ext.guard.forecast import engines_value, foresee, owner_clause, place_clause, remember
from verl_ext.guard.rules import (
    ACTIONS,
    REFUSING,
    LowerLr,
    Rule,
    RuleState,
    apply_rule,
    describe,
    hold_rate,
    late_skip,
    lower_rate,
    lr_scale,
    next_bound,
    threshold_of,
)
from verl_ext.guard.state import Boundary, Decision, Event, read_state

LR_SCALE = "guard/lr_scale"
REFUSED = "actor/gate/refused"  # share of a step's mini-batches that the workers refused
KEPT = 20  # checkpoints remembered as good


@dataclass(frozen=True)
class Limit:
    """The bound past which a rule refuses the next batch. In bypass mode the workers judge by it, as the guard will."""

    rule: Rule
    bound: float

    def is_past(self, signals: Mapping[str, float]) -> bool:
        """Returns True if the rule's signal is past the bound, or not finite."""
        if not math.isfinite(signals.get(self.rule.signal, 0.0)):
            return True
        value = _judged_value(self.rule, signals)
        return value is not None and self.rule.is_past(value, self.bound)


@dataclass(eq=False)
class Guard:
    """The rules and their state.

    Attributes:
        rules: judged in this order.
        stop_after: steps in a row without a good update after which the run stops; None never stops for that reason.
        max_rollbacks: after this many rollbacks, the next one stops the run.
        cooldown: for this many steps after a rollback, or after an undo of an earlier step's update, another rollback
            or undo only skips the batch, because the batch may still come from the weights that were given up.
        lower_lr: how the learning rate is lowered if a rule asks for it.
        boundary: the settings of the extrapolation.
        mask: the metric of the share of tokens that a mask with a fixed band drops; "" for none.
        unread: rules whose signal has not been logged yet.
    """

    rules: Sequence[Rule] = ()
    _: KW_ONLY
    stop_after: int | None = None
    max_rollbacks: int = 3
    cooldown: int = 5
    lower_lr: LowerLr = field(default_factory=LowerLr)
    boundary: Boundary = field(default_factory=Boundary)
    mask: str = ""

    def __post_init__(self) -> None:
        self.unread = {rule.name for rule in self.rules}
        self.step, self._failed = 0, False
        self._judged: set[str] = set()  # signals
        self.load_state_dict({})

    @property
    def tightens(self) -> bool:
        """True if a rule asks for a narrower band."""
        return self._fires("tighten")

    @property
    def lr_scale(self) -> float:
        """The factor of the schedule's learning rate."""
        return lr_scale(self.lower_lr, self.state.lr)

    @property
    def level(self) -> float | None:
        """The level of k3 above which the guard warns; None without such a rule, or while the level is not known
        yet."""
        rule = next((rule for rule in self.rules if rule.name == levels.NAME), None)
        return None if rule is None else threshold_of(rule, self.state.rules[rule.name].history, rule.bound)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The bounds past which the next batch will be refused; in bypass mode the workers refuse by them."""
        refusing = [rule for rule in self.rules if rule.action in REFUSING]
        bounds = [(rule, next_bound(rule, self.state.rules[rule.name])) for rule in refusing]
        return tuple(Limit(rule, bound) for rule, bound in bounds if bound is not None)

    @property
    def calm(self) -> bool:
        """True if nothing contradicts the weights.

        Updates are made, the reward has not collapsed, and no rule fires or counts towards firing, except rules that
        only warn.
        """
        acting = (self.state.rules[rule.name] for rule in self.rules if rule.action != "warn")
        return not self.state.in_a_row and not self.state.collapsed and not any(state.streak for state in acting)

    def begin(self, step: int) -> None:
        """Begins a step. All signals of the step before must have been judged, including those that are logged last."""
        self._prove(step)
        self.step = step
        self._judged = set()
        self.state.updated = self._failed = False

    def foresee(self, signals: Mapping[str, float]) -> tuple[dict[str, float], Decision]:
        """Returns the metrics and events of `guard.forecast`; called before `judge`, whose rules may read them."""
        return foresee(self.state, self.boundary, self.mask, self.step, _finite(signals))

    def judge(self, signals: Mapping[str, float], non_finite: Mapping[str, int] | None = None) -> Decision:
        """Decides whether the batch may make an update.

        Args:
            signals: the step's metrics so far.
            non_finite: tensor name -> its count of NaN and infinite entries.
        """
        bad = [f"{name} has {count} non-finite values" for name, count in (non_finite or {}).items() if count]
        events = [Event(self.step, "non_finite", "", None, None, "skip", " and ".join(bad))] if bad else []
        events += self._not_finite(signals, early=True)
        for rule in self.rules:
            events += self._read(rule, signals, early=True)
        self._judged |= signals.keys()
        return Decision(tuple(events))

    def count(self, refused: bool) -> None:
        """Counts an update that was refused, or that is about to be made."""
        self.state.skips += refused
        self.state.updated |= not refused

    def judge_late(self, signals: Mapping[str, float]) -> Decision:
        """Judges the signals that are logged with the update, or after it.

        Raises:
            ConfigError: a rule would skip the update because of a signal that is logged with it.
        """
        new = {name: value for name, value in signals.items() if name not in self._judged}
        remember(self.state, self.step, _finite(new))
        events = self._not_finite(new, early=False)
        refused = new.get(REFUSED, 0.0)
        if refused > 0:
            reason = f"{refused:.0%} of the mini-batches were refused: they passed a bound of "
            reason += "stability.guard.mini_batch, or had no token left to learn from"
            events.append(Event(self.step, "mini_batch", REFUSED, refused, 0.0, "warn", reason))
        self._failed |= bool(events) and (refused == 1 or "actor/grad_norm" in {event.signal for event in events})
        for rule in self.rules:
            events += self._read(rule, new, early=False)
        self._failed |= any(event.action == "undo" for event in events)
        self._judged |= new.keys()
        return Decision(tuple(events))

    def close(self) -> Decision:
        """Decides, after the updates of a step, whether the learning rate changes and whether the run stops."""
        self.state.in_a_row = 0 if self.state.updated and not self._failed else self.state.in_a_row + 1
        events = []
        firing = self._fires("lower_lr")
        if hold_rate(self.lower_lr, self.state.lr, self.step, firing):
            why = "a rule still fires" if firing else "no rule asks for less"
            action = "lower_lr" if firing else "recover"
            events.append(Event(self.step, "lower_lr", LR_SCALE, self.lr_scale, None, action, f"{why}: {self._rate()}"))
        if self.stop_after is not None and self.state.in_a_row >= self.stop_after:
            reason = f"{self.state.in_a_row} steps in a row without an update (stability.guard.stop_after)"
            value, limit = float(self.state.in_a_row), float(self.stop_after)
            events.append(Event(self.step, "stop_after", "guard/skipped", value, limit, "stop", reason))
        return Decision(tuple(events))

    def saved(self, step: int) -> None:
        """Records that a checkpoint was written. The next step measures its weights and shows whether they are good."""
        self.state.unproven.append((step, step))

    def rolled_back(self, to: int) -> Event:
        """Records that the weights of the checkpoint of step `to` were restored."""
        self.state.rollbacks += 1
        # This checkpoint has to be proven again: if it was not good after all, the next rollback goes further back.
        self.state.good = [step for step in self.state.good if step < to]
        self.state.unproven = [(to, self.step)]
        self.state.rollback_due = self.state.undo_due = ""
        self._give_up(after=to + 1)
        reason = f"weights and optimizer of step {to} restored; the data continues"
        return Event(self.step, "rollback", "", None, None, "restored", reason)

    def restart_state(self, to: int) -> dict[str, Any]:
        """Returns the state for a restart from the checkpoint of step `to`, to which the run has just gone back."""
        return asdict(self.state.as_of(to, self.step))

    def undone(self, of: int | None) -> Event:
        """Records that the updates of step `of` were taken back; `of` is None if no update was kept."""
        self.state.undo_due = ""
        if of is None:
            reason = "no update was kept that could be taken back: none since the start, a rollback or an undo"
            return Event(self.step, "undo", "", None, None, "warn", reason)
        self.state.undos += 1
        self.state.good = [step for step in self.state.good if step < of]
        self.state.unproven = [saved for saved in self.state.unproven if saved[0] < of]
        if of < self.step:  # the rollout has had these weights
            self._give_up(after=of)
        self.state.given_up = self.step
        reason = f"the update of step {of} taken back, weights and optimizer; the data continues"
        return Event(self.step, "undo", "", None, None, "restored", reason)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers, strings, lists and dicts, which JSON restores exactly, floats included."""
        return asdict(self.state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned. New rules start afresh, and rules that are gone are forgotten.

        Raises:
            ValueError: `saved` is not such a state; the message names the entry.
        """
        state = read_state(saved)
        before, state.rules = state.rules, {}
        for rule in self.rules:
            known = before.get(rule.name)
            state.rules[rule.name] = known if known and known.signal == rule.signal else RuleState(rule.signal)
        if state.growth_of != self.boundary.signal:
            state.growth, state.growth_alone, state.growth_of = [], [], self.boundary.signal
        self.state = state

    def _fires(self, action: str) -> bool:
        return any(rule.action == action and self.state.rules[rule.name].firing for rule in self.rules)

    def _give_up(self, after: int) -> None:
        """Forgets all readings after this step, because their weights are gone; all rules start to count again."""
        self.state.calm_from, self.state.given_up = self.step + 1 + self.cooldown, self.step
        self.state.forget(after)
        for state in self.state.rules.values():
            state.streak, state.firing = 0, False

    def _rate(self) -> str:
        return f"the learning rate is {self.lr_scale:.3g} of the schedule's"

    def _prove(self, step: int) -> None:
        """Marks checkpoints as good if the last step measured their weights and nothing contradicted them.

        If that step made no update, the run still has the checkpoint's weights, and the next step can prove them.
        """
        measured = [saved for saved, since in self.state.unproven if since < step - 1]
        if self.calm:
            self.state.good = [*self.state.good, *measured][-KEPT:]
        elif not self.state.updated:
            return
        self.state.unproven = [(saved, since) for saved, since in self.state.unproven if since >= step - 1]

    def _read(self, rule: Rule, signals: Mapping[str, float], *, early: bool) -> list[Event]:
        if _scalar(signals.get(rule.signal)) is None:
            return []
        if not early and rule.action == "skip":
            raise late_skip(rule)
        self.unread.discard(rule.name)
        value = _scalar(_judged_value(rule, signals))
        if value is None or not math.isfinite(value):
            return []  # `_not_finite` reports it
        outcome = apply_rule(rule, self.state.rules[rule.name], value)
        threshold = outcome.threshold
        if outcome.ended and rule.action == "lower_lr":
            self.state.lr.since = self.step
        if outcome.ended:
            reason = f"{rule.signal}={value:.3g}, {rule.name} recovers"
            return [Event(self.step, rule.name, rule.signal, value, threshold, "recover", reason)]
        again = rule.action in REFUSING  # reported each time, because each is a decision about another batch
        if threshold is None or not (outcome.began or (outcome.fires and again)):
            return []
        about = owner_clause(rule.signal, signals)
        if rule.locate:
            about += place_clause(rule.signal, threshold, _finite(signals))
        action, reason = self._action(rule, describe(rule, value, threshold, about), early)
        return [Event(self.step, rule.name, rule.signal, value, threshold, action, reason)]

    def _action(self, rule: Rule, reason: str, early: bool) -> tuple[str, str]:
        if rule.action == "lower_lr":
            lower_rate(self.lower_lr, self.state.lr, self.step)
            return rule.action, f"{reason}: {self._rate()}"
        if rule.action == "undo" and early and self.step < self.state.calm_from:
            return "skip", f"{reason} (soon after weights were given up: no undo yet)"
        if rule.action != "rollback":
            return rule.action, reason
        if self.step < self.state.calm_from:
            return ("skip" if early else "warn"), f"{reason} (soon after a rollback: no other rollback yet)"
        if self.state.rollbacks >= self.max_rollbacks:
            return "stop", f"{reason}, after {self.state.rollbacks} rollbacks (stability.guard.max_rollbacks)"
        return "rollback", reason

    def _not_finite(self, signals: Mapping[str, float], *, early: bool) -> list[Event]:
        """Returns events about signals that are not finite: the rules' actions, or the guard's own if none is stronger.

        A rule's patience does not count: with a NaN weight no update is made, so a late signal is not logged again.
        """
        own, mildest = ("skip", "skip") if early else ("warn", "tighten")
        events: list[Event] = []
        for name in dict.fromkeys((*MUST_BE_FINITE, *(rule.signal for rule in self.rules))):  # once each, in order
            value = _scalar(signals.get(name))
            if value is None or math.isfinite(value):
                continue
            rules = [rule for rule in self.rules if rule.signal == name]
            stronger = [rule for rule in rules if ACTIONS.index(rule.action) > ACTIONS.index(mildest)]
            found = [self._action(rule, f"{name} is {value} ({rule.setting})", early) for rule in stronger]
            found = found or [(own, f"{name} is {value}")]
            events += [Event(self.step, "non_finite", name, value, None, action, reason) for action, reason in found]
        return events


def _judged_value(rule: Rule, signals: Mapping[str, float]) -> float | None:
    """Returns the value that a rule judges; None if the batch does not show it."""
    return engines_value(rule.signal, signals) if rule.engines_only else signals.get(rule.signal)


def _finite(signals: Mapping[str, Any]) -> dict[str, float]:
    numbers = ((name, _scalar(value)) for name, value in signals.items())
    return {name: value for name, value in numbers if value is not None and math.isfinite(value)}


def _scalar(value: Any) -> float | None:
    """Returns a metric as a Python float, which every log can write; None for text and for None."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
