"""The input and output of a method that acts in the update: the batch that it reads, and its changes to the loss.

Policy losses (`core.losses`) and the corrections of `core.corrections` that act in the update are such methods.

Shape legend: B trajectories, T response tokens (padded). `mask` is m, bool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from verl_ext.base import names
from verl_ext.base.errors import ConfigError, MethodError
from verl_ext.base.methods import ConfiguredMethod
from verl_ext.core import torch

if TYPE_CHECKING:
    from torch import Tensor

# Optional input of a LossBatch -> field of update_actor's batch, jagged [B, r]. `k` is computed from l_infer.
FIELDS = {
    "l_infer": names.ROLLOUT_LOG_PROBS,
    "k": names.ROLLOUT_LOG_PROBS,
    "entropy": names.ENTROPY,
    "router_agreement": names.AGREEMENT,
    "lag": names.LAG,
}
MAY_LACK = ("lag",)  # no trajectory of synchronous training has one


@dataclass(frozen=True)
class LossBatch:
    """The tensors of a micro-batch, [B, T] each; all but l_theta are 0 where the mask is 0.

    A method is given the optional inputs that it is registered to read.

    Attributes:
        l_theta: with gradient.
        mask: m, bool.
        k: the mismatch ratio exp(l_old - l_infer), 0 where it is not a number.
        entropy: the training policy's before the update, in nats.
        router_agreement: share of a token's experts that both engines chose, mean over layers.
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
    lag: Tensor | None = None

    def require(self, name: str) -> Tensor:
        """Returns the optional input `name`.

        Raises:
            ConfigError: the batch of update_actor lacks its field, or the method is not registered to read it.
        """
        value = getattr(self, name)
        if value is None:
            present = [each for each in FIELDS if getattr(self, each) is not None]
            raise ConfigError(
                f"the loss reads {name}, which its batch lacks: the batch of update_actor must have the field "
                f"{FIELDS[name]}, and the method must be registered with reads=({name!r},); the batch has: "
                f"{', '.join(present) or 'none'}"
            )
        return value

    def reading(self, inputs: Iterable[str]) -> LossBatch:
        """Returns the batch with only these optional inputs; raises ConfigError if it lacks one."""
        read = {name: getattr(self, name) if name in MAY_LACK else self.require(name) for name in inputs}
        return LossBatch(self.l_theta, self.l_old, self.advantages, self.mask, **read)


@dataclass(frozen=True)
class LossChange:
    """The changes to the base loss; None means no change.

    Attributes:
        weight: [B, T], multiplied into the tokens' weights; always detached.
        term: [B, T] with gradient, whose mean over all response tokens is added to the loss, in every loss_agg_mode.
        metrics: of this micro-batch, logged as `actor/<name>/<metric>`.
    """

    weight: Tensor | None = None
    term: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def call_method(chosen: ConfiguredMethod, batch: LossBatch, gives: Collection[str]) -> LossChange:
    """Calls a method with its settings on the part of a batch that it reads.

    Raises:
        ConfigError: the batch lacks an input that the method reads.
        MethodError: the method gives something other than a LossChange, a part that is not in `gives`, or a tensor
            that is not [B, T].
    """
    found = chosen.method.function(batch.reading(chosen.method.reads), **asdict(chosen.settings))
    if not isinstance(found, LossChange):
        raise MethodError(f"{chosen.name} gives a {type(found).__name__}, which is not a LossChange")
    expected = tuple(batch.mask.shape)
    for name in ("weight", "term"):
        if (tensor := getattr(found, name)) is None:
            continue
        if name not in gives:
            raise MethodError(f"{chosen.name} gives a {name}; it is registered to give {' and '.join(gives)}")
        if tensor.shape != expected:
            raise MethodError(
                f"{chosen.name} gives a {name} of shape {tuple(tensor.shape)} where {expected} is expected"
            )
    return found


def masked_share(chosen: Tensor, mask: Tensor) -> float:
    """Returns the share of the masked values that are chosen; 0 if none is masked in."""
    return ((chosen.bool() & mask).sum() / mask.sum().clamp(min=1)).item()


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Returns the mean of the masked values; 0 if none is masked in."""
    return (torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)).item()
