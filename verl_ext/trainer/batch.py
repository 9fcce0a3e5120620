"""The part of a batch that the training step and its filters read, as packed tokens.

Shape legend: N response tokens of all trajectories, B trajectories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from verl_ext.base import names
from verl_ext.base.errors import BatchError
from verl_ext.core.filters import FilterBatch
from verl_ext.core.tokens import Lag, Tokens

FIELDS = (names.ROLLOUT_LOG_PROBS, names.OLD_LOG_PROBS, names.RESPONSE_MASK, names.ENTROPY, names.AGREEMENT)
FILTER_FIELDS = (names.RESPONSE_MASK, names.RESPONSES, names.ADVANTAGES, names.REWARDS)


def lag_of(tags: Sequence[Mapping[str, Any]], step: int) -> Lag:
    """Returns how old the weights of each trajectory are in this step, by the tags that verl's agent loop gives it.

    A version is the step after which it was synchronised; l_old is of the one before this step, also where a step has
    several local updates (`separate_async`).
    """
    newest, oldest = (
        torch.tensor([step - 1 - tag[f"{end}_global_steps"] for tag in tags], dtype=torch.long)
        for end in ("max", "min")
    )
    return Lag(newest, oldest)


def response_tokens(data: Mapping[str, Tensor], lag: Lag | None = None) -> Tokens:
    """Returns the tokens of FIELDS in `data`, verl's nested tensors; entropy and router_agreement are optional.

    Raises:
        BatchError: a field is missing or has another number of tokens than response_mask.
    """
    if names.ROLLOUT_LOG_PROBS not in data:
        raise BatchError(
            "the rollout returned no rollout_log_probs", fix=("actor_rollout_ref.rollout.calculate_log_probs=True",)
        )
    packed = packed_like_mask(data, FIELDS)
    return Tokens(
        l_infer=packed[names.ROLLOUT_LOG_PROBS],
        l_old=packed[names.OLD_LOG_PROBS],
        mask=packed[names.RESPONSE_MASK].bool(),
        offsets=data[names.RESPONSE_MASK].offsets(),
        entropy=packed.get(names.ENTROPY),
        agreement=packed.get(names.AGREEMENT),
        lag=lag,
    )


def packed_like_mask(data: Mapping[str, Tensor], fields: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns name -> [N] values of the nested fields in `data`. Raises BatchError if one has other row lengths than
    response_mask."""
    mask = data[names.RESPONSE_MASK]
    packed = {name: data[name].values() for name in fields if name in data}
    for name, values in packed.items():
        if values.shape != mask.values().shape or not torch.equal(data[name].offsets(), mask.offsets()):
            raise BatchError(
                f"{name} has {len(values)} tokens and response_mask {len(mask.values())}, or the trajectories' "
                "lengths differ: every response token needs one value"
            )
    return packed


def log_k_sums(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Returns two [B] tensors in float64: the sum of |log k| over a trajectory's generated tokens, inf if one is not
    a number; and the number of these tokens."""
    log_k = (tokens.l_old.double() - tokens.l_infer.double()).abs_().nan_to_num_(torch.inf)
    return tokens.row_sums(log_k.masked_fill_(~tokens.mask, 0.0)), tokens.row_sums(tokens.mask)


def pick_rows(tokens: Tokens, rows: Sequence[int]) -> tuple[Tokens, Tensor]:
    """Returns some trajectories of a batch, in this order, and the places of their tokens among the N."""
    ends = tokens.offsets.tolist()
    places = torch.cat([torch.arange(ends[row], ends[row + 1]) for row in rows])
    lengths = tokens.offsets.diff()[list(rows)]
    return Tokens(
        **{name: values[places] for name, values in tokens.per_token().items()},
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        lag=pick_lag(tokens.lag, rows),
    ), places


def pick_lag(lag: Lag | None, rows: Sequence[int]) -> Lag | None:
    return None if lag is None else Lag(lag.newest[list(rows)], lag.oldest[list(rows)])


def filter_batch(
    tokens: Tokens, keys: Sequence[str], data: Mapping[str, Tensor], models: DictConfig, tokenizer: Any
) -> FilterBatch:
    """Returns the batch as filters see it.

    Args:
        tokens: as they were measured.
        keys: trajectory ids in the order of the rows.
        data: FILTER_FIELDS as nested tensors; verl's own rejection may have taken tokens out of response_mask since.
        models: the config's actor_rollout_ref.
    """
    packed = packed_like_mask(data, FILTER_FIELDS)
    return FilterBatch(
        tokens=replace(tokens, mask=packed[names.RESPONSE_MASK].bool()),
        keys=keys,
        rewards_B=tokens.row_sums(packed[names.REWARDS]),
        advantages_N=packed[names.ADVANTAGES],
        responses_N=packed[names.RESPONSES],
        max_response_length=models.rollout.response_length,
        eos_ids=end_tokens(models.model.path) | {tokenizer.eos_token_id},
        agreement_N=tokens.agreement,
        decode=partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


@lru_cache
def end_tokens(model_path: str) -> frozenset[int]:
    """Returns the token ids that end a response by the model's generation config; none if it has none."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(ids) - {None}
