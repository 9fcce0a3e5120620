"""Where on the way from tokens to logits two engines come apart.

Shape legend: n tokens of a sequence, E experts, K of them chosen, d width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.overlap import expert_overlap
from verl_ext.core.recorder import INDEXER, order_of
from verl_ext.errors import HookError

ROUTER = ".router"


@dataclass(frozen=True)
class Place:
    """Of both engines at one point of the computation.

    Attributes:
        point: see `recorder.point_of`.
        error: relative: the norm of the difference over that of the training engine's. At an indexer, the share of the
            training engine's positions that the rollout did not choose. Over the tokens that are finite in both
            engines; None if there are none.
        differs: share of the tokens whose experts differ, at a router, or whose positions do, at an indexer; else None.
        weight_gap: total variation between the weights of the chosen experts, a mean over the tokens, at a softmax
            router; else None.
        rollout_not_finite, train_not_finite: tokens whose state is NaN or infinite somewhere, in each engine.
    """

    point: str
    error: float | None
    differs: float | None = None
    weight_gap: float | None = None
    rollout_not_finite: int = 0
    train_not_finite: int = 0

    @property
    def not_finite(self) -> bool:
        return self.rollout_not_finite + self.train_not_finite > 0


def compare_states(rollout: Mapping[str, Tensor], train: Mapping[str, Tensor], top_k: int = 0) -> list[Place]:
    """Every place that both have, in the order of the computation.

    Args:
        rollout, train: point -> [n, d], [n, E] logits at routers, or [n, P] positions at indexers (-1 for none).
        top_k: experts of a token; 0 for a dense model.

    Raises:
        HookError: the engines did not record the same tokens, or the same width.
    """
    found: list[Place] = []
    for point in sorted(rollout.keys() & train.keys(), key=order_of):
        ours, theirs = rollout[point].double(), train[point].double()
        same_shape = len(ours) == len(theirs) if point.endswith(INDEXER) else ours.shape == theirs.shape
        if not same_shape:
            raise HookError(f"{point} is {tuple(ours.shape)} in the rollout and {tuple(theirs.shape)} in training")
        finite, others_finite = ours.isfinite().all(1), theirs.isfinite().all(1)
        both = finite & others_finite
        error, differs, weight_gap = _compared(point, ours[both], theirs[both], top_k) if both.any() else (None,) * 3
        not_finite = int((~finite).sum()), int((~others_finite).sum())
        found.append(Place(point, error, differs, weight_gap, *not_finite))
    return found


def _compared(point: str, ours: Tensor, theirs: Tensor, top_k: int) -> tuple[float, float | None, float | None]:
    """`error`, `differs` and `weight_gap` of a Place."""
    if point.endswith(INDEXER):
        return *_attended(ours.long(), theirs.long()), None
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))
    return error, *(_routing(ours, theirs, top_k) if point.endswith(ROUTER) and top_k else (None, None))


def _attended(ours_nP: Tensor, theirs_nP: Tensor) -> tuple[float, float]:
    """Share of their positions that ours lack, and of the tokens of which that holds; of tokens that had a choice."""
    most = int(max(ours_nP.max(), theirs_nP.max())) + 1
    ours, theirs = (_marked(one, most) for one in (ours_nP, theirs_nP))
    count_n = theirs.sum(1)
    chose_n = (count_n == count_n.max()) & (ours.sum(1) > 0)  # earlier tokens have fewer positions than K, and took all
    lacking_n = (theirs & ~ours).sum(1)[chose_n] / count_n.max().clamp(min=1)
    if not len(lacking_n):
        return 0.0, 0.0
    return float(lacking_n.double().mean()), float((lacking_n > 0).double().mean())


def _marked(positions_nP: Tensor, most: int) -> Tensor:
    """[n, most] bool: which positions are among each token's."""
    marked = torch.zeros(len(positions_nP), most + 1, dtype=torch.bool)
    return marked.scatter(1, positions_nP % (most + 1), True)[:, :most]  # -1 is the last column, which goes


def _routing(ours_nE: Tensor, theirs_nE: Tensor, top_k: int) -> tuple[float, float]:
    """By the logits: which experts are the largest, and what they weigh by a softmax over them."""
    chosen = [logits.topk(top_k, -1) for logits in (ours_nE, theirs_nE)]
    overlap = expert_overlap(*(one.indices.unsqueeze(1) for one in chosen)).squeeze(1)
    weights = [torch.zeros_like(ours_nE).scatter(1, one.indices, one.values.softmax(-1)) for one in chosen]
    apart = (weights[0] - weights[1]).abs().sum(1) / 2
    return float((overlap < top_k).double().mean()), float(apart.mean())
