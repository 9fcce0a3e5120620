"""What the training step reads of a batch, as packed tokens.

Shape legend: N response tokens of all trajectories, B trajectories.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_ext.core.mismatch import count_non_finite
from verl_ext.core.tokens import Lag, Tokens
from verl_ext.errors import BatchError
from verl_ext.fields import AGREEMENT, ENTROPY, OLD_LOG_PROBS, RESPONSE_MASK, ROLLOUT_LOG_PROBS

FIELDS = (ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, RESPONSE_MASK, ENTROPY, AGREEMENT)


def lag_of(tags: Sequence[Mapping[str, Any]], step: int) -> Lag:
    """How old the weights of each trajectory are in this step, by the tags that verl's agent loop gives it.

    A version is the step after which it was synchronised; l_old is of the one before this step, also where a step has
    several local updates (`separate_async`).
    """
    newest, oldest = (
        torch.tensor([step - 1 - tag[f"{end}_global_steps"] for tag in tags], dtype=torch.long)
        for end in ("max", "min")
    )
    return Lag(newest, oldest)


def response_tokens(data: Mapping[str, Tensor], lag: Lag | None = None) -> Tokens:
    """From verl's nested tensors, the FIELDS of `data`; entropy and router_agreement are optional.

    Raises:
        BatchError: a field is missing or has another number of tokens than response_mask.
    """
    if ROLLOUT_LOG_PROBS not in data:
        raise BatchError(
            "the rollout returned no rollout_log_probs", fix=("actor_rollout_ref.rollout.calculate_log_probs=True",)
        )
    packed = packed_like_mask(data, FIELDS)
    return Tokens(
        l_infer=packed[ROLLOUT_LOG_PROBS],
        l_old=packed[OLD_LOG_PROBS],
        mask=packed[RESPONSE_MASK].bool(),
        offsets=data[RESPONSE_MASK].offsets(),
        entropy=packed.get(ENTROPY),
        agreement=packed.get(AGREEMENT),
        lag=lag,
    )


def require_generated(count: int) -> None:
    """Raise BatchError unless the model generated any token of the batch."""
    if not count:
        raise BatchError(
            "response_mask is 0 everywhere: no response of this batch has a token that the model generated; check "
            "the agent loop and data.max_response_length"
        )


def packed_like_mask(data: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Name -> [N] values of the nested fields that `data` has, which must be divided as response_mask is.

    Raises:
        BatchError: one is not.
    """
    mask = data[RESPONSE_MASK]
    packed = {name: data[name].values() for name in names if name in data}
    for name, values in packed.items():
        if values.shape != mask.values().shape or not torch.equal(data[name].offsets(), mask.offsets()):
            raise BatchError(
                f"{name} has {len(values)} tokens and response_mask {len(mask.values())}, or they are divided "
                "differently over the trajectories: every response token needs one value"
            )
    return packed


def gaps(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """[B] float64 each: the sum of |log k| over a trajectory's generated tokens, inf where one is not a number; and how
    many there are."""
    log_k = (tokens.l_old.double() - tokens.l_infer.double()).abs_().nan_to_num_(torch.inf)
    return tokens.row_sums(log_k.masked_fill_(~tokens.mask, 0.0)), tokens.row_sums(tokens.mask)


def non_finite(tokens: Tokens) -> dict[str, int]:
    """Field -> how many of its values on generated tokens are NaN or infinite."""
    return {
        ROLLOUT_LOG_PROBS: count_non_finite(tokens.l_infer, tokens.mask),
        OLD_LOG_PROBS: count_non_finite(tokens.l_old, tokens.mask),
    }
