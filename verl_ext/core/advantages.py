"""Advantages of outcome rewards: a session's reward relative to its group.

verl's trajectory ids, `{uid}_{session}_{index}`, show which rows belong together. A prompt (uid) is sampled in several
sessions, and an agent loop may return several outputs per session, one row each. The last output carries the session's
reward: group statistics count every session once.

Shape legend: B rows, S sessions, G groups (the sessions of one prompt). Statistics run in float64.
"""

# ruff: noqa: N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ext.base.errors import BatchError
from verl_ext.base.methods import Method, Registry, require, settings_of
from verl_ext.base.names import PROMPT_EFFECT
from verl_ext.core import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sessions:
    """The sessions of a batch, in the order of their first row.

    Attributes:
        final_S: the row of each session's last output.
        session_B: the session of each row.
        uid_S: the prompt each session answers.
    """

    final_S: list[int]
    session_B: list[int]
    uid_S: list[str]

    @classmethod
    def from_keys(cls, keys: Sequence[str]) -> Sessions:
        """Reads trajectory ids, in any order; a uid may contain underscores.

        Raises:
            BatchError: a key is not `{uid}_{session}_{index}`.
        """
        sessions: dict[tuple[str, str], int] = {}
        last: list[tuple[int, int]] = []  # (index, row) of each session's latest output
        session_B = []
        for row, key in enumerate(keys):
            head, _, index = key.rpartition("_")
            uid, _, session = head.rpartition("_")
            if not uid or not index.isdecimal():
                raise BatchError(f"the trajectory id {key!r} is not {{uid}}_{{session}}_{{index}}")
            output, number = (int(index), row), sessions.setdefault((uid, session), len(sessions))
            if number == len(last):
                last.append(output)
            last[number] = max(last[number], output)
            session_B.append(number)
        return cls([row for _, row in last], session_B, [uid for uid, _ in sessions])


def group_ids(names: Sequence[object], device: torch.device | None = None) -> Tensor:
    """Returns [S] int64: 0, 1, ... for each different name, in the order of appearance."""
    ids: dict[object, int] = {}
    return torch.tensor([ids.setdefault(name, len(ids)) for name in names], dtype=torch.long, device=device)


def prompt_effect(rewards_B: Tensor, keys: Sequence[str]) -> float | None:
    """Returns a batch's F, the variance of the reward between prompts over the variance within them.

    One-way analysis of variance: F = [sum over prompts of n (mean - total mean)^2 / (G - 1)] / [sum over sessions of
    (reward - mean of the prompt)^2 / (S - G)]. Its expectation is near 1 where the reward does not depend on the
    prompt, as for a grader that returns random numbers. A session counts once, by its last output.

    Args:
        rewards_B: [B] float, the reward of each trajectory.
        keys: [B] trajectory ids.

    Returns:
        F; None where it is not defined: one prompt, one session per prompt, or equal rewards within each prompt.
    """
    sessions = Sessions.from_keys(keys)
    rewards_S = rewards_B.double()[sessions.final_S]
    group_S = group_ids(sessions.uid_S, rewards_S.device)
    groups, total = _group_count(group_S), len(group_S)
    _, centred, _ = _group_statistics(rewards_S, group_S)
    within = centred.square().sum().item()
    if not 1 < groups < total or within == 0:
        return None
    between = (rewards_S - centred - rewards_S.mean()).square().sum().item()
    return (between / (groups - 1)) / (within / (total - groups))


def reward_metrics(rewards_B: Tensor, keys: Sequence[str]) -> dict[str, float]:
    """Returns `prompt_effect` as a metric; nothing where it is not defined or a reward is not finite.

    The guard refuses a batch with such a reward, by the mean.
    """
    effect = prompt_effect(rewards_B, keys) if torch.isfinite(rewards_B).all() else None
    return {} if effect is None else {PROMPT_EFFECT: effect}


EPSILON = 1e-6  # verl's, added to the standard deviation

# `function(rewards_S, group_S, *, norm_by_std, **settings) -> advantages_S`
ESTIMATORS: Registry[Method] = Registry("estimator")


def register_estimator(
    name: str, settings: type | None = None
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a function of one reward per session, which becomes `algorithm.adv_estimator=NAME`.

    Args:
        settings: the dataclass of `algorithm.NAME`; each field is a keyword argument of the function. By default, the
            fields are the function's keyword-only arguments, except `norm_by_std`.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        ESTIMATORS.add(Method(name, function, settings or settings_of(function, "norm_by_std")))
        return function

    return register


@no_grad
def advantages_of_rows(
    advantages_of_sessions: Callable[[Tensor, Tensor], Tensor],
    rewards_B: Tensor,
    uids: Sequence[object],
    keys: Sequence[str] | None = None,
) -> Tensor:
    """Returns [B] float64: each row has its session's advantage, and each session counts once, by its last output.

    Args:
        advantages_of_sessions: an estimator with its settings, from (rewards_S, group_S) to [S].
        rewards_B: [B] float, the reward of each row.
        uids: [B]; rows of the same uid form a group.
        keys: [B] trajectory ids; None if every row is a session of its own.

    Raises:
        BatchError: a reward is NaN or infinite, or the keys do not fit the batch.
    """
    if keys is not None and len(keys) != len(uids):
        raise BatchError(f"session_keys has {len(keys)} trajectory ids and the batch {len(uids)} rows")
    final_S = session_B = list(range(len(uids)))
    if keys is not None:
        sessions = Sessions.from_keys(keys)
        final_S, session_B = sessions.final_S, sessions.session_B
    group_S = group_ids([uids[row] for row in final_S], rewards_B.device)
    advantages_S = advantages_of_sessions(rewards_B.double()[final_S], group_S)
    return advantages_S[session_B]


def _group_statistics(rewards_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the size of each session's group, its reward minus the group's mean, and the group's std; [S] float64
    each."""
    require_finite(rewards_S)
    nothing_G = rewards_S.new_zeros(_group_count(group_S))
    size = nothing_G.index_add(0, group_S, torch.ones_like(rewards_S))
    # Relative to the group's least reward, so that equal rewards give exactly 0: dividing a rounding error by a
    # standard deviation of almost 0 would make an advantage.
    low = nothing_G.scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)
    above = rewards_S - low[group_S]
    centred = above - (nothing_G.index_add(0, group_S, above) / size)[group_S]
    squares = nothing_G.index_add(0, group_S, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return size[group_S], centred, std[group_S]


def _group_count(group_S: Tensor) -> int:
    return int(group_S.max()) + 1 if len(group_S) else 0


def require_finite(rewards: Tensor) -> None:
    """Raises BatchError, naming the tensor, if a reward is NaN or infinite."""
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise BatchError(
            f"rewards (verl's rm_scores) has {len(bad)} of {len(rewards)} values that are NaN or infinite, the first "
            f"of them {rewards[bad[0]].item()} at {bad[0]}: the reward function must return finite numbers"
        )


def quantile_baselines(rewards_S: Tensor, group_S: Tensor, k: float) -> Tensor:
    """Returns [S] float64, the K-quantile inf{x : F(x) >= k} of each session's group, with F its empirical
    distribution.

    It is always one of the group's rewards. With rewards 0 and 1 and a share p of ones it is 0 where p <= 1 - k, else
    1.
    """
    rewards_S = rewards_S.double()
    by_reward = rewards_S.argsort(stable=True)
    order = by_reward[group_S[by_reward].argsort(stable=True)]
    rewards, groups = rewards_S[order], group_S[order]
    size = torch.bincount(groups, minlength=_group_count(group_S))
    rank = torch.arange(1, len(rewards) + 1, device=rewards.device) - (size.cumsum(0) - size)[groups]
    # rank / size is the float nearest to a decimal such as 0.4, where k * size need not be an integer exactly.
    reached = rank.double() / size[groups] >= k
    baseline_G = rewards.new_zeros(len(size))
    baseline_G.scatter_reduce_(0, groups[reached], rewards[reached], "amin", include_self=False)
    return baseline_G[group_S]


@dataclass(frozen=True)
class Qae:
    """The settings of `algorithm.qae`.

    Attributes:
        k: the quantile of a group's rewards that is its baseline, between 0 and 1, both excluded. 0.4 is the paper's
            default; it takes 0.6 where the entropy is low.
    """

    k: float = 0.4

    def __post_init__(self) -> None:
        require(self, "k", 0 < self.k < 1, "must be between 0 and 1, both excluded")


@register_estimator("qae", Qae)
def quantile_baseline_advantages(rewards_S: Tensor, group_S: Tensor, *, k: float, norm_by_std: bool = True) -> Tensor:
    """Returns (R - b_K) / (std + 1e-6): the baseline b_K is the group's K-quantile instead of its mean.

    "Quantile Advantage Estimation" (QAE, arXiv 2509.22611, eq. 3 and 4), K = 0.4. Hard groups, p <= 1 - K, reinforce
    their rare successes only, easy ones punish their rare failures only. The authors' code (junkangwu/QAE) interpolates
    between rewards (`torch.quantile`), so that a baseline may lie between 0 and 1 and both kinds of group are updated;
    this function follows the paper. std is the sample standard deviation, as in their code and in verl's GRPO.

    A group of one has advantage 0, because its only reward is its every quantile. So has a group of equal rewards.

    Args:
        rewards_S: [S] float, one reward per session.
        group_S: [S] int64, 0 <= id < G, any order.
        k: 0 < k < 1.
        norm_by_std: divide by the standard deviation, as the paper does.

    Returns [S] float64.

    Raises:
        BatchError: a reward is NaN or infinite.
    """
    rewards_S = rewards_S.double()
    _, _, std = _group_statistics(rewards_S, group_S)
    advantages = rewards_S - quantile_baselines(rewards_S, group_S, k)
    return advantages / (std + EPSILON) if norm_by_std else advantages


@dataclass(frozen=True)
class GrpoPositive:
    """The settings of `algorithm.grpo_positive`.

    Attributes:
        negative_scale: the factor of negative advantages: 0 drops them, 1 is GRPO.
    """

    negative_scale: float = 0.0

    def __post_init__(self) -> None:
        rule = "must be at least 0 and finite: it multiplies the negative advantages, and 0 drops them"
        require(self, "negative_scale", 0 <= self.negative_scale < math.inf, rule)


@register_estimator("grpo_positive", GrpoPositive)
def grpo_positive_advantages(
    rewards_S: Tensor, group_S: Tensor, *, negative_scale: float, norm_by_std: bool = True
) -> Tensor:
    """Returns GRPO's advantage (R - mean) / (std + 1e-6); negative ones are multiplied by `negative_scale`.

    With 0, responses below their group's mean are not pushed down: +1 and -1 become +1 and 0. With 1 it is verl's GRPO
    (`compute_grpo_outcome_advantage`), including the rule for a group of one: mean 0 and std 1, so the advantage is the
    reward itself, as in REINFORCE without a baseline. All-equal groups have advantage 0 exactly.

    Args, returns and errors as in `quantile_baseline_advantages`; negative_scale >= 0.
    """
    rewards_S = rewards_S.double()
    size, centred, std = _group_statistics(rewards_S, group_S)
    single = size == 1
    advantages = torch.where(single, rewards_S, centred)
    if norm_by_std:
        advantages = advantages / (torch.where(single, 1.0, std) + EPSILON)
    return torch.where(advantages < 0, advantages * negative_scale, advantages)
