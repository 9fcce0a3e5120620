"""The guard: rules on logged signals, and its other actions (docs/guard.md).

stability:
  guard:
    rules:
      probability: {signal: vllm_kl/prob_diff_mean, above: 0.05, recover: 0.04, patience: 3, action: warn}
      collapse: {signal: guard/steps_to_boundary, below: 20, action: tighten}
      reward: {signal: critic/score/mean, below: 8, zscore_window: 64, patience: 3, action: rollback}
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError, giving_way
from verl_ext.base.methods import described, require, require_known, require_one_of
from verl_ext.base.metrics import OURS, comes_late, find, nearest
from verl_ext.diagnosis.levels import Level, published
from verl_ext.features.feature import Feature, Needs, Part, RunFeatures, TableLine
from verl_ext.features.mismatch import needs_measuring
from verl_ext.features.verl_config import ACTOR, bypasses, model_json, rollout_format, strategy_of
from verl_ext.guard import levels
from verl_ext.guard.rules import ACTIONS, FEWEST_FOR_ZSCORE, SIDES, LowerLr, Rule
from verl_ext.guard.state import Boundary

PREFIX = "stability.guard"
BATCH_SKIP = "batch_skip"  # the name of the rule that stability.batch_skip adds
AT_STEP = "optimizer_step, {loss}"
AFTER_RULE = {
    "warn": "log and event log",
    "tighten": "the band of icepop",
    "lower_lr": AT_STEP,
    "skip": "in place of the update",
    "undo": "end of the step",
    "rollback": "end of the step",
    "stop": "before the next step",
}
KNOWN = ("fsdp2", "megatron", "veomni")  # values of actor.strategy whose gradients and optimizers `workers` can read
IN_GATE = ("lower_lr", "undo")  # actions that the workers carry out, around the optimizer's step
SKIP_METRICS = ("vllm_kl/k1", "vllm_kl/k3", "vllm_kl/head")
# The keys that a user writes in a rule, in addition to its bound: the arguments of Rule except those that the parser
# sets.
RULE_SETTINGS = tuple(
    name for name in inspect.signature(Rule).parameters if name not in ("name", "bound", "side", "setting")
)
RULE_NEEDS = ("signal", "action")  # in addition to one of SIDES
OWN_EFFECT = "correction/"  # metrics that tightening itself moves
# Setting of the guard -> the actions that read it.
READ_BY = {
    "tighten_factor": ("tighten",),
    "lower_lr": ("lower_lr",),
    "max_rollbacks": ("rollback",),
    "rollback_cooldown": ("rollback", "undo"),
}


@dataclass(frozen=True)
class BatchSkip:
    """Skips the update of a batch when `metric` passes `threshold`.

    Attributes:
        metric: the metric that is compared: `vllm_kl/k3`, `vllm_kl/k1`, or `vllm_kl/head`, which needs
            `stability.head.k`.
        threshold: skip the update of a batch whose metric is above this. Weights, optimizer and learning-rate schedule
            stay, and training continues. null never skips.
    """

    metric: str = "vllm_kl/k3"
    threshold: float | None = None

    def __post_init__(self) -> None:
        require_one_of(self, "metric", SKIP_METRICS)
        holds = self.threshold is None or self.threshold >= 0
        require(self, "threshold", holds, "must be at least 0, or null to never skip")


@dataclass(frozen=True)
class MiniBatchGate:
    """Refuses the optimizer step of a mini-batch that is past a bound; null sets no bound.

    Attributes:
        vllm_kl: refuse the optimizer step of a mini-batch whose k3 of l_infer against l_theta is above this. l_theta is
            the policy at this mini-batch.
        policy_kl: refuse the optimizer step if k3 of l_old against l_theta is above this. It measures how far the
            step's earlier mini-batches have moved the policy.
        grad_norm: refuse the optimizer step if the norm of the gradient before clipping is above this (FSDP2
            and Megatron).
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
    """Scores trajectories of a batch again after its update, so that a rule can undo the update.

    Attributes:
        trajectories: how many trajectories of a batch are scored again after its update, for `actor/after_update/*`.
            Each costs a forward pass. FSDP2 and Megatron; 0 scores none.
    """

    trajectories: int = 0

    def __post_init__(self) -> None:
        require(self, "trajectories", self.trajectories >= 0, "must be a number of trajectories, or 0")


@dataclass(frozen=True)
class GuardSettings:
    """Rules, their actions and the mini-batch gate are explained in docs/guard.md.

    Attributes:
        stop_after: stop the run after this many steps in a row without an update; null never stops it.
        slow_step_s: report a step that takes longer than this many seconds, and three times as long as the median
            step, and how to see what it waits for. null never reports it.
        tighten_factor: narrow IcePop's band by this factor, in logarithms, while a rule with `action: tighten` fires.
        max_rollbacks: after this many rollbacks, the next one stops the run instead.
        rollback_cooldown: for this many steps after a rollback, another one only skips the update. The same holds after
            an undo of weights that the rollout has had.
        lower_lr: what rules with `action: lower_lr` do to the learning rate.
        after_update: score a few trajectories of each batch again after its update.
        level: warn where the engines' k3 stays above this. null takes the level that is published for the model and the
            rollout's format, or else twice the mean of the run's first 20 readings (docs/guard.md#normal-levels). 0
            never warns.
        mini_batch: refuse single optimizer steps, in the workers.
        boundary: the signal that is extrapolated, and the value it is extrapolated to.
    """

    stop_after: int | None = 10
    slow_step_s: float | None = 600.0
    tighten_factor: float = 0.5
    max_rollbacks: int = 3
    rollback_cooldown: int = 5
    lower_lr: LowerLr = field(default_factory=LowerLr)
    after_update: AfterUpdate = field(default_factory=AfterUpdate)
    level: float | None = None
    mini_batch: MiniBatchGate = field(default_factory=MiniBatchGate)
    boundary: Boundary = field(default_factory=Boundary)

    def __post_init__(self) -> None:
        holds = self.stop_after is None or self.stop_after >= 1
        require(self, "stop_after", holds, "must be at least 1, or null to never stop")
        holds = self.slow_step_s is None or self.slow_step_s > 0
        require(self, "slow_step_s", holds, "must be above 0 seconds, or null to never report")
        require(self, "tighten_factor", 0 < self.tighten_factor < 1, "must be between 0 and 1")
        for name in ("max_rollbacks", "rollback_cooldown"):
            require(self, name, getattr(self, name) >= 0, "must be at least 0")
        holds = self.level is None or 0 <= self.level < math.inf
        require(self, "level", holds, "must be at least 0 and finite, or null for the published level or the run's own")
        _check_signal(f"{PREFIX}.boundary", self.boundary.signal)


def parse_rules(given: Any) -> tuple[Rule, ...]:
    """Parses `stability.guard.rules`, name -> {signal, above or below, action, recover, patience, zscore_window,
    advice} as in `guard.rules.Rule`, in the order written. null leaves a preset's rule out.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, or an action cannot follow its signal.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{PREFIX}.rules={given} must be a mapping from a name to a rule")
    return tuple(_parse(str(name), rule) for name, rule in (given or {}).items() if rule is not None)


def _parse(name: str, given: Any) -> Rule:
    where = f"{PREFIX}.rules.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given} must be a mapping with a signal, a bound and an action")
    rule = dict(given)
    require_known(rule, sorted([*RULE_SETTINGS, *SIDES]), where)
    sides = [side for side in SIDES if rule.get(side) is not None]
    if len(sides) != 1:
        raise ConfigError(f"{where} needs one bound: above or below")
    (side,) = sides
    for key in RULE_NEEDS:
        if not isinstance(rule.get(key), str):
            raise ConfigError(f"{where}.{key} must be given")
    if not isinstance(rule.get("advice") or "", str):
        raise ConfigError(f"{where}.advice={rule['advice']} must be text")
    for key in (side, "recover", "least"):
        value = rule.get(key)
        if value is not None and not _is_finite(value):
            raise ConfigError(f"{where}.{key}={value} must be a finite number")
    for key, least in (("patience", 1), ("zscore_window", FEWEST_FOR_ZSCORE), ("baseline", 1)):
        value = rule.get(key)
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"{where}.{key}={value} must be a whole number of readings, at least {least}")
    for key in ("engines_only", "locate"):
        if not isinstance(rule.get(key) or False, bool):
            raise ConfigError(f"{where}.{key}={rule[key]} must be true or false")
    if name == levels.NAME:
        raise ConfigError(f"{where}: the name is taken by {levels.SETTING}")
    settings = {key: value for key, value in rule.items() if key in RULE_SETTINGS and value is not None}
    parsed = Rule(name, bound=float(rule[side]), side=side, setting=f"{where}.{side}", **settings)
    _check(parsed, where)
    return parsed


def _check_signal(where: str, signal: str) -> None:
    """Refuses a signal that neither this package nor verl logs, unless it may be a metric of the user's own."""
    if find(signal) is not None:
        return
    near = nearest(signal)
    if near or signal.startswith(OURS):
        raise ConfigError(
            f"{where}.signal={signal} is not known; similar names: {', '.join(near) or 'none'}. A metric of your own "
            f"may have any name that is not like one of these, outside of {', '.join(OURS)}: mine/NAME, for example"
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
    if rule.zscore_window is not None and rule.baseline is not None:
        raise ConfigError(f"{where}: zscore_window and baseline are two ways to find the threshold; keep one of them")
    if rule.least and rule.baseline is None:
        raise ConfigError(f"{where}.least={rule.least:g} needs baseline, which counts the first readings")
    for key in ("engines_only", "locate"):
        if getattr(rule, key) and not rule.signal.startswith("vllm_kl/"):
            raise ConfigError(f"{where}.{key}=true needs a metric of the gap, vllm_kl/*, and {rule.signal} is none")
    if rule.locate and rule.side == "below":
        raise ConfigError(f"{where}.locate=true needs a bound above which the gap is too large: above")
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


def check(run: RunFeatures) -> None:
    """Checks that verl's settings allow the guard's actions."""
    settings, again = run.stability.guard, f"{PREFIX}.after_update.trajectories"
    if settings.mini_batch.grad_norm is not None:
        norm = f"{PREFIX}.mini_batch.grad_norm"
        with giving_way(f"{norm}=null"):
            _check_engine(run.config, norm, (f"{norm}=null",), "use a rule on actor/grad_norm")
    if settings.after_update.trajectories:
        with giving_way(f"{again}=0"):
            _check_engine(run.config, again, (f"{again}=0",))
    for rule in run.stability.rules:
        where = f"{PREFIX}.rules.{rule.name}"
        with giving_way(f"{where}.action=warn"):
            if rule.action == "rollback":
                _check_rollback(run.config, f"{where}: action=rollback")
            if rule.action == "undo":
                instead = "set action to rollback, skip or lower_lr"
                _check_engine(run.config, f"{where}: action=undo", otherwise=instead)
        if rule.signal.startswith("actor/after_update/") and not settings.after_update.trajectories:
            raise ConfigError(
                f"{where}: {rule.signal} needs trajectories that are scored again",
                fix=(f"{again}=16",),
                gives_way=(f"{where}=null",),
            )


def _check_engine(config: DictConfig, asked: str, fix: tuple[str, ...] = (), otherwise: str = "") -> None:
    """Refuses engines other than FSDP2, VeOmni without expert parallelism, and megatron-core's own optimizers, for
    settings that read the engine itself."""
    strategy, known = strategy_of(config), f"{', '.join(KNOWN[:-1])} and {KNOWN[-1]}"
    sharded, experts = f"{ACTOR}.megatron.use_megatron_fsdp", f"{ACTOR}.veomni.expert_parallel_size"
    if strategy not in KNOWN:
        found = f"this run has {strategy}"
    elif strategy == "megatron" and OmegaConf.select(config, sharded):
        found, fix = f"this run has {sharded}=true", (f"{sharded}=false",)
    elif strategy == "veomni" and (size := OmegaConf.select(config, experts)) > 1:
        found, fix = f"this run has {experts}={size}", (f"{experts}=1",)
    else:
        return
    raise ConfigError(f"{asked} is for {ACTOR}.strategy={known}, and {found}", fix=fix, otherwise=otherwise)


def _check_rollback(config: DictConfig, asked: str) -> None:
    """Checks that there will be a complete checkpoint to roll back to, before the last one, which is not proven yet."""
    trainer, checkpoint = config.trainer, f"{ACTOR}.checkpoint"
    if trainer.save_freq < 1:
        raise ConfigError(f"{asked} has no checkpoint to go back to; set trainer.save_freq")
    needs_earlier = f"{asked} needs the checkpoint before the last"
    for kept in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        if trainer.get(kept) == 1:
            raise ConfigError(needs_earlier, fix=(f"trainer.{kept}=2",), otherwise="more")
    if trainer.get("remove_previous_ckpt_in_save"):
        raise ConfigError(needs_earlier, fix=("trainer.remove_previous_ckpt_in_save=false",))
    loaded = OmegaConf.select(config, f"{checkpoint}.load_contents") or []
    if missing := {"model", "optimizer"} - set(loaded):
        raise ConfigError(
            f"{asked} would not load {' and '.join(sorted(missing))}; add them to "
            f"{checkpoint}.save_contents and load_contents"
        )
    if OmegaConf.select(config, f"{checkpoint}.async_save"):
        off = f"{checkpoint}.async_save=false"
        raise ConfigError(f"{asked} cannot tell when a checkpoint is complete", fix=(off,))


def loss_settings(run: RunFeatures) -> dict[str, Any]:
    return {
        "mini_batch": asdict(run.stability.guard.mini_batch),
        "undo": _undoes(run.stability.rules),
        "after_update": run.stability.guard.after_update.trajectories,
    }


def _undoes(rules: Iterable[Rule]) -> bool:
    return any(rule.action == "undo" for rule in rules)


def lines(run: RunFeatures) -> Iterator[TableLine]:
    rules, settings = run.stability.rules, run.stability.guard
    judged, in_gate = frozenset({Part.MEASURE, Part.GUARD}), frozenset({Part.MEASURE, Part.LOSS})
    if settings.mini_batch.active:
        limits = {name: limit for name, limit in vars(settings.mini_batch).items() if limit is not None}
        yield TableLine(
            *("mini-batch gate", described("refuse past", limits), AT_STEP, in_gate | {Part.LOG_PROBS}),
            in_loss=lambda found: bool(found["mini_batch"]),
            off=tuple(f"{PREFIX}.mini_batch.{name}=null" for name in limits),
        )
    for rule in rules:
        if rule.name == BATCH_SKIP:
            at = AT_STEP if bypasses(run.config) else "{trainer}._update_actor, _update_critic"
            yield TableLine("batch skip", f"{rule.signal} > {rule.bound:g}", at, judged)
        else:
            parts = judged | {Part.LOSS} if rule.action in IN_GATE else judged
            said, off = f"{rule.name}: {rule.action} at {_bound(rule)}", (f"{PREFIX}.rules.{rule.name}.action=warn",)
            yield TableLine("guard rule", said, AFTER_RULE[rule.action], parts, off=off)
    if _undoes(rules):
        yield TableLine(
            *("undo", "weights and optimizer are kept", "before optimizer_step, {loss}", judged | in_gate),
            in_loss=lambda found: found["undo"],
        )
    if again := settings.after_update.trajectories:
        yield TableLine(
            *("after the update", f"{again} trajectories scored again", "{loss}", judged | in_gate),
            in_loss=lambda found: bool(found["after_update"]),
            off=(f"{PREFIX}.after_update.trajectories=0",),
        )


def _bound(rule: Rule) -> str:
    sign = ">" if rule.side == "above" else "<"
    unit = "" if rule.zscore_window is None else f" sd of {rule.zscore_window}"
    unit = unit if rule.baseline is None else f" x its first {rule.baseline}"
    return f"{rule.signal} {sign} {rule.bound:g}{unit}"


def level_lines(run: RunFeatures) -> Iterator[TableLine]:
    """Yields the warning above a normal level of k3. It switches nothing on: it judges if the gap is measured."""
    if run.uses(Part.MEASURE):
        for rule in levels.level_rules(run.stability.guard.level):
            yield TableLine("normal level", _bound(rule), AFTER_RULE[rule.action])


def set_level(run: RunFeatures) -> None:
    """Sets the level that is published for the run's model and format; without one, the guard finds the run's own."""
    if run.stability.guard.level is None and (level := published_level(run.config)) is not None:
        OmegaConf.update(run.config, levels.SETTING, level.k3, force_add=True)


def published_level(config: DictConfig) -> Level | None:
    """Returns the level that is published for a run's model, if the model's config.json is on this machine."""
    return published(model_json(config), rollout_format(config))


SKIPPED_BY = Needs(
    ("batch_skip.metric",),
    met=lambda run: run.stability.batch_skip.threshold is not None,
    why="no batch is skipped by it",
    switch="stability.batch_skip.threshold=0.1",
)
JUDGED = needs_measuring("guard.stop_after", *(f"guard.boundary.{one.name}" for one in fields(Boundary)))
GUARD = Feature(lines, check, loss_settings=loss_settings, needs=(SKIPPED_BY, JUDGED))
LEVEL = Feature(level_lines, apply=set_level, needs=(needs_measuring("guard.level"),), depends=True)
