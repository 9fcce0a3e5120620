"""The share of an update that reached a rollout engine, from the scores that both engines give the same tokens.

Between two scorings, a token's log-probability moves by x under the training engine and by y under the rollout engine.
A weight sync in between makes y = x up to rounding; a sync that did not happen leaves y = 0. The share that arrived is
the median of y / x over the tokens that training moved most. Single tokens may move far in one engine only, because
their experts flip; half of the tokens would have to do so to decide a median. The training engine rounds differently in
each scoring. This noise makes the quotient too small. Its power is at most twice that of the gap, which is subtracted
for the upper end.

A token's score depends on the whole prefix: equal prefixes are one observation, and the tokens after a prefix share
what happened in it. So the tokens come from answers to several prompts, each prefix once, and the error is that of a
median of prompts.

Shape legend: N tokens.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.base.names import FEWEST_PROMPTS

FEWEST_TOKENS = 16
STANDARD_ERRORS = 3.0  # to either side
MISSING_SHARE = 0.9  # an upper end below it: at least a part of the update did not arrive
ARRIVED_SHARE = 0.75  # a lower end above it, and half of the tokens within LARGEST_REST: the update arrived
LARGEST_REST = 0.08  # distance of y / x from 1, besides rounding
UPPER_TO_MEDIAN = 2.91  # of squared normal numbers: the median of the larger half, over the median of all


@dataclass(frozen=True)
class Arrival:
    """The share of an update that reached the rollout, as an interval.

    Attributes:
        low, high: its ends; `high` is infinite while the gap may hide the update. 0 to infinity means that nothing is
            known.
        moved: root mean square of x, in nats per token.
        median: the median of y / x, over the half of the tokens that training moved most; nan if it is not known.
        spread: the median distance of y / x from that median.
        apart: the median distance of y / x from 1.
        rounding: the median of the gap before the update over that of x, of these tokens.
    """

    low: float
    high: float
    moved: float
    median: float = math.nan
    spread: float = math.nan
    apart: float = math.nan
    rounding: float = math.nan

    @property
    def known(self) -> bool:
        return self.low > 0 or math.isfinite(self.high)

    @property
    def missing(self) -> bool:
        return self.high < MISSING_SHARE

    @property
    def arrived(self) -> bool:
        return self.low > ARRIVED_SHARE and self.apart < LARGEST_REST + self.rounding


def arrival(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor], prompt_N: Tensor) -> Arrival:
    """Compares log-probabilities of the same tokens, [N] before and [N] after the update and its sync.

    Tokens with a value that is not finite are left out. With fewer than FEWEST_TOKENS, or if training moved the tokens
    of fewer than FEWEST_PROMPTS, nothing is known.

    Args:
        prompt_N: the number of the prompt that each token's trajectory answers.
    """
    (before, after, infer_before, infer_after), finite_N = _finite_scores(train, infer)
    x, y, gap, prompt = after - before, infer_after - infer_before, before - infer_before, prompt_N[finite_N]
    moved = x.square().mean().sqrt().item() if len(x) else 0.0
    most = x.abs().topk(-(-len(x) // 2)).indices
    most = most[x[most] != 0]
    prompts = prompt[most].unique()
    if len(x) < FEWEST_TOKENS or len(prompts) < FEWEST_PROMPTS:
        return Arrival(0.0, math.inf, moved)
    shares, gap = y[most] / x[most], gap[most]
    median = shares.quantile(0.5)
    # The jackknife by prompt. Its factor (G - 1) / G is left out, because a few prompts may agree by chance.
    without = torch.stack([shares[prompt[most] != each].quantile(0.5) for each in prompts])
    error = STANDARD_ERRORS * (without - median).square().sum().sqrt().item()
    rounding = ((gap - gap.quantile(0.5)).abs().quantile(0.5) / x[most].abs().quantile(0.5)).item()
    least = 1 - 2 * UPPER_TO_MEDIAN * rounding**2  # the power of the weights' movement alone, over that of x
    high = max(median.item() + error, 0.0) / least if least > 0 else math.inf
    spread, apart = ((shares - of).abs().quantile(0.5).item() for of in (median, 1.0))
    return Arrival(max(median.item() - error, 0.0), high, moved, median.item(), spread, apart, rounding)


def movement(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> float:
    """Returns the median movement of a token's score between two checks in the rollout, divided by that in training.

    The arguments are those of `arrival`. nan with fewer than FEWEST_TOKENS finite tokens, or if the training score did
    not move.
    """
    (before, after, infer_before, infer_after), _ = _finite_scores(train, infer)
    moved = (after - before).abs().median().item() if len(before) >= FEWEST_TOKENS else 0.0
    return (infer_after - infer_before).abs().median().item() / moved if moved else math.nan


def prompt_numbers(keys: Iterable[str]) -> list[int]:
    """Returns the number of each trajectory's prompt, from verl's trajectory ids, `{uid}_{session}_{index}`."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key.rsplit("_", 2)[0], len(numbers)) for key in keys]


def spread_rows(prompts: Iterable[int], count: int) -> list[int]:
    """Returns the rows of `count` trajectories: one answer to each prompt, then a second one to each, and so on.

    Args:
        prompts: the prompt of each row.
    """
    answers: Counter[int] = Counter()
    ranked = []
    for row, prompt in enumerate(prompts):
        ranked.append((answers[prompt], row))
        answers[prompt] += 1
    return [row for _, row in sorted(ranked)[:count]]


def new_prefixes(sequences: Iterable[Sequence[int]]) -> list[list[bool]]:
    """Returns for each token whether it ends a prefix that no earlier sequence has."""
    tree: dict[tuple[int, int], int] = {}  # (number of a prefix, next token) -> number of the longer prefix
    marks = []
    for tokens in sequences:
        prefix, new = 0, []
        for token in tokens:
            known = len(tree)
            prefix = tree.setdefault((prefix, token), known + 1)
            new.append(prefix > known)
        marks.append(new)
    return marks


def _finite_scores(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns [4, n] scores of the tokens that have only finite ones, and [N] which these are."""
    scores_4N = torch.stack([*train, *infer]).double()
    finite_N = scores_4N.isfinite().all(0)
    return scores_4N[:, finite_N], finite_N
