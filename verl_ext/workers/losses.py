"""Policy losses, registered under verl's `register_policy_loss` (the signature is verl's).

Each one changes a base loss, named by `base`: it scales the tokens' weights, adds a term, or rescales the ratio. All
take old_log_prob, log_prob, advantages, response_mask as [B, T], config as the ActorConfig, and rollout_is_weights as
[B, T] or None, and return the scalar loss and verl's metrics with their own. Metrics are of this micro-batch.
"""

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils.torch_functional import masked_mean

from verl_ext.core.corrections import icepop
from verl_ext.core.losses import llds_penalty, opsm_mask, router_shift_factor, sequence_divergence
from verl_ext.errors import ConfigError
from verl_ext.workers.inputs import loss_inputs
from verl_ext.workers.loss_config import (
    SETTING,
    ComposedLossConfig,
    IcePopLossConfig,
    LldsLossConfig,
    OpsmLossConfig,
    RouterShiftLossConfig,
    target_of,
)


def apply_base(base: str, rollout_is_weights: Tensor | None, **arguments: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss `base`; `geo_mean` is `geo_mean_weighted`, see there."""
    loss = get_policy_loss_fn("geo_mean_weighted" if base == "geo_mean" else base)
    return loss(rollout_is_weights=rollout_is_weights, **arguments)


def settings_of(config: Any, kind: type[ComposedLossConfig]) -> Any:
    """`config.policy_loss`, which must be of the loss's own dataclass."""
    if not isinstance(config.policy_loss, kind):
        raise ConfigError(f"{SETTING} is not of this loss_mode's class", fix=(f"{SETTING}._target_={target_of(kind)}",))
    return config.policy_loss


def _share(chosen: Tensor, mask: Tensor) -> float:
    return ((chosen.bool() & mask).sum() / mask.sum().clamp(min=1)).item()


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
    """The base loss, each token weighted by IcePop's M(k) ("Small Leak Can Sink a Great Ship").

    Args:
        config: `policy_loss` an IcePopLossConfig, else alpha 0.5, beta 5 and verl's clipped loss hold.
        rollout_is_weights: the raw mismatch ratio k = exp(l_old - l_infer). The entry point `verl_ext.main_ppo` puts
            it there; plain verl does with `algorithm.rollout_correction.rollout_is=token` and a
            `rollout_is_threshold` far above beta (verl truncates the ratio at the threshold).

    Metrics: actor/icepop/{dropped_low,dropped_high}, the shares of tokens below and above the band.

    Raises:
        ConfigError: `rollout_is_weights` is missing.
    """
    if rollout_is_weights is None:
        raise ConfigError(
            "policy_loss.loss_mode=icepop needs the mismatch ratio in rollout_is_weights",
            fix=(
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=1e6",
            ),
            otherwise="launch with verl_ext.main_ppo",
        )
    settings = config.policy_loss if isinstance(config.policy_loss, IcePopLossConfig) else IcePopLossConfig()
    tokens = icepop(rollout_is_weights, settings.alpha, settings.beta)
    loss, metrics = apply_base(
        settings.base,
        tokens.weight,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    mask = response_mask.bool()
    metrics["actor/icepop/dropped_low"] = _share(tokens.low, mask)
    metrics["actor/icepop/dropped_high"] = _share(tokens.high, mask)
    return loss, metrics


def opsm_weights(
    l_infer: Tensor, l_old: Tensor, l_theta: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> tuple[Tensor, dict[str, float]]:
    """OPSM's [B, T] mask and its metrics (DeepSeek-V3.2 eq. 9).

    Metrics: actor/opsm/dropped and /sequences_dropped, shares of the tokens and of the sequences with a token;
    actor/opsm/mismatch and /staleness, the two parts of the divergence, means over those sequences.
    """
    mask = mask.bool()
    parts = sequence_divergence(l_infer, l_old, l_theta, mask)
    keep = opsm_mask(parts.whole, advantages, delta)
    dropped = (keep == 0) & mask
    rows = mask.any(-1)
    return keep, {
        "actor/opsm/dropped": _share(dropped, mask),
        "actor/opsm/sequences_dropped": _share(dropped.any(-1), rows),
        "actor/opsm/mismatch": masked_mean(parts.mismatch, rows).item(),
        "actor/opsm/staleness": masked_mean(parts.staleness, rows).item(),
    }


@register_policy_loss("opsm")
def opsm_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The base loss with the tokens of stale or mismatched sequences of negative advantage at weight 0.

    DeepSeek-V3.2 eq. 9; `policy_loss` an OpsmLossConfig. Reads l_infer of `loss_inputs()`. Metrics: `opsm_weights`.
    """
    settings = settings_of(config, OpsmLossConfig)
    l_infer = loss_inputs().require("l_infer")
    keep, ours = opsm_weights(l_infer, old_log_prob, log_prob, advantages, response_mask, settings.delta)
    loss, metrics = apply_base(
        settings.base,
        keep if rollout_is_weights is None else keep * rollout_is_weights,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    return loss, metrics | ours


@register_policy_loss("llds")
def llds_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The base loss plus coef times the mean LLDS penalty over all response tokens (arXiv 2512.04220).

    `policy_loss` an LldsLossConfig. The weights act on the base loss alone, and the penalty is a token mean in every
    `loss_agg_mode`, as in the paper. Metrics: actor/llds/penalised, share of the tokens; actor/llds/penalty, its mean.
    """
    settings = settings_of(config, LldsLossConfig)
    loss, metrics = apply_base(
        settings.base,
        rollout_is_weights,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    penalty = llds_penalty(log_prob, old_log_prob, advantages, response_mask, settings.gate)
    mask = response_mask.bool()
    metrics["actor/llds/penalised"] = _share(penalty > 0, mask)
    metrics["actor/llds/penalty"] = masked_mean(penalty.detach(), mask).item()
    term = agg_loss(loss_mat=penalty, loss_mask=mask, loss_agg_mode="token-mean", **config.global_batch_info)
    return loss + settings.coef * term, metrics


@register_policy_loss("router_shift")
def router_shift_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The base loss with each token's ratio multiplied by its router-shift factor before clipping (RSPO).

    arXiv 2510.23027; `base: geo_mean` is the paper's own combination. `policy_loss` a RouterShiftLossConfig; reads
    router_deviation of `loss_inputs()`. Metrics: actor/router_shift/factor, mean; actor/router_shift/floored, share of
    the tokens at the floor. actor/ppo_kl is of the unscaled ratio, as without RSPO.
    """
    settings = settings_of(config, RouterShiftLossConfig)
    factor = router_shift_factor(loss_inputs().require("router_deviation"), settings.floor)
    # log(ratio * factor) = log_prob - (old_log_prob - log(factor)): every base sees it, and clips the product. A floor
    # of 0 lets the factor be 0, which the clamp of the log-ratio bounds.
    log_factor = factor.clamp(min=torch.finfo(factor.dtype).tiny).log()
    loss, metrics = apply_base(
        settings.base,
        rollout_is_weights,
        old_log_prob=old_log_prob - log_factor,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    mask = response_mask.bool()
    metrics["actor/ppo_kl"] += masked_mean(log_factor, mask).item()
    metrics["actor/router_shift/factor"] = masked_mean(factor, mask).item()
    metrics["actor/router_shift/floored"] = _share(factor <= settings.floor, mask)
    return loss, metrics


@register_policy_loss("geo_mean_weighted")
def geo_mean_weighted_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's `geo_mean` (GMPO, arXiv 2507.20673) with each token's gradient scaled by its weight.

    verl multiplies the sequence by the geometric mean of its weights, so that one token of weight 0 takes the whole
    sequence out. Here the weights leave the loss's value alone. Where the batch brings a global_batch_size, the mean
    is over the global batch: verl's is over the micro-batch, so that its gradient grows with their number.
    """
    if rollout_is_weights is not None:
        fixed = log_prob.detach()
        log_prob = fixed + rollout_is_weights * (log_prob - fixed)
    loss, metrics = get_policy_loss_fn("geo_mean")(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )
    info = config.global_batch_info
    if info.get("global_batch_size") is not None:
        loss = loss * (len(log_prob) * info["dp_size"] / info["global_batch_size"])
    return loss, metrics
