"""Refuses settings that have no meaning in verl's bypass mode: they need compute_log_prob, or would count r twice.

Sources: verl 0.9.1, `compute_policy_loss_bypass_mode` of core_algos.py, allows masks with both of its losses, but
weights only with REINFORCE, not with a clipped ratio. rllm PR 741 and prime-rl PR 3526 apply IcePop's band to
exp(l_theta - l_infer) and have that ratio once. prime-rl PR 3283 applies KPop's to the same two policies.
"""

from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.features.feature import Feature, RunFeatures
from verl_ext.features.losses import LOSS, LOSSES, WITHOUT_RATIO, loss_has_ratio, loss_mode
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.verl_config import ACTOR, BYPASS, REPLAY, bypasses, replay_mode, replay_setting

WITHOUT_BYPASS = f"{BYPASS}=False"
ENTROPY = f"{ACTOR}.calculate_entropy"


def check(run: RunFeatures) -> None:
    config, stability = run.config, run.stability
    if not bypasses(config):
        return
    _check_what_compute_log_prob_gives(config, stability)
    _check_loss(config)
    _check_ratio(config, stability)
    _check_rules(config, stability)


def _forbid(setting: str, why: str, *fix: str, otherwise: str = "", fallback: tuple[str, ...] = ()) -> None:
    """Refuses a setting, with a fix that keeps corrections and loss: by default, the fix turns bypass mode off."""
    otherwise = otherwise or (f"set {WITHOUT_BYPASS}" if fix else "")
    said = f"{setting} {why} in bypass mode ({BYPASS}=True)"
    raise ConfigError(said, fix=fix or (WITHOUT_BYPASS,), otherwise=otherwise, fallback=fallback or fix)


def _check_what_compute_log_prob_gives(config: DictConfig, stability: StabilityConfig) -> None:
    if replay_mode(config) == "R2":
        setting = replay_setting(config)
        _forbid(
            f"{setting}=R2",
            "replays what compute_log_prob recorded, which does not run",
            otherwise=f"replay the rollout's experts, {setting}=R3",
            fallback=(f"{REPLAY}=disabled",) if setting == REPLAY else (),
        )
    if stability.router_agreement:
        without = "stability.router_agreement=false"
        _forbid(
            "stability.router_agreement=true",
            "compares the experts of compute_log_prob, which does not run",
            *(() if _needs_agreement(config, stability) else (without,)),
        )
    if stability.denominator == "kept":
        _forbid(
            "stability.denominator=kept",
            "needs the number of kept tokens before the update, which computes it",
            otherwise="divide by all tokens, stability.denominator=full",
            fallback=("stability.denominator=full",),
        )
    if stability.trajectories.per_step:
        _forbid(
            "stability.trajectories.per_step",
            "would write the training engine's log-probs, which stay in the workers",
            "stability.trajectories=null",
        )
    for chosen in stability.filters:
        if chosen.method.needs_l_old:
            _forbid(
                f"stability.filters.{chosen.name}",
                "filters by the training engine's log-probs before they are known",
                otherwise="leave it out: stability.correction=opsm does the same in the update",
                fallback=stability.without_filter(chosen.name),
            )
    if stability.kl_denominator == "old":
        _forbid("stability.kl_denominator=old", "names a policy that does not exist", "stability.kl_denominator=infer")
    if (limit := stability.guard.mini_batch.policy_kl) is not None:
        _forbid(
            f"stability.guard.mini_batch.policy_kl={limit:g}",
            "is the same as vllm_kl",
            "stability.guard.mini_batch.policy_kl=null",
            f"stability.guard.mini_batch.vllm_kl={min(limit, stability.guard.mini_batch.vllm_kl or limit):g}",
        )


def _needs_agreement(config: DictConfig, stability: StabilityConfig) -> bool:
    """Returns True if the run would be refused without the routers' agreement."""
    if (mode := loss_mode(config)) in LOSSES and "router_agreement" in LOSSES[mode].reads:
        return True
    try:
        replace(stability, router_agreement=False)
    except ConfigError:
        return True
    return False


def _check_loss(config: DictConfig) -> None:
    if (name := loss_mode(config)) not in LOSSES:
        return
    asked, method = f"{LOSS}.loss_mode={name}", LOSSES[name]
    if "k" in method.reads:
        _forbid(
            asked,
            "reads a ratio that is known only in the update",
            otherwise=f"start from stability={name}, which masks there" if name in CORRECTIONS else "",
        )
    if "router_deviation" in method.reads:
        _forbid(asked, "compares with the routers of compute_log_prob, which does not run")
    if method.needs_l_old:
        _forbid(asked, "compares with the training engine's log-probs before the update, which are the rollout's")


def _check_ratio(config: DictConfig, stability: StabilityConfig) -> None:
    """Refuses a correction that only weighs if the loss has r already: with such a loss, a correction can only drop."""
    if not loss_has_ratio(config):
        return
    for chosen in stability.before_update:
        method = chosen.method
        if not method.weighs_by_ratio(chosen.settings) or method.drops:
            continue
        mask = f"stability.{chosen.name}.{method.mask_override}, or " if method.mask_override else ""
        _forbid(
            f"stability.correction={chosen.name}",
            f"weighs a token by a ratio that {LOSS}.loss_mode={loss_mode(config)} already has, so it would count twice",
            *(stability.without(chosen.name) if method.is_ratio(chosen.settings) else ()),
            otherwise=f"{mask}{LOSS}.loss_mode={WITHOUT_RATIO[0]}, which has none",
            fallback=stability.without(chosen.name),
        )


def _check_rules(config: DictConfig, stability: StabilityConfig) -> None:
    for rule in stability.rules:
        where, late = f"stability.guard.rules.{rule.name}", rule.signal.startswith("guard/")
        if rule.signal == "actor/entropy" and not OmegaConf.select(config, ENTROPY):
            off = (f"{where}=null",)
            _forbid(f"{where}: actor/entropy", f"needs {ENTROPY}=true", f"{ENTROPY}=true", fallback=off)
        if "/advantage" in rule.signal:
            off, instead = (f"{where}=null",), "use vllm_kl/k3"
            _forbid(f"{where}: {rule.signal}", "is measured before the update", otherwise=instead, fallback=off)
        if rule.action == "skip" and (late or rule.signal == "actor/entropy"):
            _forbid(
                f"{where}: action=skip",
                f"comes too late: {rule.signal} is known when the update is made",
                otherwise="set action to warn, tighten, lower_lr, undo, rollback or stop",
                fallback=(f"{where}.action=warn",),
            )


BYPASS_MODE = Feature(check=check)
