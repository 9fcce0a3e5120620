"""Batch filters leave generated tokens and trajectories out of the update.

A filter takes tokens out of the response mask, as if they had not been sampled: the loss is the mean over the remaining
tokens, whereas a correction's weight of 0 does not change the divisor. Filters run one after another, each on the
tokens that the former ones kept. To add one, decorate a function with `@register_batch_filter`; its keyword arguments
are its settings:

    @register_batch_filter("long_only")
    def long_only(batch: FilterBatch, *, length: int) -> Tensor:
        return (batch.tokens.offsets.diff() >= length)[batch.tokens.row_of_token()]

Shape legend: N response tokens of all trajectories, B trajectories, S sessions, G groups.
"""

# ruff: noqa: N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from verl_ext.base.errors import ConfigError, MethodError
from verl_ext.base.methods import Method, Registry, require, require_method, settings_of
from verl_ext.core import torch
from verl_ext.core.advantages import Sessions, group_ids, require_finite
from verl_ext.core.tokens import Lag, Tokens

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
    """The input of a filter: a batch, or a block of a large one with all trajectories of its prompts.

    Attributes:
        tokens: the response tokens, packed without padding: the offsets give a trajectory's length.
        keys: [B] trajectory ids `{uid}_{session}_{index}`.
        rewards_B: [B] float, the reward of each trajectory.
        advantages_N: [N] float.
        responses_N: [N] int64 token ids.
        max_response_length: tokens after which the rollout cuts a response (verl's `data.max_response_length`).
        eos_ids: token ids that end a response.
        decode, encode: of the rollout's tokenizer; decode keeps special tokens, encode adds none.
        kept_N: [N] bool, the generated tokens that the former filters kept; for the first filter, all of them, or those
            that the corrections kept (`stability.denominator=kept`).
    """

    tokens: Tokens
    keys: Sequence[str]
    rewards_B: Tensor
    advantages_N: Tensor
    responses_N: Tensor
    max_response_length: int
    eos_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    kept_N: Tensor = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.kept_N is None:
            object.__setattr__(self, "kept_N", self.tokens.mask)
        rows, tokens = len(self.tokens.offsets) - 1, len(self.tokens.mask)
        expected = {"keys": rows, "rewards_B": rows, "advantages_N": tokens, "responses_N": tokens, "kept_N": tokens}
        wrong = [f"{name} {len(getattr(self, name))}" for name, n in expected.items() if len(getattr(self, name)) != n]
        if wrong:
            raise ValueError(
                f"a batch of {rows} trajectories and {tokens} tokens, with fields of another length: {wrong}"
            )

    @property
    def lag(self) -> Lag | None:
        """The lag of each trajectory: how much older than the policy its weights are."""
        return self.tokens.lag

    @property
    def agreement_N(self) -> Tensor | None:  # noqa: N802 (the shape)
        """[N] float in 0..1, share of a token's experts that both training and rollout chose."""
        return self.tokens.agreement

    def require(self, name: str, needed_by: str) -> Any:
        """Returns the optional field `name`; if it is None, a ConfigError names the setting that provides it."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"stability.filters.{needed_by} needs {name}, which {PROVIDED_BY[name]} provides")
        return value


@dataclass(frozen=True)
class FilterResult:
    """The result of a filter that also returns metrics.

    Attributes:
        keep_N: [N] bool, true = keep; ignored for tokens that a former filter dropped.
        metrics: logged as `filter/<name>/<metric>`. They are means over the trajectories that have kept tokens, so
            that the metrics of a large batch can be combined from those of its blocks. verl chooses how to combine
            steps by words in a metric's name (max, min, sum, total): avoid these words.
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
        sees_tokens: whether its choice depends on which tokens were sampled: on their ids, probabilities or number.
            Rewards, advantages, ages and the routing of the pass that predicts a token do not count. Score centering is
            valid only with filters for which this is false.
    """

    needs_agreement: bool = False
    needs_l_old: bool = False
    needs_lag: bool = False
    sees_tokens: bool = True


BATCH_FILTERS: Registry[BatchFilter] = Registry("batch filter")


def register_batch_filter(
    name: str, settings: type | None = None, **traits: bool
) -> Callable[[FilterFunction], FilterFunction]:
    """Registers a function of a FilterBatch and settings; `traits` are attributes of BatchFilter.

    Args:
        settings: a dataclass whose fields are the keyword arguments of the function; by default it is made from the
            function's keyword-only arguments.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: FilterFunction) -> FilterFunction:
        BATCH_FILTERS.add(BatchFilter(name, function, settings or settings_of(function), **traits))
        return function

    return register


def get_batch_filter(name: str) -> BatchFilter:
    """Returns the filter registered under `name`; raises a ConfigError that lists the known names if there is none."""
    require_method("stability.filters", name, BATCH_FILTERS)
    return BATCH_FILTERS[name]


@dataclass(frozen=True)
class FilterTally:
    """The effect of all filters on a batch or on a part of it; `merge_tallies` merges the tallies of parts.

    Attributes:
        tokens, trajectories: generated tokens, and trajectories that have one; `kept_*`: how many of them remain.
        seen: filter -> trajectories that still had tokens before it ran.
        dropped: filter -> tokens that it dropped among those that the former filters kept, and trajectories that lost
            their last tokens to it.
        own: (filter, metric) -> the filters' own metrics, means over the trajectories that the filter saw.
        examples: filter -> id of the first trajectory that lost a token to it.
    """

    tokens: int
    trajectories: int
    kept_tokens: int
    kept_trajectories: int
    seen: Mapping[str, int]
    dropped: Mapping[str, tuple[int, int]]
    own: Mapping[tuple[str, str], float]
    examples: Mapping[str, str]

    @property
    def metrics(self) -> dict[str, float]:
        """Returns `filter/*`: shares of the tokens and of the trajectories."""
        if not self.tokens:
            return {}
        metrics = dict[str, float]()
        for name, (tokens, trajectories) in self.dropped.items():
            metrics[f"filter/{name}/dropped_tokens"] = tokens / self.tokens
            metrics[f"filter/{name}/dropped_trajectories"] = trajectories / self.trajectories
        return metrics | {
            **{f"filter/{name}/{metric}": value for (name, metric), value in self.own.items()},
            "filter/kept_tokens": self.kept_tokens / self.tokens,
            "filter/kept_trajectories": self.kept_trajectories / self.trajectories,
        }

    @property
    def scale(self) -> float:
        """Trajectories with tokens over trajectories kept. A loss that divides by the tokens of its mask
        (`token-mean`) is the mean over the remaining tokens; for a loss that divides by a configured number of
        trajectories (`seq-mean-*`), divide that number by this scale. 1 if nothing is left."""
        return self.trajectories / self.kept_trajectories if self.kept_trajectories else 1.0

    @property
    def reason(self) -> str:
        """The reason why there is nothing to train on; empty if a token is left."""
        if not self.tokens:
            return "no trajectory has a token that the model generated"
        if self.kept_trajectories:
            return ""
        dropped = {"the corrections": self.tokens - sum(self.dropped[name][0] for name in self.examples)}
        dropped |= {name: self.dropped[name][0] for name in self.examples}
        shares = [f"{name} dropped {count / self.tokens:.0%}" for name, count in dropped.items() if count]
        return f"no token is left: {', '.join(shares)}"

    @property
    def empty(self) -> bool:
        return bool(self.reason)


@dataclass(frozen=True)
class FilterOutcome(FilterTally):
    """The tally, and the result for each token.

    Attributes:
        keep_N: [N] bool, the generated tokens that stay: the new mask of the loss.
    """

    keep_N: Tensor


def merge_tallies(parts: Sequence[FilterTally]) -> FilterTally:
    """Returns the tally of a batch in parts; a filter's own metrics are weighted by the trajectories that it saw."""

    def mean(name: str, metric: str) -> float:
        found = [(part.own[name, metric], part.seen[name]) for part in parts if (name, metric) in part.own]
        return sum(value * seen for value, seen in found) / sum(seen for _, seen in found)

    names = dict.fromkeys(name for part in parts for name in part.dropped)
    of_filter = {name: [part.dropped[name] for part in parts if name in part.dropped] for name in names}
    return FilterTally(
        tokens=sum(part.tokens for part in parts),
        trajectories=sum(part.trajectories for part in parts),
        kept_tokens=sum(part.kept_tokens for part in parts),
        kept_trajectories=sum(part.kept_trajectories for part in parts),
        seen={name: sum(part.seen.get(name, 0) for part in parts) for name in names},
        dropped={name: (sum(n for n, _ in found), sum(n for _, n in found)) for name, found in of_filter.items()},
        own={key: mean(*key) for key in dict.fromkeys(key for part in parts for key in part.own)},
        examples={name: example for part in reversed(parts) for name, example in part.examples.items()},
    )


def apply_filters(batch: FilterBatch, filters: Iterable[tuple[str, Mapping[str, Any]]]) -> FilterOutcome:
    """Runs filters in the order given, each on the tokens that the former ones kept.

    Args:
        filters: name and settings of each.

    Raises:
        ConfigError: a filter is unknown, or needs what the batch does not have.
        BatchError: a filter cannot judge the batch's numbers.
        MethodError: a filter returned something other than one bool per token.
    """
    tokens, kept = batch.tokens, batch.kept_N
    has_B, left_B = tokens.row_sums(tokens.mask) > 0, tokens.row_sums(kept) > 0
    seen: dict[str, int] = {}
    dropped: dict[str, tuple[int, int]] = {}
    own: dict[tuple[str, str], float] = {}
    examples = {}
    for name, settings in filters if tokens.count else ():
        result = get_batch_filter(name).function(replace(batch, kept_N=kept), **settings)
        if isinstance(result, torch.Tensor):
            result = FilterResult(result)
        if result.keep_N.dtype != torch.bool or result.keep_N.shape != kept.shape:
            raise MethodError(
                f"the batch filter {name} returned {result.keep_N.dtype} {tuple(result.keep_N.shape)}, where "
                f"torch.bool {tuple(kept.shape)} is expected: one entry per token, true = keep"
            )
        dropped_N = kept & ~result.keep_N
        kept = kept & result.keep_N
        before_B, left_B = left_B, tokens.row_sums(kept) > 0
        seen[name] = int(before_B.sum())
        dropped[name] = int(dropped_N.sum()), int((before_B & ~left_B).sum())
        if seen[name]:  # else its metrics are means over no trajectory
            own |= {(name, metric): value for metric, value in result.metrics.items()}
        if dropped_N.any():
            examples[name] = batch.keys[int(tokens.row_of_token()[int(dropped_N.byte().argmax())])]
    return FilterOutcome(
        tokens=tokens.count,
        trajectories=int(has_B.sum()),
        kept_tokens=int(kept.sum()),
        kept_trajectories=int(left_B.sum()),
        seen=seen,
        dropped=dropped,
        own=own,
        examples=examples,
        keep_N=kept,
    )


def first_drift(
    ids: Sequence[int],
    generated: Sequence[bool],
    decode: Callable[[list[int]], str],
    encode: Callable[[str], list[int]],
) -> int | None:
    """Returns the place where encode(decode(ids)) first differs from the ids of a response; None if all are equal.

    Each run of generated tokens is encoded by itself: the agent loop tokenised the text in between. If a run encodes to
    itself and more tokens, the index is the run's end, which may be the response's end.

    Args:
        ids: the response's token ids.
        generated: of the same length, true on tokens the model generated.
        decode, encode: of the rollout's tokenizer; decode keeps special tokens, encode adds none.
    """
    start = 0
    for is_generated, group in groupby(generated):
        run = list(ids[start : start + len(list(group))])
        if is_generated:
            again = encode(decode(run))
            if again != run:
                pairs = enumerate(zip(run, again, strict=False))
                return start + next((i for i, (a, b) in pairs if a != b), min(len(run), len(again)))
        start += len(run)
    return None


@register_batch_filter("overlong")
def overlong(batch: FilterBatch) -> Tensor:
    """Drops responses that hit `max_response_length` without an end-of-sequence token that the model wrote.

    Overlong filtering, DAPO (arXiv 2503.14476, section 3.4). verl's tool loop leaves out a tool's answer that would
    exceed the limit; such a response ends with the model's call, below the limit, and is not dropped.
    """
    tokens = batch.tokens
    lengths = tokens.offsets.diff()
    full = (lengths > 0) & (lengths >= batch.max_response_length)
    last = tokens.offsets[1:][full] - 1
    eos = torch.tensor(sorted(batch.eos_ids), dtype=batch.responses_N.dtype, device=batch.responses_N.device)
    keep_B = torch.ones_like(full)
    keep_B[full] = torch.isin(batch.responses_N[last], eos) & tokens.mask[last]
    return keep_B[tokens.row_of_token()]


@register_batch_filter("zero_variance", sees_tokens=False)
def zero_variance(batch: FilterBatch) -> Tensor:
    """Drops groups (prompts) whose sessions all have exactly the same reward: they have no advantage.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2) without the refill. A session counts by its final output,
    and counts even where a former filter dropped its tokens: its reward is part of the group's advantages. A group of
    one session is kept: in verl's GRPO, its advantage is its reward.

    Raises:
        BatchError: a reward is NaN or infinite.
    """
    sessions = Sessions.from_keys(batch.keys)
    group_S = group_ids(sessions.uid_S, batch.rewards_B.device)
    rewards_S = batch.rewards_B[sessions.final_S]
    require_finite(rewards_S)
    size = torch.bincount(group_S)
    nothing_G = rewards_S.new_zeros(len(size))
    low = nothing_G.scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)
    high = nothing_G.scatter_reduce(0, group_S, rewards_S, "amax", include_self=False)
    keep_G = (size == 1) | (low < high)
    return keep_G[group_S][sessions.session_B][batch.tokens.row_of_token()]


@dataclass(frozen=True)
class LowAgreement:
    """The bound of `low_agreement`.

    Attributes:
        threshold: drop a token if the share of its experts that both training and rollout chose is below this, from 0
            to 1.
    """

    threshold: float

    def __post_init__(self) -> None:
        require(self, "threshold", 0 <= self.threshold <= 1, "must be between 0 and 1")


@register_batch_filter("low_agreement", LowAgreement, needs_agreement=True, sees_tokens=False)
def low_agreement(batch: FilterBatch, *, threshold: float) -> Tensor:
    """Drops tokens of which less than this share of experts was chosen by both training and rollout."""
    # ~(a < b), not a >= b, here and below: NaN is no reason to drop; the guard refuses batches with NaN
    # log-probabilities.
    return ~(batch.require("agreement_N", "low_agreement") < threshold)


@dataclass(frozen=True)
class LowProbability:
    """The bound of `low_probability`.

    Attributes:
        threshold: drop a token that the rollout sampled at a probability below this, from 0 to 1.
    """

    threshold: float

    def __post_init__(self) -> None:
        require(self, "threshold", 0 <= self.threshold <= 1, "must be between 0 and 1")


@register_batch_filter("low_probability", LowProbability)
def low_probability(batch: FilterBatch, *, threshold: float) -> Tensor:
    """Drops tokens that the rollout sampled at a probability below this: they have most of the mismatch."""
    return ~(batch.tokens.l_infer.double().exp() < threshold)


@dataclass(frozen=True)
class OffPolicyNegative:
    """The bound of `off_policy_negative`.

    Attributes:
        delta: drop a response's tokens with A < 0 if its mean of l_infer - l_old is above this many nats per token, at
            least 0.
    """

    delta: float

    def __post_init__(self) -> None:
        require(self, "delta", 0 <= self.delta < math.inf, "must be at least 0 and finite")


@register_batch_filter("off_policy_negative", OffPolicyNegative, needs_l_old=True)
def off_policy_negative(batch: FilterBatch, *, delta: float) -> Tensor:
    """Drops tokens with A < 0 of trajectories whose mean of l_infer - l_old is above `delta` nats per token.

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9), before the update: l_theta is l_old, so it
    measures the mismatch of the engines (and in asynchronous modes the age of the rollout), not the policy's movement
    within the step. The mean is over the tokens kept so far; NaN counts as above delta, as in `opsm_mask`.
    """
    tokens = batch.tokens
    log_k = torch.where(batch.kept_N, tokens.l_old.double() - tokens.l_infer.double(), 0.0)
    near_B = -tokens.row_sums(log_k) <= delta * tokens.row_sums(batch.kept_N)  # false for NaN
    return near_B[tokens.row_of_token()] | ~(batch.advantages_N < 0)


@dataclass(frozen=True)
class TooStale:
    """The bound of `too_stale`.

    Attributes:
        versions: drop a trajectory whose oldest token is more than this many weight versions behind the policy, at
            least 0; only in asynchronous modes.
    """

    versions: int = field(metadata={"for example": 4})

    def __post_init__(self) -> None:
        require(self, "versions", self.versions >= 0, "must be at least 0")


@register_batch_filter("too_stale", TooStale, needs_lag=True, sees_tokens=False)
def too_stale(batch: FilterBatch, *, versions: int) -> Tensor:
    """Drops trajectories that were begun by weights more than `versions` versions behind the policy's.

    If a trajectory spans versions, the oldest counts. verl's `trainer.v1.sampler.max_off_policy_threshold` drops whole
    prompts before the batch is made, by the version at which they were handed out.
    """
    return (batch.require("lag", "too_stale").oldest <= versions)[batch.tokens.row_of_token()]


@register_batch_filter("retokenization_drift")
def retokenization_drift(batch: FilterBatch) -> FilterResult:
    """Drops each trajectory's tokens from the first that encode(decode(ids)) changes (`first_drift`).

    Trajectories without kept tokens are not checked. A response cut inside a character drifts at its end.

    Metric:
        drifted: share of the trajectories with kept tokens whose encoding differs.
    """
    decode = batch.require("decode", "retokenization_drift")
    encode = batch.require("encode", "retokenization_drift")
    tokens = batch.tokens
    keep_N = torch.ones_like(tokens.mask)
    drifted = looked_at = 0
    for start, stop in pairwise(tokens.offsets.tolist()):
        if batch.kept_N[start:stop].any():
            looked_at += 1
            ids, generated = batch.responses_N[start:stop].tolist(), tokens.mask[start:stop].tolist()
            first = first_drift(ids, generated, decode, encode)
            if first is not None:
                keep_N[start + first : stop] = False
                drifted += 1
    return FilterResult(keep_N, {"drifted": drifted / max(looked_at, 1)})
