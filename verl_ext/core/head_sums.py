"""What of the heads travels to the controller: a row of sums for each trajectory, and the metrics of a batch of them.

Shape legend: B trajectories, N response tokens of all of them.
"""

import torch
from torch import Tensor

from verl_ext.core.head import Divergence
from verl_ext.core.segments import segment_sums

COLUMNS = ("tokens", "without", "kl", "mass", "differs")


def head_sums(found: Divergence, known_N: Tensor, mask_N: Tensor, offsets: Tensor) -> Tensor:
    """[B, 5] float64, over the tokens that the model generated: how many there are, how many have no head, and of the
    others the sums of the divergence.

    Args:
        known_N, mask_N: bool.
        offsets: [B + 1] int64, where each trajectory starts among the N.
    """
    counted = mask_N & known_N
    each = (mask_N, mask_N & ~known_N, *(value * counted for value in (found.kl, found.mass, found.differs)))
    return torch.stack([segment_sums(value.double(), offsets.diff()) for value in each], 1)


def head_metrics(sums_BC: Tensor) -> dict[str, float]:
    """`vllm_kl/head*` of a batch; those of the divergence only where a token has a head."""
    totals = dict(zip(COLUMNS, sums_BC.double().sum(0).tolist(), strict=True))
    if not totals["tokens"]:
        return {}
    metrics = {"vllm_kl/head_missing": totals["without"] / totals["tokens"]}
    if known := totals["tokens"] - totals["without"]:
        metrics["vllm_kl/head"] = totals["kl"] / known
        metrics["vllm_kl/head_mass"] = totals["mass"] / known
        metrics["vllm_kl/head_differs"] = totals["differs"] / known
    return metrics
