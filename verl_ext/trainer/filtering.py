"""What the batch filters see of verl's batch and of its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from verl_ext.core.filters import FilterBatch
from verl_ext.core.tokens import Tokens
from verl_ext.fields import ADVANTAGES, RESPONSE_MASK, RESPONSES, REWARDS
from verl_ext.trainer.batch import packed_like_mask

FILTER_FIELDS = (RESPONSE_MASK, RESPONSES, ADVANTAGES, REWARDS)


def filter_batch(
    tokens: Tokens, keys: Sequence[str], data: Mapping[str, Tensor], models: DictConfig, tokenizer: Any
) -> FilterBatch:
    """The batch as filters see it.

    Args:
        tokens: as they were measured.
        keys: trajectory ids in the order of the rows.
        data: FILTER_FIELDS as nested tensors; verl's own rejection may have taken tokens out of response_mask since.
        models: the config's actor_rollout_ref.
    """
    packed = packed_like_mask(data, FILTER_FIELDS)
    return FilterBatch(
        tokens=replace(tokens, mask=packed[RESPONSE_MASK].bool()),
        keys=keys,
        rewards_B=tokens.row_sums(packed[REWARDS]),
        advantages_N=packed[ADVANTAGES],
        responses_N=packed[RESPONSES],
        max_response_length=models.rollout.response_length,
        eos_ids=end_tokens(models.model.path) | {tokenizer.eos_token_id},
        agreement_N=tokens.agreement,
        decode=partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


@lru_cache
def end_tokens(model_path: str) -> frozenset[int]:
    """The token ids that end a response by the model's generation config; none where it has none."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(ids) - {None}
