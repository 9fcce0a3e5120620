"""Our policy losses under verl's `register_policy_loss`, and the tensors of a micro-batch that they read.

Each changes a base loss, named by `base`, with its function in `core.losses`. Only this file uses verl's
signature of a policy loss, seven arguments; a loss reads further tensors with `loss_inputs()`.

Shape legend: B trajectories of a micro-batch, T response tokens (padded).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils.torch_functional import masked_mean

from verl_ext.base import names
from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import Chosen
from verl_ext.core.loss_batch import LossBatch, change
from verl_ext.core.mismatch import mismatch_ratio
from verl_ext.features.losses import LOSSES
from verl_ext.workers import loss_config

# attribute -> field of the batch, jagged [B, r]
BATCH_FIELDS = {
    "l_infer": names.ROLLOUT_LOG_PROBS,
    "entropy": names.ENTROPY,
    "router_agreement": names.AGREEMENT,
    "router_deviation": names.DEVIATION,
    "lag": names.LAG,
}
OPTIONAL = ("lag",)  # a method reads it if it is there
# Also [B, r], each if the batch has it.
VERLS_FIELDS = (names.OLD_LOG_PROBS, names.REF_LOG_PROBS, names.ADVANTAGES, names.WEIGHTS)


def padded_fields(data: TensorDict) -> TensorDict:
    """Returns the fields of a micro-batch that losses read, and `response_mask`, padded to [B, T]; 0 where the mask is.

    verl masks by multiplying, or by torch.where on the result. A NaN that the rollout returned for a tool's token would
    reach the loss with the former, and the gradient with both.
    """
    padded = data.select(names.RESPONSE_MASK, *VERLS_FIELDS, *BATCH_FIELDS.values(), strict=False).to_padded_tensor()
    mask = padded[names.RESPONSE_MASK].bool()
    return padded.apply(lambda values: torch.where(mask, values, 0))


@dataclass(frozen=True)
class LossInputs:
    """The optional tensors of a `core.loss_batch.LossBatch`, 0 outside the mask; None if the batch lacks the field."""

    l_infer: Tensor | None = None
    entropy: Tensor | None = None
    router_agreement: Tensor | None = None
    router_deviation: Tensor | None = None
    lag: Tensor | None = None
    k: Tensor | None = None

    @classmethod
    def from_fields(cls, padded: TensorDict) -> "LossInputs":
        """Builds the inputs from `padded_fields`."""
        found = {name: padded[field] for name, field in BATCH_FIELDS.items() if field in padded.keys()}  # noqa: SIM118
        if "l_infer" in found:
            k = mismatch_ratio(found["l_infer"], padded[names.OLD_LOG_PROBS]).nan_to_num_(0.0, 0.0, 0.0)
            found["k"] = k * padded[names.RESPONSE_MASK]
        return cls(**found)

    def read(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Returns name -> tensor that a method reads; None if it is OPTIONAL and absent."""
        return {name: self.lag if name in OPTIONAL else self.require(name) for name in names}

    def require(self, name: str) -> Tensor:
        """Returns the tensor `name`.

        Raises:
            ConfigError: the batch of update_actor does not have it.
        """
        value = getattr(self, name)
        if value is None:
            present = [each for each in BATCH_FIELDS if getattr(self, each) is not None]
            field = BATCH_FIELDS["l_infer" if name == "k" else name]
            raise ConfigError(
                f"the loss needs {name}, but the batch of update_actor has no field {field}; fields of losses that it "
                f"has: {', '.join(present) or 'none'}"
            )
        return value


_current: ContextVar[LossInputs] = ContextVar("verl_ext_loss_inputs")


def loss_inputs() -> LossInputs:
    """Returns the inputs of the loss that is being computed; for use inside a registered policy loss.

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
def provide(inputs: LossInputs) -> Iterator[None]:
    """Context in which `loss_inputs()` returns `inputs`."""
    token = _current.set(inputs)
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
        rollout_is_weights: [B, T] weights of the tokens, or None. Plain verl provides no `loss_inputs()`; there a loss
            that reads k uses these weights as k: with `algorithm.rollout_correction.rollout_is=token` and a
            `rollout_is_threshold` far above any bound of the loss (verl truncates at it) they are the raw ratio.

    Raises:
        ConfigError: the batch lacks a tensor that the loss reads, or a setting without a default is missing.
    """
    ours = config.policy_loss
    if not isinstance(ours, loss_config.ComposedLossConfig):
        ours = loss_config.build_loss_config(loss_mode=name)
    method = LOSSES[name]
    if method.reads == ("k",) and _current.get(None) is None:
        read, weight = {"k": _ratio_of_plain_verl(name, rollout_is_weights)}, None
    else:
        read, weight = loss_inputs().read(method.reads) if method.reads else {}, rollout_is_weights
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
    if changed.log_factor is not None:  # from the unscaled ratio, as without the factor
        metrics["actor/ppo_kl"] += masked_mean(changed.log_factor, batch.mask).item()
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
    """Computes the loss `base`, with `geo_mean_weighted` instead of `geo_mean`."""
    loss = get_policy_loss_fn("geo_mean_weighted" if base == "geo_mean" else base)
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
