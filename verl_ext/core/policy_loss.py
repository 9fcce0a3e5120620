"""What a policy loss is: a change of the loss that it builds upon.

A policy loss does not compute a loss. It is a pure function of a micro-batch and its settings that says how the loss
named by `base` changes: other weights of the tokens, another ratio, a term besides. `verl_ext.workers.losses` computes
the one and applies the other, under verl's registry. The policy losses themselves are in `verl_ext.core.losses`.

Shape legend: B trajectories of a micro-batch, T response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from verl_ext.methods import Chosen, Method, Registry, settings_of

if TYPE_CHECKING:
    from torch import Tensor

READABLE = ("k", "l_infer", "entropy", "router_agreement", "router_deviation", "lag")


@dataclass(frozen=True)
class LossBatch:
    """What a policy loss may look at, [B, T] each; of the optional ones, those that its registration says it reads.

    Attributes:
        l_theta: with gradient.
        mask: m, bool.
        k: the mismatch ratio exp(l_old - l_infer), which comes in the place of the tokens' weights: a loss that reads
            it gives the only weights there are.
        entropy: of the training policy before the update, in nats.
        router_agreement: share of a token's experts that both engines chose, mean over layers.
        router_deviation: |log r_theta - log r_old| of the router, mean over experts and layers.
        lag: int, the trajectory's bucket of `Lag`; None, though a method reads it, in synchronous training.
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
        """The optional tensor `name`; ValueError where the registration does not name it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch comes without {name}: register the function with reads=({name!r},)")
        return value


@dataclass(frozen=True)
class LossChange:
    """What becomes of the base loss; None leaves it as it is.

    Attributes:
        weight: [B, T], multiplied into the tokens' weights; a constant, whatever it was made of.
        log_factor: [B, T], added to the log-ratio before the base clips; a constant too.
        term: [B, T] with gradient, whose mean over all response tokens is added to the loss, in every loss_agg_mode.
        metrics: of this micro-batch, logged as `actor/<name>/<metric>`.
    """

    weight: Tensor | None = None
    log_factor: Tensor | None = None
    term: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


LossFunction = Callable[..., LossChange]


@dataclass(frozen=True)
class Loss(Method):
    """`function(batch, *, setting, ...) -> LossChange`.

    Attributes:
        reads: optional fields of LossBatch.
        rescales: whether it gives a log_factor, for which the base has to have a ratio.
        needs_l_old: whether l_old has to be the training engine's own; in bypass mode it is the rollout's.
    """

    reads: tuple[str, ...] = ()
    rescales: bool = False
    needs_l_old: bool = False

    @property
    def gives(self) -> tuple[str, ...]:
        return ("weight", "term", "log_factor") if self.rescales else ("weight", "term")


LOSSES: Registry[Loss] = Registry("policy loss")


def register_loss(
    name: str,
    settings: type | None = None,
    *,
    reads: tuple[str, ...] = (),
    rescales: bool = False,
    needs_l_old: bool = False,
) -> Callable[[LossFunction], LossFunction]:
    """Register a function of a LossBatch and settings, which becomes `policy_loss.loss_mode=NAME`; see Loss.

    Args:
        settings: a dataclass, a field a keyword argument of the function; by default the function's keyword-only
            arguments themselves.

    Raises:
        ValueError: the name is taken, or what it reads is unknown.
    """
    if unknown := set(reads) - set(READABLE):
        raise ValueError(f"the policy loss {name} reads {sorted(unknown)}; choose from {READABLE}")

    def register(function: LossFunction) -> LossFunction:
        LOSSES.add(Loss(name, function, settings or settings_of(function), reads, rescales, needs_l_old))
        return function

    return register


def change(chosen: Chosen, batch: LossBatch, gives: Collection[str]) -> LossChange:
    """What a method with its settings makes of a batch.

    Raises:
        ValueError: it gives something besides `gives`, or a tensor that is not [B, T].
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
