"""The batch filters; see `verl_ext.core.filtering` for what they are run by.

One of your own is a function under `@register_batch_filter`, its settings keyword arguments:

    @register_batch_filter("long_only")
    def long_only(batch: FilterBatch, *, length: int) -> Tensor:
        return (batch.tokens.offsets.diff() >= length)[batch.tokens.row_of_token()]

Shape legend: N response tokens of all trajectories, B trajectories, S sessions, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from verl_ext.core.advantages import require_finite
from verl_ext.core.filtering import FilterBatch, FilterResult, register_batch_filter
from verl_ext.core.lazily import torch
from verl_ext.core.retokenization import first_drift
from verl_ext.core.sessions import Sessions, group_ids
from verl_ext.methods import require

if TYPE_CHECKING:
    from torch import Tensor


@register_batch_filter("overlong")
def overlong(batch: FilterBatch) -> Tensor:
    """Drop responses that hit `max_response_length` without ending in an end-of-sequence token that the model wrote.

    Overlong filtering, DAPO (arXiv 2503.14476, section 3.4). verl's tool loop leaves out a tool's answer that would
    pass the limit; such a response ends with the model's call, below the limit, and is not dropped.
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
    """Drop groups (prompts) whose sessions all have exactly the same reward: they have no advantage.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2) without the refill. A session counts by its final output,
    and counts even where a former filter dropped its tokens: its reward is part of the group's advantages. A group of
    one session is kept: it has nothing to be equal to, and verl's GRPO gives it its reward as the advantage.

    Raises:
        BatchError: a reward is NaN or infinite.
    """
    sessions = Sessions.from_keys(batch.keys)
    device = batch.rewards_B.device
    group_S = torch.tensor(group_ids(sessions.uid_S), dtype=torch.long, device=device)
    rewards_S = batch.rewards_B[torch.tensor(sessions.final_S, dtype=torch.long, device=device)]
    require_finite(rewards_S)
    size = torch.bincount(group_S)
    low, high = (
        rewards_S.new_zeros(len(size)).scatter_reduce_(0, group_S, rewards_S, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    keep_G = (size == 1) | (low < high)
    keep_B = keep_G[group_S][torch.tensor(sessions.session_B, dtype=torch.long, device=device)]
    return keep_B[batch.tokens.row_of_token()]


@dataclass(frozen=True)
class LowAgreement:
    """The share of common experts below which a token is dropped."""

    threshold: float

    def __post_init__(self) -> None:
        require(self, "threshold", 0 <= self.threshold <= 1, "must be between 0 and 1")


@register_batch_filter("low_agreement", LowAgreement, needs_agreement=True, sees_tokens=False)
def low_agreement(batch: FilterBatch, *, threshold: float) -> Tensor:
    """Drop tokens for which training and rollout chose less than this share of experts in common."""
    # ~(a < b), not a >= b, here and below: NaN is no reason to drop; the guard refuses log-probabilities that are one.
    return ~(batch.require("agreement_N", "low_agreement") < threshold)


@dataclass(frozen=True)
class LowProbability:
    """The rollout's probability below which a token is dropped."""

    threshold: float

    def __post_init__(self) -> None:
        require(self, "threshold", 0 <= self.threshold <= 1, "must be between 0 and 1")


@register_batch_filter("low_probability", LowProbability)
def low_probability(batch: FilterBatch, *, threshold: float) -> Tensor:
    """Drop tokens that the rollout sampled at a probability below this: they carry most of the mismatch."""
    return ~(batch.tokens.l_infer.double().exp() < threshold)


@dataclass(frozen=True)
class OffPolicyNegative:
    """Mean of l_infer - l_old, in nats a token, past which a trajectory's tokens with A < 0 are dropped."""

    delta: float

    def __post_init__(self) -> None:
        require(self, "delta", 0 <= self.delta < math.inf, "must be at least 0 and finite")


@register_batch_filter("off_policy_negative", OffPolicyNegative, needs_l_old=True)
def off_policy_negative(batch: FilterBatch, *, delta: float) -> Tensor:
    """Drop tokens with A < 0 of trajectories whose mean of l_infer - l_old passes `delta` nats a token.

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9), before the update: l_theta is l_old, so that
    it sees the mismatch of the engines (and in asynchronous modes the age of the rollout), not the policy's movement
    within the step. The mean is over the tokens kept so far; one that is NaN counts as past delta, as in `opsm_mask`.
    """
    tokens = batch.tokens
    gap = torch.where(batch.kept_N, tokens.l_infer.double() - tokens.l_old.double(), 0.0)
    near_B = tokens.row_sums(gap) <= delta * tokens.row_sums(batch.kept_N)  # false for NaN
    return near_B[tokens.row_of_token()] | ~(batch.advantages_N < 0)


@dataclass(frozen=True)
class TooStale:
    """How many weight versions a trajectory's oldest token may be behind the policy; what is older is dropped."""

    versions: int = field(metadata={"for example": 4})

    def __post_init__(self) -> None:
        require(self, "versions", self.versions >= 0, "must be at least 0")


@register_batch_filter("too_stale", TooStale, needs_lag=True, sees_tokens=False)
def too_stale(batch: FilterBatch, *, versions: int) -> Tensor:
    """Drop trajectories that weights more than `versions` versions behind the policy's began.

    Of one that spans versions, the oldest counts. verl's `trainer.v1.sampler.max_off_policy_threshold` drops whole
    prompts before the batch is made, by when they were handed out.
    """
    return (batch.require("lag", "too_stale").oldest <= versions)[batch.tokens.row_of_token()]


@register_batch_filter("retokenization_drift")
def retokenization_drift(batch: FilterBatch) -> FilterResult:
    """Drop each trajectory from the first token on that encode(decode(ids)) does not give back: `first_drift`.

    Trajectories of which nothing is kept are passed over. A response cut inside a character drifts at its end.

    Metric:
        drifted: share of the trajectories with kept tokens that encode otherwise.
    """
    decode, encode = (batch.require(name, "retokenization_drift") for name in ("decode", "encode"))
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
