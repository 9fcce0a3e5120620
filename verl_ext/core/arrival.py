"""The share of an update that reached a rollout engine, from the scores that both engines give the same tokens.

Between two scorings, a token's log-probability moves by x under the training engine and by y under the rollout engine.
A weight sync in between makes y = x up to rounding; a sync that did not happen leaves y = 0. So the share that arrived
is E[x y] / E[x^2]: a matched filter, which detects updates far below the gap of the engines, because the gap does not
move with x. The training engine rounds differently in each scoring. This noise counts only in E[x^2] and makes the
quotient too small. Its power is at most twice that of the gap, which is subtracted for the upper end.

Shape legend: N tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_TOKENS = 16
STANDARD_ERRORS = 4.0  # to either side
MISSING_SHARE = 0.75  # an upper end below it: at least a part of the update did not arrive
ARRIVED_SHARE = 0.5  # a lower end above it: the update arrived
LEAST_REST = 1e-9  # a bound for 1 - leverage, which rounding may make 0


@dataclass(frozen=True)
class Arrival:
    """The share of an update that reached the rollout, as an interval.

    Attributes:
        low, high: its ends; `high` is infinite while the gap may hide the update. 0 to infinity means that nothing is
            known.
        moved: root mean square of x, in nats per token.
        median: the median of y / x, over the half of the tokens that training moved most; nan if it moved none.
        spread: the median distance of y / x from that median.
    """

    low: float
    high: float
    moved: float
    median: float = math.nan
    spread: float = math.nan

    @property
    def known(self) -> bool:
        return self.low > 0 or math.isfinite(self.high)

    @property
    def missing(self) -> bool:
        return self.high < MISSING_SHARE

    @property
    def arrived(self) -> bool:
        return self.low > ARRIVED_SHARE and not self.missing


def arrival(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> Arrival:
    """Compares log-probabilities of the same tokens, [N] before and [N] after the update and its sync.

    Tokens with a value that is not finite are left out. With fewer than FEWEST_TOKENS, or if none moved, nothing is
    known.
    """
    before, after, infer_before, infer_after = _finite_scores(train, infer)
    x, y = after - before, infer_after - infer_before
    power = x.square().mean().item() if len(x) >= FEWEST_TOKENS else 0.0
    if power == 0:
        return Arrival(0.0, math.inf, 0.0)
    common = (x * y).mean().item()
    # The standard error of a slope through 0, by HC3 (MacKinnon and White, 1985): `rest` is a token's distance from the
    # slope of the other tokens. A token whose experts flipped in one engine may have moved further than all others
    # together. It would lie on its own slope, and make a wrong share look sure.
    rest = (y - common / power * x) / (1 - x.square() / x.square().sum()).clamp_min(LEAST_REST)
    error = STANDARD_ERRORS * math.sqrt((x * rest).square().mean().item() / len(x))
    least = power - 2 * (before - infer_before).var().item()  # the power of the weights' movement alone
    high = max(common + error, 0.0) / least if least > 0 else math.inf
    most = x.abs().topk(-(-len(x) // 2)).indices
    shares = (y[most] / x[most])[x[most] != 0]
    median = shares.quantile(0.5)
    spread = (shares - median).abs().quantile(0.5)
    return Arrival(max(common - error, 0.0) / power, high, math.sqrt(power), median.item(), spread.item())


def movement(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> float:
    """Returns the median movement of a token's score between two checks in the rollout, divided by that in training.

    The arguments are those of `arrival`. nan with fewer than FEWEST_TOKENS finite tokens, or if the training score did
    not move.
    """
    before, after, infer_before, infer_after = _finite_scores(train, infer)
    moved = (after - before).abs().median().item() if len(before) >= FEWEST_TOKENS else 0.0
    return (infer_after - infer_before).abs().median().item() / moved if moved else math.nan


def _finite_scores(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> Tensor:
    scores_4N = torch.stack([*train, *infer]).double()
    return scores_4N[:, scores_4N.isfinite().all(0)]
