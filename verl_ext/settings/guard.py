"""The `stability.guard` settings: rules on logged signals, and what the guard does besides.

stability:
  guard:
    rules:
      probability: {signal: vllm_kl/prob_diff_mean, above: 0.05, recover: 0.04, patience: 3, action: warn}
      collapse: {signal: guard/steps_to_boundary, below: 20, action: tighten}
      reward: {signal: critic/score/mean, below: 8, zscore_window: 64, patience: 3, action: rollback}
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.errors import ConfigError
from verl_ext.guard.learning_rate import LowerLr
from verl_ext.guard.rules import ACTIONS, FEWEST, SIDES, Rule
from verl_ext.guard.state import Boundary
from verl_ext.methods import require, require_known, require_one_of
from verl_ext.metrics import OURS, comes_late, find, nearest

PREFIX = "stability.guard"
SKIP_METRICS = ("vllm_kl/k1", "vllm_kl/k3", "vllm_kl/head")
OWN_EFFECT = "correction/"  # what tightening itself moves
# Setting of the guard -> the actions that read it.
READ_BY = {
    "tighten_factor": ("tighten",),
    "lower_lr": ("lower_lr",),
    "max_rollbacks": ("rollback",),
    "rollback_cooldown": ("rollback", "undo"),
}


@dataclass(frozen=True)
class BatchSkip:
    """Skip the update when `metric` passes `threshold`; null never skips for that reason."""

    metric: str = "vllm_kl/k3"
    threshold: float | None = None

    def __post_init__(self) -> None:
        require_one_of(self, "metric", SKIP_METRICS)
        holds = self.threshold is None or self.threshold >= 0
        require(self, "threshold", holds, "must be at least 0, or null to never skip")


@dataclass(frozen=True)
class MiniBatchGate:
    """Refuse the optimizer step of a mini-batch past one of these; null does not look at it.

    Attributes:
        vllm_kl: k3 of l_infer against l_theta, the policy as it is at this mini-batch.
        policy_kl: k3 of l_old against l_theta: how far the earlier mini-batches of the step have moved the policy.
        grad_norm: of the gradient before clipping (FSDP).
    """

    vllm_kl: float | None = None
    policy_kl: float | None = None
    grad_norm: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(self, name, value is None or 0 < value < math.inf, "must be above 0 and finite, or null")

    @property
    def active(self) -> bool:
        return any(value is not None for value in vars(self).values())


@dataclass(frozen=True)
class AfterUpdate:
    """Score trajectories of a batch again when it has updated the policy, for rules that undo the update by that.

    Attributes:
        trajectories: so many of a batch; 0 for none. Each costs a forward pass.
    """

    trajectories: int = 0

    def __post_init__(self) -> None:
        require(self, "trajectories", self.trajectories >= 0, "must be a number of trajectories, or 0")


@dataclass(frozen=True)
class GuardSettings:
    """Besides `rules`, which `parse_rules` reads.

    Attributes:
        stop_after: steps in a row without an update after which the run stops; null never does.
        slow_step_s: seconds after which a step, three times as long as usual, is told with what it waits
            for; null never tells.
        tighten_factor: what IcePop's band is narrowed by, in logarithms, while a rule with action=tighten fires.
        max_rollbacks, rollback_cooldown: rollbacks after which another is a stop; steps after one without another.
        lower_lr: what a rule with action=lower_lr does to the learning rate.
        after_update: look at a few trajectories of each batch again, after its update.
        mini_batch: refuse single optimizer steps, in the workers.
        boundary: the mismatch that is extrapolated, and to where.
    """

    stop_after: int | None = 10
    slow_step_s: float | None = 600.0
    tighten_factor: float = 0.5
    max_rollbacks: int = 3
    rollback_cooldown: int = 5
    lower_lr: LowerLr = field(default_factory=LowerLr)
    after_update: AfterUpdate = field(default_factory=AfterUpdate)
    mini_batch: MiniBatchGate = field(default_factory=MiniBatchGate)
    boundary: Boundary = field(default_factory=Boundary)

    def __post_init__(self) -> None:
        holds = self.stop_after is None or self.stop_after >= 1
        require(self, "stop_after", holds, "must be at least 1, or null to never stop")
        holds = self.slow_step_s is None or self.slow_step_s > 0
        require(self, "slow_step_s", holds, "must be above 0 seconds, or null to never tell")
        require(self, "tighten_factor", 0 < self.tighten_factor < 1, "must be between 0 and 1")
        for name in ("max_rollbacks", "rollback_cooldown"):
            require(self, name, getattr(self, name) >= 0, "must be at least 0")
        _check_signal(f"{PREFIX}.boundary", self.boundary.signal)


def parse_rules(given: Any) -> tuple[Rule, ...]:
    """`stability.guard.rules`, name -> {signal, above or below, action, recover, patience, zscore_window, advice} as of
    `guard.rules.Rule`, in the order written.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, or an action cannot follow its signal.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{PREFIX}.rules={given} must be a mapping from a name to a rule")
    return tuple(_parse(str(name), rule) for name, rule in (given or {}).items())


def _parse(name: str, given: Any) -> Rule:
    where = f"{PREFIX}.rules.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given} must be a mapping with a signal, a bound and an action")
    rule = dict(given)
    known = [name for name in inspect.signature(Rule).parameters if name not in ("name", "bound", "side", "setting")]
    require_known(rule, sorted([*known, *SIDES]), where)
    sides = [side for side in SIDES if rule.get(side) is not None]
    if len(sides) != 1:
        raise ConfigError(f"{where} needs one bound: above or below")
    (side,) = sides
    bound = rule.pop(side)
    for key in ("signal", "action"):
        if not isinstance(rule.get(key), str):
            raise ConfigError(f"{where}.{key} must be given")
    if not isinstance(rule.get("advice") or "", str):
        raise ConfigError(f"{where}.advice={rule['advice']} must be text")
    for side_or_key, value in {side: bound, "recover": rule.get("recover")}.items():
        if value is not None and not _is_finite(value):
            raise ConfigError(f"{where}.{side_or_key}={value} must be a finite number")
    for key, least in (("patience", 1), ("zscore_window", FEWEST)):
        value = rule.get(key)
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"{where}.{key}={value} must be a whole number of readings, at least {least}")
    settings = {key: value for key, value in rule.items() if key in known and value is not None}
    parsed = Rule(name, bound=float(bound), side=side, setting=f"{where}.{side}", **settings)
    _check(parsed, where)
    return parsed


def _check_signal(where: str, signal: str) -> None:
    """Refuse what neither this package nor verl logs, but for what may be a metric of the user's own."""
    if find(signal) is not None:
        return
    near = nearest(signal)
    if near or signal.startswith(OURS):
        raise ConfigError(
            f"{where}.signal={signal} is not known; near it are: {', '.join(near) or 'none'}. A metric of your own may "
            f"have any name that is not like one of these, outside of {', '.join(OURS)}: mine/NAME, for example"
        )


def _check(rule: Rule, where: str) -> None:
    _check_signal(where, rule.signal)
    if rule.action not in ACTIONS:
        raise ConfigError(f"{where}.action={rule.action} is not known; choose one of: {', '.join(ACTIONS)}")
    if rule.zscore_window is not None and rule.bound <= 0:
        raise ConfigError(
            f"{where}: with zscore_window, {rule.side}={rule.bound:g} counts robust standard deviations from the "
            "median to that side, and must be above 0"
        )
    farther = rule.recover is not None and (
        rule.recover > rule.bound if rule.side == "above" or rule.zscore_window else rule.recover < rule.bound
    )
    if farther:
        raise ConfigError(f"{where}.recover={rule.recover:g} lies past {rule.side}={rule.bound:g}: it would flicker")
    if rule.action == "skip" and comes_late(rule.signal):
        raise ConfigError(
            f"{where}: {rule.signal} comes with the update, which can then no longer be skipped; set action to warn, "
            f"tighten, lower_lr, undo, rollback or stop, or use {PREFIX}.mini_batch"
        )
    if rule.action == "tighten" and rule.signal.startswith(OWN_EFFECT):
        raise ConfigError(f"{where}: a narrower band itself raises {rule.signal}, so the rule would not recover")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
