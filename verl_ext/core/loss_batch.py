"""The input and output of a method that acts in the update: the batch that it reads, and its changes to the loss.

Policy losses (`core.losses`) and the corrections of `core.corrections` that act in the update are such methods.

Shape legend: B trajectories, T response tokens (padded). `mask` is m, bool.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from verl_ext.base.methods import Chosen
from verl_ext.core import torch

if TYPE_CHECKING:
    from torch import Tensor

READABLE = ("k", "l_infer", "entropy", "router_agreement", "router_deviation", "lag")


@dataclass(frozen=True)
class LossBatch:
    """The inputs of a policy loss, [B, T] each. An optional input is given if the loss is registered to read it.

    Attributes:
        l_theta: with gradient.
        mask: m, bool.
        k: the mismatch ratio exp(l_old - l_infer), 0 where it is not a number.
        entropy: the training policy's before the update, in nats.
        router_agreement: share of a token's experts that both engines chose, mean over layers.
        router_deviation: |log r_theta - log r_old| of the router, mean over experts and layers.
        lag: int, the trajectory's bucket of `Lag`; None in synchronous training, even if a method reads it.
    """

    l_theta: Tensor
    l_old: Tensor
    advantages: Tensor
    mask: Tensor
    k: Tensor | None = None
    l_infer: Tensor | None = None
    entropy: Tensor | None = None
    router_agreement: Tensor | None = None
    router_deviation: Tensor | None = None
    lag: Tensor | None = None

    def require(self, name: str) -> Tensor:
        """Returns the optional tensor `name`; raises ValueError if the registration does not name it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch has no {name}: register the function with reads=({name!r},)")
        return value


@dataclass(frozen=True)
class LossChange:
    """The changes to the base loss; None means no change.

    Attributes:
        weight: [B, T], multiplied into the tokens' weights; always detached.
        log_factor: [B, T], added to the log-ratio before the base clips; detached too.
        term: [B, T] with gradient, whose mean over all response tokens is added to the loss, in every loss_agg_mode.
        metrics: of this micro-batch, logged as `actor/<name>/<metric>`.
    """

    weight: Tensor | None = None
    log_factor: Tensor | None = None
    term: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def change(chosen: Chosen, batch: LossBatch, gives: Collection[str]) -> LossChange:
    """Calls a method with its settings on a batch.

    Raises:
        ValueError: the method gives a part that is not in `gives`, or a tensor that is not [B, T].
    """
    found = chosen.method.function(batch, **asdict(chosen.settings))
    expected = tuple(batch.mask.shape)
    for name in ("weight", "log_factor", "term"):
        if (tensor := getattr(found, name)) is None:
            continue
        if name not in gives:
            raise ValueError(f"{chosen.name} gives a {name}; it is registered to give {' and '.join(gives)}")
        if tensor.shape != expected:
            raise ValueError(
                f"{chosen.name} gives a {name} of shape {tuple(tensor.shape)} where {expected} is expected"
            )
    return found


def masked_share(chosen: Tensor, mask: Tensor) -> float:
    """Returns the share of the masked values that are chosen; 0 if none is masked in."""
    return ((chosen.bool() & mask).sum() / mask.sum().clamp(min=1)).item()


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Returns the mean of the masked values; 0 if none is masked in."""
    return (torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)).item()
