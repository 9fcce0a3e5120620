"""How many versions older than the policy the weights are that sampled a trajectory.

Shape legend: B trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ext.core.buckets import LAG_EDGES
from verl_ext.core.lazily import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Lag:
    """Versions behind the weights that l_old is of: 0 is the same version.

    Attributes:
        newest, oldest: [B] int64, of the weights that sampled the last token of a trajectory, and its first.
    """

    newest: Tensor
    oldest: Tensor

    def buckets(self) -> Tensor:
        """[B] int64, where each stands in `NAMES["lag"]`: by its lag, or at the end where it spans versions."""
        edges = torch.tensor(LAG_EDGES[1:], device=self.oldest.device)
        spans = self.newest != self.oldest
        return torch.where(spans, len(LAG_EDGES), torch.bucketize(self.oldest, edges, right=True))
