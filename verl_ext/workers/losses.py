"""Our policy losses under verl's `register_policy_loss`, and the micro-batch that they read.

Each changes a base loss, named by `base`, with its function in `core.losses`. Only this file uses verl's
signature of a policy loss, seven arguments; a loss reads further tensors from `current_batch()`.

Shape legend: B trajectories of a micro-batch, T response tokens (padded).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import ConfiguredMethod
from verl_ext.core.loss_batch import LossBatch, call_method
from verl_ext.features.losses import LOSSES
from verl_ext.workers import loss_config

WEIGHTED = {"geo_mean": "geo_mean_weighted"}  # a loss of verl -> the same loss, which takes weights per token

_current: ContextVar[LossBatch] = ContextVar("verl_ext_loss_batch")


def current_batch() -> LossBatch:
    """Returns the micro-batch whose loss is being computed; for use inside a registered policy loss.

    Raises:
        ConfigError: verl's own loss function calls it, which provides none.
    """
    try:
        return _current.get()
    except LookupError:
        raise ConfigError(
            "this policy loss reads tensors that verl's loss function does not provide: launch with verl_ext.main_ppo"
        ) from None


@contextmanager
def provide(batch: LossBatch) -> Iterator[None]:
    """Context in which `current_batch()` returns `batch`."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


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
    """Returns the base loss as changed by the policy loss `name`, and verl's metrics and its own, of this micro-batch.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T].
        config: the ActorConfig. If its `policy_loss` has verl's class, as in plain verl without a `_target_`, the
            defaults hold.
        rollout_is_weights: [B, T] weights of the tokens, or None. Plain verl provides no `current_batch()`; there a
            loss that reads k uses these weights as k: with `algorithm.rollout_correction.rollout_is=token` and a
            `rollout_is_threshold` far above any bound of the loss (verl truncates at it) they are the raw ratio.

    Raises:
        ConfigError: the batch lacks a tensor that the loss reads, or a setting without a default is missing.
    """
    ours = config.policy_loss
    if not isinstance(ours, loss_config.ComposedLossConfig):
        ours = loss_config.build_loss_config(loss_mode=name)
    method = LOSSES[name]
    mask, weight = response_mask.bool(), rollout_is_weights
    batch = LossBatch(log_prob, old_log_prob, advantages, mask)
    if method.reads == ("k",) and _current.get(None) is None:
        batch, weight = replace(batch, k=_ratio_of_plain_verl(name, rollout_is_weights)), None
    elif method.reads:
        batch = replace(current_batch(), l_theta=log_prob, l_old=old_log_prob, advantages=advantages, mask=mask)
    changed = call_method(ConfiguredMethod(method, ours.settings), batch, gives=("weight", "term"))
    if changed.weight is not None:
        weight = changed.weight.detach() if weight is None else changed.weight.detach() * weight
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
    if changed.term is not None:
        info = config.global_batch_info
        loss = loss + agg_loss(loss_mat=changed.term, loss_mask=batch.mask, loss_agg_mode="token-mean", **info)
    return loss, metrics | {f"actor/{name}/{metric}": value for metric, value in changed.metrics.items()}


def _ratio_of_plain_verl(name: str, rollout_is_weights: Tensor | None) -> Tensor:
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
    """Computes the loss `base`, in the form that takes weights per token."""
    loss = get_policy_loss_fn(WEIGHTED.get(base, base))
    return loss(rollout_is_weights=rollout_is_weights, **arguments)


@register_policy_loss("geo_mean_weighted")
def geo_mean_weighted_loss(
    *, log_prob: Tensor, config: Any, rollout_is_weights: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, dict[str, Any]]:
    """verl's `geo_mean` (GMPO, arXiv 2507.20673) with each token's gradient scaled by its weight.

    verl multiplies the sequence by the geometric mean of its weights, so that one token of weight 0 takes the whole
    sequence out. Here the weights do not change the loss's value. If the batch has a global_batch_size, the mean is
    over the global batch: verl's is over the micro-batch, so that its gradient grows with their number.
    """
    if rollout_is_weights is not None:
        fixed = log_prob.detach()
        log_prob = fixed + rollout_is_weights * (log_prob - fixed)
    verls = get_policy_loss_fn("geo_mean")
    loss, metrics = verls(log_prob=log_prob, config=config, rollout_is_weights=None, **arguments)
    info = config.global_batch_info
    if info.get("global_batch_size") is not None:
        loss = loss * (len(log_prob) * info["dp_size"] / info["global_batch_size"])
    return loss, metrics


def register_losses() -> None:
    """Registers our losses with verl's `register_policy_loss`; called again after a plugin has added more."""
    for name in LOSSES:
        register_policy_loss(name)(partial(changed_loss, name))


register_losses()
