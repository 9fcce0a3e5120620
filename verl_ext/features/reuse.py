"""One forward pass less: l_old is l_theta of the update's own forward pass, and compute_log_prob does not run.

If a batch has one optimizer step, compute_log_prob has the weights of the update's forward pass. So its result is that
of the update, and r is 1. The workers then measure, weigh and judge the batch in the update, as in verl's bypass mode;
there l_old is l_infer instead.

Sources: NeMo-RL PR 3295, miles PR 2219 and SkyRL PR 1813 leave the pass out; verl issue 6280 asks for it.
"""

from collections.abc import Iterator

from omegaconf import OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.features.bypass import ENTROPY, Mode, idle_without_pass, missing_pass_problems
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.losses import foreign_loss
from verl_ext.features.verl_config import (
    ACTOR,
    BYPASS,
    CORRECTION,
    DROPOUTS,
    bypasses,
    needs_critic,
    trainer_mode,
    verls_corrections,
)

SETTING = "stability.reuse_log_probs"
OFF = f"{SETTING}=off"
REUSED = Mode(f"with {SETTING}=on", OFF)
READS_L_OLD = ("optimal_token_baseline", "tir_optimal_token_baseline")  # verl's estimators


def reuses(run: RunFeatures) -> bool:
    """Returns True if batches of one optimizer step have no compute_log_prob."""
    asked = run.stability.reuse_log_probs
    return asked == "on" or (asked == "auto" and next(obstacles(run), None) is None)


def measured_late(run: RunFeatures) -> bool:
    """Returns True if the training engine's log-probs are first known in the update."""
    return bypasses(run.config) or reuses(run)


def obstacles(run: RunFeatures) -> Iterator[Problem]:
    """Yields a problem for each setting with which the result would not be the same, or that needs l_old earlier."""
    config, stability = run.config, run.stability
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if bypasses(config):
        yield REUSED.forbidden(f"{BYPASS}=True", "has no pass to leave out")
    if why := foreign_loss(config):
        yield REUSED.forbidden("the workers", f"do not run the plugin's loss ({why}), which takes l_theta for l_old,")
    node = f"trainer.v1.{trainer_mode(config)}.parameter_sync_step"
    if (syncs := OmegaConf.select(config, node) or 1) > 1:
        yield REUSED.forbidden(f"{node}={syncs}", "has l_old of the weights before the first of these updates")
    elif config.data.train_batch_size != actor.ppo_mini_batch_size:
        yield REUSED.forbidden(
            f"data.train_batch_size={config.data.train_batch_size} with {ACTOR}.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}",
            "makes several optimizer steps of a batch, which need l_old of the first",
        )
    if actor.ppo_epochs != 1:
        yield REUSED.forbidden(f"{ACTOR}.ppo_epochs={actor.ppo_epochs}", "updates a batch several times")
    if needs_critic(config):
        yield REUSED.forbidden("a critic", "is updated before the batch is judged")
    if algorithm.use_kl_in_reward:
        yield REUSED.forbidden("algorithm.use_kl_in_reward=True", "needs l_old in the reward")
    if algorithm.adv_estimator in READS_L_OLD:
        yield REUSED.forbidden(f"algorithm.adv_estimator={algorithm.adv_estimator}", "needs l_old in the advantages")
    for setting, value in verls_corrections(config).items():
        yield REUSED.forbidden(f"{setting}={value}", "needs l_old before the update")
    for setting in DROPOUTS:
        if share := OmegaConf.select(config, setting):
            yield REUSED.forbidden(f"{setting}={share}", "drops a part of the model in the update only")
    if stability.rescoring.every:
        yield REUSED.forbidden(f"stability.rescoring.every={stability.rescoring.every}", "needs l_old of the batch")
    if again := stability.guard.after_update.trajectories:
        yield REUSED.forbidden(f"stability.guard.after_update.trajectories={again}", "compares with l_old of the batch")
    if k := stability.top_tokens.k:
        yield REUSED.forbidden(f"stability.top_tokens.k={k}", "compares top tokens in compute_log_prob")
    if stability.score_centering:
        yield REUSED.forbidden("stability.score_centering=true", "needs the tokens' weights before the update")
    yield from missing_pass_problems(run, REUSED)


def needs(run: RunFeatures) -> Iterator[Demand]:
    if reuses(run):
        yield Demand(SETTING, frozenset({Need.OUR_LOSS, Need.REUSED_LOG_PROBS}), off=(OFF,))


def problems(run: RunFeatures) -> Iterator[Problem]:
    if run.stability.reuse_log_probs == "on":
        yield from obstacles(run)


def apply(run: RunFeatures) -> None:
    """Has the update compute the entropy, which compute_log_prob would have logged, and verl's trainer compute no
    correction of its own, whose metrics need l_old."""
    if reuses(run):
        OmegaConf.update(run.config, ENTROPY, True)
        OmegaConf.update(run.config, CORRECTION, None)


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if reuses(run):
        yield TableLine("old log-probs", "of the update's own pass", "{loss}", in_loss=lambda found: found["reuses"])
    elif run.stability.reuse_log_probs == "auto" and not bypasses(run.config):
        why = next(obstacles(run)).found.removesuffix(f" {REUSED.where}")
        yield TableLine("old log-probs", "of compute_log_prob", why.replace("{", "{{").replace("}", "}}"))


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not reuses(run):
        return
    yield from idle_without_pass(f"{SETTING} leaves compute_log_prob out", OFF)
    for names in ("rollout_corr/*", "training/rollout_actor_probs_pearson_corr"):
        yield Idle(names, f"{SETTING} leaves out the pass that verl computes it from", (OFF,))


REUSE = Feature(
    needs, problems, apply, loss_settings=lambda run: {"reuses": True} if reuses(run) else {}, lines=lines, idle=idle
)
