"""Batch filters: which generated tokens and trajectories are left out of the update.

A filter takes tokens out of the response mask, as if they had not been sampled: the loss is the mean over what is left,
where a correction's weight of 0 leaves the divisor alone. Filters run one after another, each on what the former ones
kept. The filters themselves are in `verl_ext.core.filters`.

Shape legend: N response tokens of all trajectories, B trajectories.
"""

# ruff: noqa: N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl_ext.core.lag import Lag
from verl_ext.core.lazily import torch
from verl_ext.core.tokens import Tokens
from verl_ext.errors import ConfigError
from verl_ext.methods import Method, Registry, settings_of

if TYPE_CHECKING:
    from torch import Tensor

PROVIDED_BY = {
    "agreement_N": "stability.router_agreement=true",
    "decode": "the tokenizer of actor_rollout_ref.model.path",
    "encode": "the tokenizer of actor_rollout_ref.model.path",
    "lag": "an asynchronous trainer.v1.trainer_mode",
}


@dataclass(frozen=True)
class FilterBatch:
    """What a filter may look at.

    Attributes:
        tokens: the response tokens, packed without padding: a trajectory's length is what the offsets say.
        keys: [B] trajectory ids `{uid}_{session}_{index}`.
        rewards_B: [B] float, the reward of each trajectory.
        advantages_N: [N] float.
        responses_N: [N] int64 token ids.
        max_response_length: tokens after which the rollout cuts a response (verl's `data.max_response_length`).
        eos_ids: token ids that end a response.
        agreement_N: [N] float in 0..1, share of a token's experts that training and rollout chose in common.
        decode, encode: of the rollout's tokenizer, special tokens kept by the one and not added by the other.
        kept_N: [N] bool, the generated tokens that the former filters kept; for the first, all of them, or those that a
            correction kept (`stability.denominator=kept`).
    """

    tokens: Tokens
    keys: Sequence[str]
    rewards_B: Tensor
    advantages_N: Tensor
    responses_N: Tensor
    max_response_length: int
    eos_ids: frozenset[int]
    agreement_N: Tensor | None = None
    decode: Callable[[list[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    kept_N: Tensor = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.kept_N is None:
            object.__setattr__(self, "kept_N", self.tokens.mask)
        rows, tokens = len(self.tokens.offsets) - 1, len(self.tokens.mask)
        expected = {"keys": rows, "rewards_B": rows, "advantages_N": tokens, "responses_N": tokens, "kept_N": tokens}
        if self.agreement_N is not None:
            expected["agreement_N"] = tokens
        wrong = [f"{name} {len(getattr(self, name))}" for name, n in expected.items() if len(getattr(self, name)) != n]
        if wrong:
            raise ValueError(f"a batch of {rows} trajectories and {tokens} tokens, but of other length: {wrong}")

    @property
    def lag(self) -> Lag | None:
        """How much older than the policy the weights are that sampled each trajectory."""
        return self.tokens.lag

    def require(self, name: str, needed_by: str) -> Any:
        """The optional field `name`; ConfigError, naming what provides it, where it is None."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"stability.filters.{needed_by} needs {name}, which {PROVIDED_BY[name]} provides")
        return value


@dataclass(frozen=True)
class FilterResult:
    """What a filter returns that has more to tell than which tokens it keeps.

    Attributes:
        keep_N: [N] bool, true = keep; what is not a kept token already does not matter.
        metrics: logged as `filter/<name>/<metric>`. verl combines steps by words in a metric's name (max, min, sum,
            total): avoid these.
    """

    keep_N: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)


FilterFunction = Callable[..., "Tensor | FilterResult"]


@dataclass(frozen=True)
class BatchFilter(Method):
    """`function(batch, *, setting, ...) -> keep_N`, [N] bool, or FilterResult.

    Attributes:
        needs_agreement: whether it reads `agreement_N`.
        needs_l_old: whether it reads the tokens' l_old, which in bypass mode is not known before the update.
        needs_lag: whether it reads `lag`.
    """

    needs_agreement: bool = False
    needs_l_old: bool = False
    needs_lag: bool = False


BATCH_FILTERS: Registry[BatchFilter] = Registry("batch filter")


def register_batch_filter(
    name: str,
    settings: type | None = None,
    *,
    needs_agreement: bool = False,
    needs_l_old: bool = False,
    needs_lag: bool = False,
) -> Callable[[FilterFunction], FilterFunction]:
    """Register a function of a FilterBatch and settings; see BatchFilter.

    Args:
        settings: a dataclass, a field a keyword argument of the function; by default the function's keyword-only
            arguments themselves.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: FilterFunction) -> FilterFunction:
        given = settings or settings_of(function)
        BATCH_FILTERS.add(BatchFilter(name, function, given, needs_agreement, needs_l_old, needs_lag))
        return function

    return register


def get_batch_filter(name: str) -> BatchFilter:
    """The filter registered under `name`; ConfigError, listing the known ones, if there is none."""
    if name not in BATCH_FILTERS:
        raise ConfigError(f"stability.filters.{name} is not known; choose from: {', '.join(BATCH_FILTERS)}")
    return BATCH_FILTERS[name]


@dataclass(frozen=True)
class FilterOutcome:
    """What all filters together did.

    Attributes:
        keep_N: [N] bool, the generated tokens that stay: the new mask of the loss.
        scale: trajectories with tokens over trajectories kept. A loss that divides by the tokens of its mask
            (`token-mean`) is the mean over what is left; one that divides by a configured number of trajectories
            (`seq-mean-*`) becomes it when that number is divided by this. 1 where nothing is left.
        metrics: shares of the batch's generated tokens and of its trajectories that have one:
            filter/kept_tokens, filter/kept_trajectories: left in the end.
            filter/<name>/dropped_tokens: taken by this filter from what the former ones kept.
            filter/<name>/dropped_trajectories: that lost all they had left to this filter.
        examples: filter -> id of the first trajectory that lost a token to it.
        reason: why there is nothing to train on; empty where there is.
    """

    keep_N: Tensor
    scale: float
    metrics: dict[str, float]
    examples: dict[str, str]
    reason: str = ""

    @property
    def empty(self) -> bool:
        return bool(self.reason)


def apply_filters(batch: FilterBatch, filters: Iterable[tuple[str, Mapping[str, Any]]]) -> FilterOutcome:
    """Run filters in the order given, each on what the former ones kept.

    Args:
        filters: name and settings of each.

    Raises:
        ConfigError: a filter is unknown, or needs what the batch does not have.
        BatchError: a filter cannot judge the batch's numbers.
        ValueError: a filter returned something else than a bool a token.
    """
    tokens, kept = batch.tokens, batch.kept_N
    count = tokens.count
    if count == 0:
        return FilterOutcome(kept, 1.0, {}, {}, "no trajectory has a token that the model generated")
    trajectories = int((tokens.row_sums(tokens.mask) > 0).sum())
    left_B = tokens.row_sums(kept) > 0
    metrics: dict[str, float] = {}
    examples = {}
    for name, settings in filters:
        result = get_batch_filter(name).function(replace(batch, kept_N=kept), **settings)
        if isinstance(result, torch.Tensor):
            result = FilterResult(result)
        if result.keep_N.dtype != torch.bool or result.keep_N.shape != kept.shape:
            raise ValueError(
                f"the batch filter {name} returned {result.keep_N.dtype} {tuple(result.keep_N.shape)}, where "
                f"torch.bool {tuple(kept.shape)} is expected: one entry a token, true = keep"
            )
        dropped = kept & ~result.keep_N
        kept = kept & result.keep_N
        before_B, left_B = left_B, tokens.row_sums(kept) > 0
        metrics[f"filter/{name}/dropped_tokens"] = int(dropped.sum()) / count
        metrics[f"filter/{name}/dropped_trajectories"] = int((before_B & ~left_B).sum()) / trajectories
        metrics |= {f"filter/{name}/{metric}": value for metric, value in result.metrics.items()}
        if dropped.any():
            examples[name] = batch.keys[int(tokens.row_of_token()[int(dropped.byte().argmax())])]
    kept_trajectories = int(left_B.sum())
    metrics["filter/kept_tokens"] = int(kept.sum()) / count
    metrics["filter/kept_trajectories"] = kept_trajectories / trajectories
    if kept_trajectories == 0:
        shares = [f"{name} dropped {metrics[f'filter/{name}/dropped_tokens']:.0%}" for name in examples]
        return FilterOutcome(kept, 1.0, metrics, examples, f"the filters left no token: {', '.join(shares)}")
    return FilterOutcome(kept, trajectories / kept_trajectories, metrics, examples)
