"""Two candidates that were tried and not kept (docs/lab.md#candidates-that-were-not-kept).

verl-ext lab stale --plugins recipes.ablations.candidates --add 'drpo=...'    as `run.py --list` prints it

`ess_ones` and `ess_seq` scale the learning rate of an update by the effective sample size of its trajectories (VCPO,
arXiv 2602.17616, without its baseline); `drpo` is a smooth trust region (arXiv 2606.09821; only its description could
be read, so the form is ours).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from verl_ext.core.corrections import Weights, register_correction, tis_sequence
from verl_ext.features.feature import RunFeatures
from verl_ext.lab.learner import LabBatch, Learner

CAP = 2.0  # of a trajectory's ratio
SCALING = ("ess_ones", "ess_seq")


@register_correction("ess_seq", reads=("log_rho",), by_ratio=True)
def sequence_weight(log_rho: Tensor, *, cap: float = CAP) -> Weights:
    """The weights of tis_sequence; the learning rate is scaled as well."""
    return tis_sequence(log_rho, cap)


@register_correction("ess_ones", reads=("log_rho",))
def no_weight(log_rho: Tensor) -> Weights:
    """Weights of 1: only the learning rate is scaled."""
    return Weights(torch.ones_like(log_rho), torch.zeros_like(log_rho), torch.zeros_like(log_rho))


@register_policy_loss("drpo")
def drpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Weighs a token by r (1 - sign(A) (p_theta - p_infer) / delta), with delta = clip_ratio_high, instead of dropping
    it where the bracket is negative. All [B, T]; in bypass mode `old_log_prob` is l_infer."""
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    shift = log_prob.exp() - old_log_prob.exp()
    weight = (ratio * (1 - advantages.sign() * shift / config.clip_ratio_high)).detach()
    matrix = -advantages * weight * log_prob
    return agg_loss(
        loss_mat=matrix, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    ), {}


def effective_share(log_k: Tensor, offsets: Tensor) -> float:
    """Returns (sum rho)^2 / (B sum rho^2) of the trajectories' ratios, each cut at CAP: 1 where all are equal.

    Args:
        log_k: [N], the tokens of all trajectories.
        offsets: [B + 1], the first token of each trajectory.
    """
    parts = log_k.double().split(offsets.diff().tolist())
    rho = torch.stack([part.sum() for part in parts]).exp().clamp(max=CAP)
    return float(rho.sum() ** 2 / (rho**2).sum() / len(rho))


_init, _update = Learner.__init__, Learner.update


def init(self: Learner, features: RunFeatures, *args: Any) -> None:
    _init(self, features, *args)
    self.scales = any(each.name in SCALING for each in features.stability.correction)  # type: ignore[attr-defined]


def update(self: Learner, batch: LabBatch, asked: Mapping[str, Any]) -> dict[str, float]:
    """The update, at the learning rate times the root of the effective share, if the run has one of SCALING."""
    if not self.scales:  # type: ignore[attr-defined]
        return _update(self, batch, asked)
    share = effective_share(batch.tokens.l_old - batch.tokens.l_infer, batch.offsets)
    group = self.engine.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], group["lr"] * share**0.5
    try:
        return _update(self, batch, asked) | {"actor/ess_share": share}
    finally:
        group["lr"] = rate


Learner.__init__, Learner.update = init, update  # type: ignore[method-assign]
