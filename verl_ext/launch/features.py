"""What of the plugin a run uses, told from its config alone.

The start-up table, `verl-ext doctor`, `verl-ext plan` and the hooks themselves are made of this list; at the start of a
run, `verl_ext.trainer.startup` proves each feature on the running engines and says where it found it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.methods import defaults, described
from verl_ext.guard.rules import Rule
from verl_ext.launch.bypass import bypasses
from verl_ext.launch.head import head_k, truncates
from verl_ext.launch.routing_checks import compares_routing, replay_mode, replays_here
from verl_ext.settings.config import UNBIASED, StabilityConfig
from verl_ext.settings.estimators import estimator_of
from verl_ext.settings.losses import LOSS, LOSSES, base_of, reads_k
from verl_ext.settings.stability import BATCH_SKIP

# The parts of the plugin that features use.
LOG_PROBS = "log-probs"  # the rollout's, in every batch
MEASURE = "measure"  # the trainer compares the engines before each update
WEIGHTS = "weights"  # of tokens travel to the workers
IN_LOSS = "loss"  # the workers run our loss around verl's
GUARD = "guard"
VERSIONS = "versions"  # the workers keep weights of earlier steps
ROUTERS = "routers"  # of the training engine are hooked
HEAD = "head"  # the rollout returns the most likely tokens of each place, and the workers read them

IN_THE_STEP = "PPOTrainer._compute_advantage"
MASKS = "response_mask and loss_mask"
CANARY = "sync canary"
IN_WORKERS = "worker_loss on every training rank"
AT_ROUTERS = "routers of the training engine"
REPLAYS = {"R2": "R2: update_actor as compute_log_prob", "R3": "R3: both as the rollout"}
AFTER_RULE = {
    "warn": "log and event log",
    "tighten": "the band of icepop",
    "lower_lr": f"optimizer_step, {IN_WORKERS}",
    "skip": "in place of the update",
    "undo": "end of the step",
    "rollback": "end of the step",
    "stop": "before the next step",
}
IN_GATE = ("lower_lr", "undo")  # actions that the workers carry out, around the optimizer's step


@dataclass(frozen=True)
class Feature:
    """A line of the start-up table.

    Attributes:
        name: what kind of feature.
        setting: what it is set to.
        where: the place where it acts.
        parts: of the plugin, those it uses.
    """

    name: str
    setting: str
    where: str
    parts: frozenset[str] = frozenset()


def features(config: DictConfig, stability: StabilityConfig) -> tuple[Feature, ...]:
    """Every feature that a run's config turns on, in the order of the table; () where the run is verl's own."""
    found = [
        *_of_the_trainer(config, stability),
        *_of_the_loss(config, stability),
        *_of_the_guard(config, stability),
        *_of_the_routing(config, stability),
    ]
    if (canary := stability.sync_canary).trajectories:
        often = "each sync" if canary.every == 1 else f"every {canary.every} syncs"
        setting = f"{canary.trajectories} trajectories, {often}"
        found.append(Feature(CANARY, setting, "PPOTrainer.on_step_end", frozenset({LOG_PROBS, MEASURE})))
    if stability.cascade_attention != "default":
        found.append(Feature("cascade attention", stability.cascade_attention, "vLLM's workers"))
    if (fake := stability.fake_quantization).active:
        found.append(Feature("fake quantization", str(fake), "vLLM's workers"))
    if stability.metrics or uses(found, MEASURE):
        parts, where = frozenset({LOG_PROBS, MEASURE}), IN_THE_STEP
        if bypasses(config):
            parts, where = parts | {IN_LOSS}, f"first mini-batch, {IN_WORKERS}"
        found.insert(0, Feature("mismatch metrics", "vllm_kl/*", where, parts))
    if k := head_k(config, stability, compares=uses(found, LOG_PROBS)):
        over = "; l_old and l_theta over what is kept" if truncates(config) else ""
        parts = frozenset({LOG_PROBS, MEASURE, IN_LOSS, HEAD})
        found.append(Feature("sampler's head", f"{k} tokens{over}", IN_WORKERS, parts))
    return tuple(found)


def uses(found: Iterable[Feature], part: str) -> bool:
    """Whether any feature uses this part of the plugin."""
    return any(part in feature.parts for feature in found)


def loss_mode(config: DictConfig) -> str:
    return OmegaConf.select(config, f"{LOSS}.loss_mode") or "vanilla"


def loss_reads_k(config: DictConfig) -> bool:
    return reads_k(loss_mode(config))


def uses_unbiased_kl(config: DictConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return bool(actor.get("use_kl_loss")) and actor.get("kl_loss_type") == UNBIASED


def _of_the_trainer(config: DictConfig, stability: StabilityConfig) -> Iterator[Feature]:
    # All of these have the workers run our loss: filters and denominator=kept can leave a mini-batch without a token,
    # for which verl's own divides 0 by 0, and verl's geo_mean cannot take a weight per token.
    parts = frozenset({MEASURE, IN_LOSS})
    for chosen in stability.before_update:
        where = IN_WORKERS if bypasses(config) else "weights in rollout_is_weights"
        yield Feature("correction", str(chosen), where, parts | {WEIGHTS})
    if stability.denominator == "kept":
        yield Feature("denominator", "kept tokens", MASKS, parts)
    for one in stability.filters:
        yield Feature("batch filter", str(one), MASKS, parts)
    if estimator := estimator_of(config):
        yield Feature("advantages", str(estimator), IN_THE_STEP)
    if stability.rescoring.every:
        where = "PPOTrainer._compute_old_log_prob"
        yield Feature("rescoring", str(stability.rescoring), where, frozenset({MEASURE, VERSIONS}))
    if (dump := stability.trajectories).per_step:
        often = "a step" if dump.every == 1 else f"every {dump.every} steps"
        yield Feature("trajectories", f"{dump.per_step} {often}", "*.trajectories.jsonl", frozenset({MEASURE}))


def _of_the_loss(config: DictConfig, stability: StabilityConfig) -> Iterator[Feature]:
    parts = frozenset({LOG_PROBS, IN_LOSS})
    if (name := loss_mode(config)) in LOSSES:
        node, method = OmegaConf.select(config, LOSS), LOSSES[name]
        settings = {key: node.get(key, usual) for key, usual in defaults(method.settings).items()}
        settings = {"base": base_of(node), **settings}
        measured = frozenset({MEASURE}) if loss_reads_k(config) else frozenset()
        yield Feature("policy loss", described(name, settings), IN_WORKERS, parts | measured)
        if "router_deviation" in method.reads:
            yield Feature("router shift", "compute_log_prob, update_actor", AT_ROUTERS, parts)
    for chosen in stability.in_update:
        yield Feature("correction", str(chosen), IN_WORKERS, parts | {MEASURE})
    if stability.score_centering:
        where = ", ".join(chosen.name for chosen in stability.before_update if not chosen.method.per_sequence)
        yield Feature(
            "score centering", f"weights of {where}" if where else "no weights", IN_WORKERS, parts | {MEASURE}
        )
    if uses_unbiased_kl(config):
        yield Feature("KL to the reference", f"{UNBIASED}, over l_{stability.kl_denominator}", IN_WORKERS, parts)
    if stability.guard.mini_batch.active:
        limits = {name: limit for name, limit in vars(stability.guard.mini_batch).items() if limit is not None}
        where = f"optimizer_step, {IN_WORKERS}"
        yield Feature("mini-batch gate", described("refuse past", limits), where, parts | {MEASURE})


def _of_the_guard(config: DictConfig, stability: StabilityConfig) -> Iterator[Feature]:
    updates = f"optimizer_step, {IN_WORKERS}" if bypasses(config) else "PPOTrainer._update_actor, _update_critic"
    parts = frozenset({MEASURE, GUARD})
    for rule in stability.rules:
        if rule.name == BATCH_SKIP:
            skip = f"{rule.signal} > {rule.bound:g}"
            yield Feature("batch skip", skip, updates, parts)
        else:
            hooked = frozenset({IN_LOSS}) if rule.action in IN_GATE else frozenset()
            yield Feature("guard rule", f"{rule.name}: {_bound(rule)}", AFTER_RULE[rule.action], parts | hooked)
    if any(rule.action == "undo" for rule in stability.rules):
        where = f"before optimizer_step, {IN_WORKERS}"
        yield Feature("undo", "weights and optimizer are kept", where, parts | {IN_LOSS})
    if again := stability.guard.after_update.trajectories:
        yield Feature("after the update", f"{again} trajectories scored again", IN_WORKERS, parts | {IN_LOSS})


def _bound(rule: Rule) -> str:
    sign = ">" if rule.side == "above" else "<"
    unit = "" if rule.zscore_window is None else f" sd of {rule.zscore_window}"
    return f"{rule.action} at {rule.signal} {sign} {rule.bound:g}{unit}"


def _of_the_routing(config: DictConfig, stability: StabilityConfig) -> Iterator[Feature]:
    parts = frozenset({ROUTERS})
    if compares_routing(config, stability):
        share = stability.router_agreement_share
        setting = described("compute_log_prob", {"share": share} if share < 1 else {})
        yield Feature("router agreement", setting, AT_ROUTERS, parts)
    if replays_here(config):
        mode = replay_mode(config)
        says = "R3: update_actor as the rollout" if bypasses(config) else REPLAYS.get(mode, mode)
        yield Feature("routing replay", says, AT_ROUTERS, parts)
