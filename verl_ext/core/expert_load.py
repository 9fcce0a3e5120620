"""The load of the experts: how evenly the routers spread tokens over them.

Shape legend: N tokens, L MoE layers, K experts per token (top-k), E experts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

IDS_AT_ONCE = 2**22  # expert ids counted at a time, 8 bytes each


@torch.no_grad()
def count_load(ids_NLK: Tensor, experts: int) -> Tensor:
    """Returns [L, E] int64, how many tokens chose each expert in each layer. The ids are below `experts`."""
    L, K = ids_NLK.shape[1:]
    counts = torch.zeros(L * experts, dtype=torch.int64, device=ids_NLK.device)
    firsts_L1 = torch.arange(L, device=ids_NLK.device).unsqueeze(1) * experts
    for part_nLK in ids_NLK.split(max(1, IDS_AT_ONCE // max(1, L * K))):
        counts += (part_nLK.long() + firsts_L1).flatten().bincount(minlength=L * experts)
    return counts.view(L, experts)


def load_metrics(train_LE: Tensor, infer_LE: Tensor, first_LE: Tensor) -> dict[str, float]:
    """Returns the `router/load_*` metrics; {} if there is no token.

    Of a layer with counts c, p = c / sum c is the load.

    - load_max: E max p, the largest load over the mean: 1 + MaxVio of Wang et al. (arXiv 2408.15664).
    - load_effective: exp(H(p)) / E. So many experts, as a share, would have the entropy H(p) with equal loads.
    - load_moved, load_apart: total variation, sum |p - q| / 2: the share of the choices that would have to move.

    Args:
        train_LE, infer_LE: `count_load` of the same tokens, of training and of the rollout.
        first_LE: of training, in the batch to compare with.
    """
    if not train_LE.any():
        return {}
    train, infer, first = (counts.double() / counts.sum(1, keepdim=True) for counts in (train_LE, infer_LE, first_LE))
    experts = train.shape[1]
    largest_L = train.amax(1) * experts
    used_L = torch.exp(-torch.special.xlogy(train, train).sum(1)) / experts
    return {
        "router/load_max": largest_L.max().item(),
        "router/load_idle": (train_LE == 0).double().mean().item(),
        "router/load_effective": used_L.mean().item(),
        "router/load_moved": _distance(train, first),
        "router/load_apart": _distance(train, infer),
        **{f"router/load_max/layer_{layer:02d}": value for layer, value in enumerate(largest_L.tolist())},
    }


def _distance(one_LE: Tensor, other_LE: Tensor) -> float:
    return (one_LE - other_LE).abs().sum(1).mean().item() / 2


class ExpertLoad:
    """Counts the load over the micro-batches of a step, on a training worker.

    The counts stay on the workers. They are added up over the ranks once a step: 2 x layers x experts integers, some
    200 kB for 94 layers of 128 experts.
    """

    def __init__(self, layers: int, experts: int, device: Any = "cpu"):
        self._experts = experts
        self._counts_2LE = torch.zeros(2, layers, experts, dtype=torch.int64, device=device)
        self._first_LE: Tensor | None = None

    def add(self, train_NLK: Tensor, infer_NLK: Tensor) -> None:
        """Adds the experts that training and the rollout chose for the same tokens."""
        for counts_LE, ids_NLK in zip(self._counts_2LE, (train_NLK, infer_NLK), strict=True):
            counts_LE += count_load(ids_NLK, self._experts)

    def take(self, add_up: Callable[[Tensor], Any] = lambda counts: None) -> dict[str, float]:
        """Returns `load_metrics` of what was added since the last call; {} without a token.

        The batch to compare with is the first one of this process, unless `first` set another.

        Args:
            add_up: adds the counts of all ranks up, in place; all ranks call it together.
        """
        counts_2LE = self._counts_2LE.clone()
        self._counts_2LE.zero_()
        add_up(counts_2LE)
        if self._first_LE is None and counts_2LE.any():
            self._first_LE = counts_2LE[0]
        return {} if self._first_LE is None else load_metrics(counts_2LE[0], counts_2LE[1], self._first_LE)

    def first(self, counts: Sequence[Sequence[int]] = ()) -> list[list[int]]:
        """Returns the counts [L, E] that `router/load_moved` compares with; [] before the first batch.

        Args:
            counts: replace them, unless empty: those of the first batch of a run that is resumed.
        """
        if counts:
            self._first_LE = torch.tensor(counts, device=self._counts_2LE.device)
        return [] if self._first_LE is None else self._first_LE.tolist()
