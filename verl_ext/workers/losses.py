"""Our policy losses under verl's `register_policy_loss`, whose seven-argument signature stands here once.

Each changes a base loss, named by `base`, as the function says that is registered with us (`core.policy_loss`).
"""

from functools import partial
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils.torch_functional import masked_mean

from verl_ext.core.losses import LossBatch, change
from verl_ext.errors import ConfigError
from verl_ext.methods import Chosen
from verl_ext.settings.losses import LOSSES
from verl_ext.workers import loss_config
from verl_ext.workers.inputs import loss_inputs, weight_beside_k


def changed_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The base loss as the policy loss `name` changes it, and verl's metrics with its own, of this micro-batch.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T].
        config: the ActorConfig. Where its `policy_loss` is of verl's class, as plain verl has it without a `_target_`,
            the defaults hold.
        rollout_is_weights: [B, T] weights of the tokens, or None. For a loss that reads k, the raw mismatch ratio: the
            entry point `verl_ext.main_ppo` puts it there; plain verl does with
            `algorithm.rollout_correction.rollout_is=token` and a `rollout_is_threshold` far above any bound of the
            loss (verl truncates the ratio at the threshold).

    Raises:
        ConfigError: the batch does not bring what the loss reads, or a setting without a default is missing.
    """
    ours = config.policy_loss
    if not isinstance(ours, loss_config.ComposedLossConfig):
        ours = loss_config.build_loss_config(loss_mode=name)
    method = LOSSES[name]
    fields = [field for field in method.reads if field != "k"]
    read = loss_inputs().read(fields) if fields else {}
    weight = rollout_is_weights
    if "k" in method.reads:
        read["k"], weight = _mismatch_ratio(name, rollout_is_weights), weight_beside_k()
    batch = LossBatch(log_prob, old_log_prob, advantages, response_mask.bool(), **read)
    changed = change(Chosen(method, ours.settings), batch, method.gives)
    if changed.weight is not None:
        weight = changed.weight.detach() if weight is None else changed.weight.detach() * weight
    if changed.log_factor is not None:
        # log(ratio * factor) = log_prob - (old_log_prob - log(factor)): every base sees it, and clips the product.
        old_log_prob = old_log_prob - changed.log_factor.detach()
    loss, metrics = apply_base(
        ours.base,
        weight,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    if changed.log_factor is not None:  # of the unscaled ratio, as without the factor
        metrics["actor/ppo_kl"] += masked_mean(changed.log_factor, batch.mask).item()
    if changed.term is not None:
        info = config.global_batch_info
        loss = loss + agg_loss(loss_mat=changed.term, loss_mask=batch.mask, loss_agg_mode="token-mean", **info)
    return loss, metrics | {f"actor/{name}/{metric}": value for metric, value in changed.metrics.items()}


def _mismatch_ratio(name: str, rollout_is_weights: Tensor | None) -> Tensor:
    if rollout_is_weights is None:
        raise ConfigError(
            f"policy_loss.loss_mode={name} needs the mismatch ratio in rollout_is_weights",
            fix=(
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=1e6",
            ),
            otherwise="launch with verl_ext.main_ppo",
        )
    return rollout_is_weights


def apply_base(base: str, rollout_is_weights: Tensor | None, **arguments: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss `base`; `geo_mean` is `geo_mean_weighted`, see there."""
    loss = get_policy_loss_fn("geo_mean_weighted" if base == "geo_mean" else base)
    return loss(rollout_is_weights=rollout_is_weights, **arguments)


@register_policy_loss("geo_mean_weighted")
def geo_mean_weighted_loss(
    *, log_prob: Tensor, config: Any, rollout_is_weights: Tensor | None = None, **arguments: Any
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
        log_prob=log_prob, config=config, rollout_is_weights=None, **arguments
    )
    info = config.global_batch_info
    if info.get("global_batch_size") is not None:
        loss = loss * (len(log_prob) * info["dp_size"] / info["global_batch_size"])
    return loss, metrics


def register() -> None:
    """Under verl's `register_policy_loss`, what is registered with us; again where a plugin has brought more."""
    for name in LOSSES:
        register_policy_loss(name)(partial(changed_loss, name))


register()
