"""Policy losses, registered under verl's `register_policy_loss` (the signature is verl's)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config.actor import PolicyLossConfig

from verl_ext.config import check_band
from verl_ext.core.corrections import icepop
from verl_ext.errors import ConfigError


@dataclass
class IcePopLossConfig(PolicyLossConfig):
    """Named by `actor_rollout_ref.actor.policy_loss._target_`; adds IcePop's bounds to verl's settings."""

    loss_mode: str = "icepop"
    alpha: float = 0.5
    beta: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.alpha, self.beta, "actor_rollout_ref.actor.policy_loss")


@register_policy_loss("icepop")
def icepop_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's clipped PPO loss, each token weighted by IcePop's M(k) ("Small Leak Can Sink a Great Ship").

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T], as verl passes them.
        config: the ActorConfig; `policy_loss` an IcePopLossConfig, else alpha 0.5 and beta 5 hold.
        rollout_is_weights: [B, T], the raw mismatch ratio k = exp(l_old - l_infer). The entry point
            `verl_ext.main_ppo` puts it there; plain verl does with
            `algorithm.rollout_correction.rollout_is=token` and a `rollout_is_threshold` far above beta
            (verl truncates the ratio at the threshold).

    Returns the loss and verl's own metrics, with actor/icepop/{dropped_low,dropped_high}, the fractions of
    this micro-batch's tokens below and above the band.

    Raises:
        ConfigError: `rollout_is_weights` is missing.
    """
    if rollout_is_weights is None:
        raise ConfigError(
            "policy_loss.loss_mode=icepop needs the mismatch ratio in rollout_is_weights: launch with "
            "verl_ext.main_ppo, or set algorithm.rollout_correction.rollout_is=token and "
            "algorithm.rollout_correction.rollout_is_threshold=1e6"
        )
    settings = config.policy_loss if isinstance(config.policy_loss, IcePopLossConfig) else IcePopLossConfig()
    tokens = icepop(rollout_is_weights, settings.alpha, settings.beta)
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=tokens.weight,
    )
    mask = response_mask.bool()
    n = mask.sum().clamp(min=1)
    metrics["actor/icepop/dropped_low"] = ((tokens.low & mask).sum() / n).item()
    metrics["actor/icepop/dropped_high"] = ((tokens.high & mask).sum() / n).item()
    return loss, metrics
