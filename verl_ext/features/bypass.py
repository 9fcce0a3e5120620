"""Rules on settings that have no meaning in verl's bypass mode: they need compute_log_prob, or would count r twice.

Sources: verl 0.9.1, `compute_policy_loss_bypass_mode` of core_algos.py, allows masks with both of its losses, but
weights only with REINFORCE, not with a clipped ratio. rllm PR 741 and prime-rl PR 3526 apply IcePop's band to
exp(l_theta - l_infer) and have that ratio once. prime-rl PR 3283 applies KPop's to the same two policies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.features.feature import Feature, Idle, RunFeatures
from verl_ext.features.losses import LOSS, LOSSES, WITHOUT_RATIO, loss_has_ratio, loss_mode
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.verl_config import (
    ACTOR,
    BYPASS,
    REPLAY,
    bypasses,
    compares_in_update,
    replay_mode,
    replay_setting,
    strategy_of,
)
from verl_ext.guard.rules import NO_SKIP
from verl_ext.routing.engines import ENGINES

WITHOUT_BYPASS = f"{BYPASS}=False"
ENTROPY = f"{ACTOR}.calculate_entropy"


@dataclass(frozen=True)
class Mode:
    """A mode in which compute_log_prob does not run.

    Attributes:
        where: the mode, as an error names it.
        off: the override that ends it.
    """

    where: str
    off: str

    def forbidden(
        self, setting: str, why: str, *fix: str, otherwise: str = "", leave_out: tuple[str, ...] = ()
    ) -> Problem:
        """Returns the problem of a setting, with a fix that keeps corrections and loss: by default, the fix ends the
        mode."""
        otherwise = otherwise or (f"set {self.off}" if fix else "")
        found = f"{setting} {why} {self.where}"
        return Problem(found, fix=fix or (self.off,), otherwise=otherwise, leave_out=leave_out or fix)


IN_BYPASS = Mode(f"in bypass mode ({BYPASS}=True)", WITHOUT_BYPASS)


def problems(run: RunFeatures) -> Iterator[Problem]:
    config, stability = run.config, run.stability
    if not bypasses(config):
        return
    yield from missing_pass_problems(run, IN_BYPASS)
    if stability.kl_denominator == "old":
        yield IN_BYPASS.forbidden(
            "stability.kl_denominator=old", "names a policy that does not exist", "stability.kl_denominator=infer"
        )
    if (limit := stability.guard.mini_batch.policy_kl) is not None:
        yield IN_BYPASS.forbidden(
            f"stability.guard.mini_batch.policy_kl={limit:g}",
            "is the same as vllm_kl",
            "stability.guard.mini_batch.policy_kl=null",
            f"stability.guard.mini_batch.vllm_kl={min(limit, stability.guard.mini_batch.vllm_kl or limit):g}",
        )
    yield from _loss_problems(config)
    yield from _ratio_problems(config, stability)


def missing_pass_problems(run: RunFeatures, mode: Mode) -> Iterator[Problem]:
    """Yields a problem for each setting that needs compute_log_prob, which does not run in this mode."""
    config, stability = run.config, run.stability
    if replay_mode(config) == "R2":
        setting = replay_setting(config)
        yield mode.forbidden(
            f"{setting}=R2",
            "replays what compute_log_prob recorded, which does not run",
            otherwise=f"replay the rollout's experts, {setting}=R3",
            leave_out=(f"{REPLAY}=disabled",) if setting == REPLAY else (),
        )
    if stability.router_agreement and strategy_of(config) in ENGINES and not compares_in_update(config):
        without = "stability.router_agreement=false"
        yield mode.forbidden(
            "stability.router_agreement=true",
            f"compares the experts of compute_log_prob on {ACTOR}.strategy={strategy_of(config)} with pipeline stages "
            "or dynamic context parallelism, and it does not run",
            *(() if _needs_agreement(config, stability) else (without,)),
        )
    if stability.denominator == "kept":
        yield mode.forbidden(
            "stability.denominator=kept",
            "needs the number of kept tokens before the update, which computes it",
            otherwise="divide by all tokens, stability.denominator=full",
            leave_out=("stability.denominator=full",),
        )
    if stability.trajectories.per_step:
        yield mode.forbidden(
            "stability.trajectories.per_step",
            "would write the training engine's log-probs, which stay in the workers",
            "stability.trajectories=null",
        )
    for chosen in stability.filters:
        if chosen.method.needs_l_old or chosen.method.needs_agreement:
            same = ": stability.correction=opsm does the same in the update" if chosen.method.needs_l_old else ""
            yield mode.forbidden(
                f"stability.filters.{chosen.name}",
                "filters by what the training engine computes before that is known",
                otherwise=f"leave it out{same}",
                leave_out=stability.without_filter(chosen.name),
            )
    for rule in stability.rules:
        where, late = f"stability.guard.rules.{rule.name}", rule.signal.startswith("guard/")
        if rule.action == "skip" and (late or rule.signal == "actor/entropy"):
            yield mode.forbidden(
                f"{where}: action=skip",
                f"comes too late: {rule.signal} is known when the update is made",
                otherwise=NO_SKIP,
                leave_out=(f"{where}.action=warn",),
            )


def _needs_agreement(config: DictConfig, stability: StabilityConfig) -> bool:
    """Returns True if the run would be refused without the routers' agreement."""
    if (mode := loss_mode(config)) in LOSSES and "router_agreement" in LOSSES[mode].reads:
        return True
    return [*replace(stability, router_agreement=False).problems()] != [*stability.problems()]


def _loss_problems(config: DictConfig) -> Iterator[Problem]:
    if (name := loss_mode(config)) not in LOSSES:
        return
    asked, method = f"{LOSS}.loss_mode={name}", LOSSES[name]
    if "k" in method.reads:
        yield IN_BYPASS.forbidden(
            asked,
            "reads a ratio that is known only in the update",
            otherwise=f"start from stability={name}, which masks there" if name in CORRECTIONS else "",
        )
    elif method.needs_l_old:
        yield IN_BYPASS.forbidden(
            asked, "compares with the training engine's log-probs before the update, which are the rollout's"
        )


def _ratio_problems(config: DictConfig, stability: StabilityConfig) -> Iterator[Problem]:
    """Yields a problem for a correction that only weighs, if the loss has r already: it may only drop there."""
    if not loss_has_ratio(config):
        return
    for chosen in stability.before_update:
        method = chosen.method
        if not method.weighs_by_ratio(chosen.settings) or method.drops:
            continue
        as_mask = f"stability.{chosen.name}.{method.mask_override}" if method.mask_override else ""
        yield IN_BYPASS.forbidden(
            f"stability.correction={chosen.name}",
            f"weighs a token by a ratio that {LOSS}.loss_mode={loss_mode(config)} already has, so it would count twice",
            *(stability.without(chosen.name) if method.is_ratio(chosen.settings) else ()),
            otherwise=f"{as_mask and f'{as_mask}, or '}{LOSS}.loss_mode={WITHOUT_RATIO[0]}, which has none",
            leave_out=(as_mask,) if as_mask else stability.without(chosen.name),
        )


def idle(run: RunFeatures) -> Iterator[Idle]:
    """Yields what is known only with compute_log_prob, which does not run."""
    if not bypasses(run.config):
        return
    yield from idle_without_pass(f"{BYPASS}=True leaves compute_log_prob out", WITHOUT_BYPASS)
    if not OmegaConf.select(run.config, ENTROPY):
        why = f"with {BYPASS}=True, the entropy is computed in the update, and only if {ENTROPY}=true"
        yield Idle("actor/entropy", why, (f"{ENTROPY}=true",))


def idle_without_pass(why: str, switch: str) -> Iterator[Idle]:
    for names in ("vllm_kl/head*", "actor/gate/policy_kl"):
        yield Idle(names, why, (switch,))


BYPASS_MODE = Feature(problems=problems, idle=idle)
