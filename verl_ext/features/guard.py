"""The guard: its rules on logged signals, the mini-batch gate and the pass after the update (docs/guard.md).

stability:
  guard:
    rules:
      probability: {signal: vllm_kl/prob_diff_mean, above: 0.05, recover: 0.04, patience: 3, action: warn}
      collapse: {signal: guard/steps_to_boundary, below: 20, action: tighten}
      reward: {signal: critic/score/mean, below: 8, zscore_window: 64, patience: 3, action: rollback}
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError, with_fallback
from verl_ext.base.methods import described
from verl_ext.diagnosis.levels import Level, published
from verl_ext.features.feature import Demand, Feature, Need, Precondition, RunFeatures, TableLine
from verl_ext.features.mismatch import while_measured
from verl_ext.features.settings import BATCH_SKIP, GUARD_NODE
from verl_ext.features.verl_config import ACTOR, bypasses, model_json, rollout_format, strategy_of
from verl_ext.guard import levels
from verl_ext.guard.rules import Rule
from verl_ext.guard.state import Boundary

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
KNOWN = ("fsdp2", "megatron", "veomni")  # actor.strategy whose gradients and optimizers `workers` can read
IN_GATE = ("lower_lr", "undo")  # actions that the workers carry out, around the optimizer's step


def needs(run: RunFeatures) -> Iterator[Demand]:
    """Yields the demands of the gate and the rules. A normal level has none: it is judged if the gap is measured."""
    settings = run.stability.guard
    judged = frozenset({Need.MEASURED_BATCHES, Need.RULES})
    if settings.mini_batch.active:
        yield Demand(
            f"{GUARD_NODE}.mini_batch",
            frozenset({Need.MEASURED_BATCHES, Need.OUR_LOSS, Need.ROLLOUT_LOG_PROBS}),
            off=tuple(f"{GUARD_NODE}.mini_batch.{name}=null" for name in settings.mini_batch.limits),
        )
    for rule in run.stability.rules:
        if rule.name == BATCH_SKIP:
            yield Demand("stability.batch_skip", judged)
            continue
        where = f"{GUARD_NODE}.rules.{rule.name}"
        needed = judged | {Need.OUR_LOSS} if rule.action in IN_GATE else judged
        yield Demand(f"{where}: action={rule.action}", needed, off=(f"{where}.action=warn",))
    if settings.after_update.trajectories:
        again = f"{GUARD_NODE}.after_update.trajectories"
        yield Demand(again, judged | {Need.OUR_LOSS}, off=(f"{again}=0",))


def check(run: RunFeatures) -> None:
    """Checks that verl's settings allow the guard's actions."""
    settings, again = run.stability.guard, f"{GUARD_NODE}.after_update.trajectories"
    if settings.mini_batch.grad_norm is not None:
        norm = f"{GUARD_NODE}.mini_batch.grad_norm"
        with with_fallback(f"{norm}=null"):
            _check_engine(run.config, norm, (f"{norm}=null",), "use a rule on actor/grad_norm")
    if settings.after_update.trajectories:
        with with_fallback(f"{again}=0"):
            _check_engine(run.config, again, (f"{again}=0",))
    for rule in run.stability.rules:
        where = f"{GUARD_NODE}.rules.{rule.name}"
        with with_fallback(f"{where}.action=warn"):
            if rule.action == "rollback":
                _check_rollback(run.config, f"{where}: action=rollback")
            if rule.action == "undo":
                instead = "set action to rollback, skip or lower_lr"
                _check_engine(run.config, f"{where}: action=undo", otherwise=instead)
        if rule.signal.startswith("actor/after_update/") and not settings.after_update.trajectories:
            raise ConfigError(
                f"{where}: {rule.signal} needs trajectories that are scored again after the update",
                fix=(f"{again}=16",),
                fallback=(f"{where}=null",),
            )


def _check_engine(config: DictConfig, asked: str, fix: tuple[str, ...] = (), otherwise: str = "") -> None:
    """Refuses settings that read the engine itself, except on FSDP2, VeOmni without expert parallelism, and
    megatron-core's own optimizers."""
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
    """Checks that a rollback will have a complete checkpoint to load, one before the last, which is not proven yet."""
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
    if settings.mini_batch.active:
        yield TableLine(
            "mini-batch gate",
            described("refuse past", settings.mini_batch.limits),
            AT_STEP,
            in_loss=lambda found: bool(found["mini_batch"]),
        )
    for rule in rules:
        if rule.name == BATCH_SKIP:
            at = AT_STEP if bypasses(run.config) else "{trainer}._update_actor, _update_critic"
            yield TableLine("batch skip", f"{rule.signal} > {rule.bound:g}", at)
        else:
            yield TableLine("guard rule", f"{rule.name}: {rule.action} at {_bound(rule)}", AFTER_RULE[rule.action])
    if _undoes(rules):
        yield TableLine(
            "undo",
            "weights and optimizer are kept",
            "before optimizer_step, {loss}",
            in_loss=lambda found: found["undo"],
        )
    if again := settings.after_update.trajectories:
        yield TableLine(
            "after the update",
            f"{again} trajectories scored again",
            "{loss}",
            in_loss=lambda found: bool(found["after_update"]),
        )
    if Need.MEASURED_BATCHES in run.needs:
        for rule in levels.level_rules(settings.level):
            yield TableLine("normal level", _bound(rule), AFTER_RULE[rule.action])


def _bound(rule: Rule) -> str:
    sign = ">" if rule.side == "above" else "<"
    unit = "" if rule.zscore_window is None else f" sd of {rule.zscore_window}"
    unit = unit if rule.baseline is None else f" x its first {rule.baseline}"
    return f"{rule.signal} {sign} {rule.bound:g}{unit}"


def set_level(run: RunFeatures) -> None:
    """Sets the published level of the run's model and format; if there is none, the guard finds the run's own."""
    if run.stability.guard.level is None and (level := published_level(run.config)) is not None:
        OmegaConf.update(run.config, levels.SETTING, level.k3, force_add=True)


def published_level(config: DictConfig) -> Level | None:
    """Returns the published level of a run's model and format; None without the model's config.json on this machine."""
    return published(model_json(config), rollout_format(config))


SKIPPED_BY = Precondition(
    ("batch_skip.metric",),
    met=lambda run: run.stability.batch_skip.threshold is not None,
    why="no batch is skipped by it",
    switch="stability.batch_skip.threshold=0.1",
)
JUDGED = while_measured("guard.stop_after", "guard.level", *(f"guard.boundary.{one.name}" for one in fields(Boundary)))
GUARD = Feature(
    needs, check, apply=set_level, loss_settings=loss_settings, lines=lines, preconditions=(SKIPPED_BY, JUDGED)
)
