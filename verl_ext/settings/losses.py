"""The settings of a policy loss, flat in verl's `actor.policy_loss`: `loss_mode`, `base`, and beside them its own.

Nothing of verl is imported: a launch and the doctor check them without it. Written for verl 0.9.1.
"""

from collections.abc import Collection, Mapping
from typing import Any

import verl_ext.core.losses  # noqa: F401 (to register them)
from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import Chosen, choose, defaults
from verl_ext.core.losses import LOSSES, Loss

LOSS = "actor_rollout_ref.actor.policy_loss"
VERLS_TARGET = "verl.workers.config.PolicyLossConfig"
VERLS_SETTINGS = (
    *("_target_", "loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"),
    *("dro_beta", "rollout_correction"),
)
RATIO_BASES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov")  # l_old enters by the ratio alone
BASES = (*RATIO_BASES, "dppo_kl", "dppo_tv", "dro", "geo_mean_weighted", "gpg", "kl_cov")

# verl calls it in every process that builds its ActorConfig.
TARGET = "verl_ext.workers.loss_config.build_loss_config"


def chosen_loss(policy_loss: Mapping[str, Any]) -> Chosen[Loss]:
    """The loss of ours that `loss_mode` names, with its validated settings.

    Raises:
        ConfigError: a setting is unknown, missing or refused, or the loss cannot build upon `base`.
    """
    method, base = LOSSES[policy_loss["loss_mode"]], base_of(policy_loss)
    if method.rescales and base not in RATIO_BASES:
        raise ConfigError(f"{LOSS}.base={base} has no ratio to rescale; choose one of: {RATIO_BASES}")
    own = {name: value for name, value in policy_loss.items() if name not in (*VERLS_SETTINGS, "base")}
    return choose(method, own, LOSS)


def reads_k(loss_mode: str) -> bool:
    """Whether the policy loss makes the tokens' weights itself, of the mismatch ratio k, as icepop does."""
    return loss_mode in LOSSES and "k" in LOSSES[loss_mode].reads


def own_settings() -> list[str]:
    """The names of all settings that losses have of their own."""
    return [name for method in LOSSES.values() for name in defaults(method.settings)]


def base_of(policy_loss: Mapping[str, Any]) -> str:
    return policy_loss.get("base", "vanilla")


def require_base(base: str, known: Collection[str] = BASES) -> None:
    if base not in known:
        raise ConfigError(f"{LOSS}.base={base} cannot be built upon; choose one of: {sorted(known)}")


def loss_of_settings(policy_loss: Mapping[str, Any]) -> str | None:
    """The loss whose settings the node holds, which another `loss_mode` would override; None without one."""
    own = {name: set(defaults(method.settings)) for name, method in LOSSES.items()}
    return next((name for name, settings in own.items() if settings and settings <= set(policy_loss)), None)
