"""The tensors of a micro-batch that losses read, and what a policy loss may read of them beyond verl's signature."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

import torch
from tensordict import TensorDict
from torch import Tensor

import verl_ext.fields as names
from verl_ext.errors import ConfigError

# attribute -> field of the batch, jagged [B, r]
BATCH_FIELDS = {
    "l_infer": names.ROLLOUT_LOG_PROBS,
    "entropy": names.ENTROPY,
    "router_agreement": names.AGREEMENT,
    "router_deviation": names.DEVIATION,
    "lag": names.LAG,
}
OPTIONAL = ("lag",)  # which a method reads where there is one
# [B, r] too, where there are any.
VERLS_FIELDS = (names.OLD_LOG_PROBS, names.REF_LOG_PROBS, names.ADVANTAGES, names.WEIGHTS)


def padded_fields(data: TensorDict) -> TensorDict:
    """What losses read of a micro-batch, `response_mask` with it, padded to [B, T]; 0 where the mask is.

    verl masks by multiplying, or by torch.where on the result: a NaN that the rollout returned for a token of a tool's
    output would be a NaN in the loss by the one, in the gradient by both.
    """
    padded = data.select(names.RESPONSE_MASK, *VERLS_FIELDS, *BATCH_FIELDS.values(), strict=False).to_padded_tensor()
    mask = padded[names.RESPONSE_MASK].bool()
    return padded.apply(lambda values: torch.where(mask, values, 0))


@dataclass(frozen=True)
class LossInputs:
    """[B, T] each, 0 outside the mask, aligned with the tensors that verl passes; None where the batch lacks the field.

    Attributes:
        l_infer: log-probabilities under the rollout engine.
        entropy: of the training policy before the update, in nats, from compute_log_prob.
        router_agreement: share of a token's experts that both engines chose, mean over layers.
        router_deviation: |log r_theta - log r_old| of the router, mean over experts and layers (RSPO).
        lag: the trajectory's bucket of `core.lag.Lag`, where rollouts can be older than the policy.
        weight: the product of the weights that corrections gave in the update; None without any, and where verl's
            `rollout_is_weights` carry it: where they carry the ratio k, the two stay apart.
    """

    l_infer: Tensor | None = None
    entropy: Tensor | None = None
    router_agreement: Tensor | None = None
    router_deviation: Tensor | None = None
    lag: Tensor | None = None
    weight: Tensor | None = None

    @classmethod
    def of(cls, padded: TensorDict) -> "LossInputs":
        """Of `padded_fields`."""
        return cls(**{name: padded[field] for name, field in BATCH_FIELDS.items() if field in padded.keys()})  # noqa: SIM118

    def read(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """By name, what a method reads; None for what is OPTIONAL and not there."""
        return {name: self.lag if name in OPTIONAL else self.require(name) for name in names}

    def require(self, name: str) -> Tensor:
        """The tensor `name`.

        Raises:
            ConfigError: the batch of update_actor does not bring it.
        """
        value = getattr(self, name)
        if value is None:
            present = [field.name for field in fields(self) if getattr(self, field.name) is not None]
            raise ConfigError(
                f"the loss needs {name}, but the batch of update_actor has no field {BATCH_FIELDS[name]}; it brings of "
                f"what losses read: {', '.join(present) or 'nothing'}"
            )
        return value


_current: ContextVar[LossInputs] = ContextVar("verl_ext_loss_inputs")


def loss_inputs() -> LossInputs:
    """The inputs of the loss that is being computed; for use inside a registered policy loss.

    Raises:
        ConfigError: verl's own loss function is calling, which provides none.
    """
    try:
        return _current.get()
    except LookupError:
        raise ConfigError(
            "this policy loss reads tensors that verl's loss function does not provide: launch with verl_ext.main_ppo"
        ) from None


def weight_beside_k() -> Tensor | None:
    """`LossInputs.weight` of the loss that is being computed; None where verl's own loss function is calling."""
    inputs = _current.get(None)
    return None if inputs is None else inputs.weight


@contextmanager
def provide(inputs: LossInputs) -> Iterator[None]:
    """Make `inputs` what `loss_inputs()` returns inside."""
    token = _current.set(inputs)
    try:
        yield
    finally:
        _current.reset(token)
