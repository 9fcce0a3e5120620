"""The guard: its rules on logged signals, the mini-batch gate and the pass after the update (docs/guard.md).

stability:
  guard:
    rules:
      probability: {signal: vllm_kl/prob_diff_mean, above: 0.05, recover: 0.04, patience: 3, action: warn}
      collapse: {signal: guard/steps_to_boundary, below: 20, action: tighten}
      reward: {signal: critic/score/mean, below: 8, zscore_window: 64, patience: 3, action: rollback}
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.base.methods import described
from verl_ext.diagnosis.levels import Level, published
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.mismatch import idle_unmeasured
from verl_ext.features.settings import BATCH_SKIP, GUARD_NODE, BatchSkip, StabilityConfig
from verl_ext.features.verl_config import ACTOR, model_json, rollout_format, strategy_of
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


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that verl's settings allow the guard's actions."""
    settings, again = run.stability.guard, f"{GUARD_NODE}.after_update.trajectories"
    if settings.mini_batch.grad_norm is not None:
        norm = f"{GUARD_NODE}.mini_batch.grad_norm"
        yield from _engine_problems(run.config, norm, (f"{norm}=null",), "use a rule on actor/grad_norm")
    if settings.after_update.trajectories:
        yield from _engine_problems(run.config, again, (f"{again}=0",))
    for rule in run.stability.rules:
        where = f"{GUARD_NODE}.rules.{rule.name}"
        if rule.action == "rollback":
            missing = _rollback_problems(run.config, f"{where}: action=rollback")
            yield from (replace(problem, leave_out=(f"{where}.action=warn",)) for problem in missing)
        if rule.action == "undo":
            instead, warn = "set action to rollback, skip or lower_lr", (f"{where}.action=warn",)
            yield from _engine_problems(run.config, f"{where}: action=undo", otherwise=instead, leave_out=warn)


def signals(stability: StabilityConfig) -> Iterator[tuple[str, str, str]]:
    """Yields the setting of each signal, the signal, and the override that leaves it out."""
    for rule in stability.rules:
        where = f"{GUARD_NODE}.rules.{rule.name}"
        if rule.name == BATCH_SKIP:
            yield "stability.batch_skip.metric", rule.signal, f"stability.batch_skip.metric={BatchSkip().metric}"
        else:
            yield where, rule.signal, f"{where}=null"
    boundary = f"{GUARD_NODE}.boundary.signal"
    yield boundary, stability.guard.boundary.signal, f"{boundary}={Boundary().signal}"


def idle(run: RunFeatures) -> Iterator[Idle]:
    if run.stability.batch_skip.threshold is None:
        switch = ("stability.batch_skip.threshold=0.1",)
        yield Idle("", "no batch is skipped by it", switch, ("batch_skip.metric",))
    judged = ("guard.stop_after", "guard.level", *(f"guard.boundary.{one.name}" for one in fields(Boundary)))
    yield from idle_unmeasured(run, *judged)
    if not run.stability.guard.after_update.trajectories:
        switch = (f"{GUARD_NODE}.after_update.trajectories=16",)
        yield Idle("actor/after_update/*", "no trajectory is scored again after the update", switch)
    if not run.stability.bands:
        yield Idle("guard/mask_blind", "no correction has a fixed band of ratios", ("stability.correction=icepop",))
    gate, limits = f"{GUARD_NODE}.mini_batch", run.stability.guard.mini_batch
    if not limits.active:
        yield Idle("actor/gate/*_kl", f"{gate} has no limit")
    if limits.grad_norm is None:
        yield Idle("actor/gate/grad_norm", f"{gate}.grad_norm is not set")


def _engine_problems(
    config: DictConfig, asked: str, off: tuple[str, ...] = (), otherwise: str = "", leave_out: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Yields a problem for a setting that reads the engine itself, except on FSDP2, VeOmni without expert parallelism,
    and megatron-core's own optimizers."""
    strategy, known, fix = strategy_of(config), f"{', '.join(KNOWN[:-1])} and {KNOWN[-1]}", off
    sharded, experts = f"{ACTOR}.megatron.use_megatron_fsdp", f"{ACTOR}.veomni.expert_parallel_size"
    if strategy not in KNOWN:
        found = f"this run has {strategy}"
    elif strategy == "megatron" and OmegaConf.select(config, sharded):
        found, fix = f"this run has {sharded}=true", (f"{sharded}=false",)
    elif strategy == "veomni" and (size := OmegaConf.select(config, experts)) > 1:
        found, fix = f"this run has {experts}={size}", (f"{experts}=1",)
    else:
        return
    yield Problem(f"{asked} is for {ACTOR}.strategy={known}, and {found}", "", fix, otherwise, leave_out or off)


def _rollback_problems(config: DictConfig, asked: str) -> Iterator[Problem]:
    """Checks that a rollback will have a complete checkpoint to load, one before the last, which is not proven yet."""
    trainer, checkpoint = config.trainer, f"{ACTOR}.checkpoint"
    if trainer.save_freq < 1:
        yield Problem(f"{asked} has no checkpoint to go back to", otherwise="set trainer.save_freq")
    needs_earlier = f"{asked} needs the checkpoint before the last"
    for kept in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        if trainer.get(kept) == 1:
            yield Problem(needs_earlier, fix=(f"trainer.{kept}=2",), otherwise="more")
    if trainer.get("remove_previous_ckpt_in_save"):
        yield Problem(needs_earlier, fix=("trainer.remove_previous_ckpt_in_save=false",))
    loaded = OmegaConf.select(config, f"{checkpoint}.load_contents") or []
    if missing := {"model", "optimizer"} - set(loaded):
        yield Problem(
            f"{asked} would not load {' and '.join(sorted(missing))}",
            otherwise=f"add them to {checkpoint}.save_contents and load_contents",
        )
    if OmegaConf.select(config, f"{checkpoint}.async_save"):
        off = f"{checkpoint}.async_save=false"
        yield Problem(f"{asked} cannot tell when a checkpoint is complete", fix=(off,))


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
            at = AT_STEP if Need.MEASURED_IN_UPDATE in run.needs else "{trainer}._update_actor, _update_critic"
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


GUARD = Feature(
    needs,
    problems,
    apply=set_level,
    loss_settings=loss_settings,
    lines=lines,
    idle=idle,
)
