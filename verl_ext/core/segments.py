"""Stretches of packed tokens: blocks of whole trajectories, and sums.

Shape legend: n tokens of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ext.core.lazily import torch

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 2**24  # up to here float32 counts, and stops
# Response tokens of a batch that the controller holds: of a step's fields 120 MB, and as much again on their way.
AT_ONCE = 2**22


def blocks(offsets: Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Tokens and trajectories of each block: as many whole trajectories as `size` tokens hold, at least one."""
    starts = offsets.tolist()
    first, count = 0, len(starts) - 1
    while first < count:
        last = max(first + 1, bisect_right(starts, starts[first] + size) - 1)
        if starts[first] < starts[last]:
            yield slice(starts[first], starts[last]), slice(first, last)
        first = last


def total(values: Tensor) -> Tensor:
    """The float64 sum of [n] values; of float32 in parts that it counts exactly, at the cost of float32."""
    return torch.stack([part.sum().double() for part in values.split(EXACT)]).sum()


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive stretches of [n] values; 0 for an empty one. Of float32, float64 where n passes EXACT."""
    if len(values) > EXACT:
        values = values.double()
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


def expand(values: Tensor, lengths: Tensor) -> Tensor:
    """[n]: each run's value on all of its tokens."""
    return values.index_select(0, torch.repeat_interleave(lengths.int()))
