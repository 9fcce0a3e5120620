"""How much of what training moved has reached the rollout, told from fixed tokens that both engines score twice.

A token's log-probability under the training engine moves by x between two scorings, under the rollout engine by y. A
weight sync in between makes y = x but for rounding; one that did not happen leaves y = 0. So the share that arrived is
E[x y] / E[x^2]: a matched filter, which sees updates far below the gap of the engines, for that does not move with x.
The training engine rounds anew in each scoring. That counts in E[x^2] alone and makes the quotient too small; its power
is at most that of the gap, twice, which is taken off for the upper end.

Shape legend: N tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST = 16  # tokens
SIGMAS = 4.0  # standard errors, to either side
MISSING = 0.75  # an upper end below it: part of the update at least did not arrive
ARRIVED = 0.5  # a lower end above it: the update did


@dataclass(frozen=True)
class Arrival:
    """The share of an update that reached the rollout, as an interval.

    Attributes:
        low, high: its ends; `high` is infinite while the update is smaller than the gap may hide.
        moved: root mean square of x, in nats a token.
    """

    low: float
    high: float
    moved: float

    @property
    def missing(self) -> bool:
        return self.high < MISSING

    @property
    def arrived(self) -> bool:
        return self.low > ARRIVED and not self.missing


def arrival(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> Arrival:
    """From log-probabilities of the same tokens, [N] before and [N] after the update and its sync.

    Tokens with a value that is not finite are left out. With fewer than FEWEST, or where none moved, the interval has
    no upper end.
    """
    scores_4N = torch.stack([*train, *infer]).double()
    before, after, infer_before, infer_after = scores_4N[:, scores_4N.isfinite().all(0)]
    x, y = after - before, infer_after - infer_before
    power = x.square().mean().item() if len(x) >= FEWEST else 0.0
    if power == 0:
        return Arrival(0.0, math.inf, 0.0)
    common = (x * y).mean().item()
    rest = y - common / power * x
    error = SIGMAS * math.sqrt((x * rest).square().mean().item() / len(x))  # of a slope through 0 (White, 1980)
    least = power - 2 * (before - infer_before).var().item()  # of what the weights moved
    high = max(common + error, 0.0) / least if least > 0 else math.inf
    return Arrival(max(common - error, 0.0) / power, high, math.sqrt(power))
