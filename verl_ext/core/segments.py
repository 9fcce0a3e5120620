"""Working block by block: which runs of tokens a block touches, their sums, and memory for temporaries.

Shape legend: n tokens of a block, C runs, M measures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from verl_ext.core.lazily import torch

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 2**24  # up to here float32 counts, and stops


def blocks(offsets: Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Tokens and trajectories of each block: as many whole trajectories as `size` tokens hold, at least one."""
    starts = offsets.tolist()
    first, count = 0, len(starts) - 1
    while first < count:
        last = max(first + 1, bisect_right(starts, starts[first] + size) - 1)
        if starts[first] < starts[last]:
            yield slice(starts[first], starts[last]), slice(first, last)
        first = last


def overlap(starts: Tensor, part: slice) -> tuple[slice, Tensor]:
    """Which runs a block of tokens touches, and how many of its tokens belong to each.

    Args:
        starts: [C + 1] int64, where each run begins; the last entry ends the last run.
        part: tokens [part.start, part.stop), not empty.
    """
    if part.start == 0 and part.stop >= starts[-1]:
        return slice(0, len(starts) - 1), starts.diff()
    first = int(torch.searchsorted(starts, part.start, right=True)) - 1
    last = int(torch.searchsorted(starts, part.stop))
    return slice(first, last), starts[first : last + 1].clamp(part.start, part.stop).diff()


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
    return values.index_select(0, torch.repeat_interleave(lengths))


class Workspace:
    """Named buffers for the temporaries of a block, used again for the next one.

    On a CPU, fresh memory for each of them costs more than the arithmetic.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """[count], float64 by default, with whatever it held before; a name keeps its dtype."""
        if name not in self.buffers or len(self.buffers[name]) < count:
            self.buffers[name] = torch.empty(count, dtype=dtype or torch.float64, device=self.device)
        return self.buffers[name][:count]


class RunSums:
    """[C, M] float64 sums of M measures over C runs."""

    def __init__(self, starts: Tensor, measures: int):
        self.starts = starts
        self.sums = torch.zeros(len(starts) - 1, measures, dtype=torch.float64, device=starts.device)

    def add(self, part: slice, values_Mn: Iterable[Tensor | None]) -> None:
        """Add one block to the first columns, [n] float each; None stands for ones."""
        runs, lengths = overlap(self.starts, part)
        for column, row in enumerate(values_Mn):
            self.sums[runs, column] += lengths if row is None else segment_sums(row, lengths)
