"""Where in a batch the mismatch sits: by probability, by entropy, by position in the response, by turn.

Shape legend: N tokens, n tokens of a block, B trajectories, C cells, S buckets of one axis, M measures.

Position and turn are constant over runs of tokens: a cell is such a run, and one sum a cell serves both axes.
Probability and entropy change from token to token: their sums are products with indicator rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.buckets import ENTROPY_EDGES, NAMES, POSITION_EDGES, PROBABILITY_EDGES, TURNS
from verl_ext.core.segments import RunSums, Workspace
from verl_ext.core.tokens import Tokens

MEASURES = (  # what is summed where the batch has it, and logged as a mean over each bucket's tokens
    "vllm_kl/k1",
    "vllm_kl/k3",
    "correction/dropped_low",
    "correction/dropped_high",
    "router/agreement",
)


@dataclass(frozen=True)
class Cells:
    """Runs of tokens of one trajectory, position bucket and turn.

    Attributes:
        starts: [C + 1] int64, where each run begins in the packed tokens; the last entry is N.
        row, position, turn: [C] int64, what a run belongs to.
    """

    starts: Tensor
    row: Tensor
    position: Tensor
    turn: Tensor

    @classmethod
    def rows(cls, offsets: Tensor) -> "Cells":
        """One run a trajectory."""
        zeros = torch.zeros_like(offsets[:-1])
        return cls(offsets, torch.arange(len(zeros), device=zeros.device), zeros, zeros)

    @classmethod
    def of(cls, tokens: Tokens) -> "Cells":
        """Cut the packed tokens at trajectories, at POSITION_EDGES and at the start of each turn.

        A turn is what the model generated between two stretches of tool output: it starts where the mask rises.
        """
        mask, offsets = tokens.mask, tokens.offsets
        begin, end = offsets[:-1], offsets[1:]
        rises = torch.empty_like(mask)
        torch.gt(mask[1:], mask[:-1], out=rises[1:])
        firsts = begin[begin < end]
        rises[firsts] = mask[firsts]  # whatever the trajectory before ended with
        turn_starts = rises.nonzero().squeeze(1)
        by_position = begin[:, None] + begin.new_tensor(POSITION_EDGES)
        starts = torch.cat([by_position[by_position < end[:, None]], turn_starts]).unique()
        row = torch.searchsorted(offsets, starts, right=True) - 1
        position = torch.bucketize(starts - offsets[row], starts.new_tensor(POSITION_EDGES[1:]), right=True)
        earlier = torch.searchsorted(turn_starts, offsets[row])
        turn = torch.searchsorted(turn_starts, starts, right=True) - earlier - 1
        return cls(torch.cat([starts, offsets[-1:]]), row, position, turn.clamp(0, TURNS - 1))


class Breakdown:
    """Sums by trajectory and, where asked for, of the token count and `measures` by bucket, as they grow by blocks.

    Attributes:
        measures: those of MEASURES that this batch has.
    """

    def __init__(self, tokens: Tokens, by_bucket: bool, with_corrections: bool):
        self.by_bucket = by_bucket
        self.cells = Cells.of(tokens) if by_bucket else Cells.rows(tokens.offsets)
        has = {"vllm_kl": True, "correction": with_corrections, "router": tokens.agreement is not None}
        self.measures = [name for name in MEASURES if has[name.split("/")[0]]]
        # By bucket: who counts, then `measures` (k1 with the sign of log k). Else: who counts, who is dropped, log k.
        self.runs = RunSums(self.cells.starts, 1 + len(self.measures) if by_bucket else 3)
        self.trajectories = len(tokens.offsets) - 1
        self.edges = {"prob": PROBABILITY_EDGES, "entropy": ENTROPY_EDGES} if by_bucket else {}
        if tokens.entropy is None:
            self.edges.pop("entropy", None)
        self.within = {axis: self._zeros(len(edges)) for axis, edges in self.edges.items()}

    def _zeros(self, count: int) -> Tensor:
        return self.runs.sums.new_zeros(count, self.runs.sums.shape[1])

    def add(
        self,
        part: slice,
        measures: tuple[Tensor | None, ...],
        dropped: Tensor | None,
        clean: bool,
        rows: slice,
        log_rho: Tensor,
        by_axis: Mapping[str, Tensor],
        memory: Workspace,
    ) -> None:
        """Add one block, [n] float each.

        Args:
            measures: who counts, log k, k3, who is dropped on the low and on the high side, agreement; None for what
                `measures` lacks.
            dropped: the two sides together, or None.
            clean: whether all of the block counts.
            rows, log_rho: the trajectories of the block, and their sums of log k.
            by_axis: the values that put a token into a bucket of each axis in `edges`.
        """
        if not self.by_bucket:
            self.runs.add(part, [None if clean else measures[0], *([] if dropped is None else [dropped])])
            self.runs.sums[rows, 2] += log_rho
            return
        n = part.stop - part.start
        used = [row for row in measures if row is not None]
        rows_Mn = memory.take("rows", len(used) * n).view(len(used), n)
        for row, values in zip(rows_Mn, used, strict=True):
            row.copy_(values)
        self.runs.add(part, [None if clean else rows_Mn[0], *rows_Mn[1:]])
        for axis, edges in self.edges.items():
            within_Sn = memory.take("within", len(edges) * n).view(len(edges), n)
            for row, edge in zip(within_Sn, [*edges[1:], torch.inf], strict=True):
                torch.lt(by_axis[axis], edge, out=row)
            # From here on indicators, the last bucket first. Differences of sums would lose the digits of a bucket that
            # stands next to an outlier's.
            for bucket in range(len(edges) - 1, 0, -1):
                within_Sn[bucket].sub_(within_Sn[bucket - 1])
            self.within[axis] += within_Sn @ rows_Mn.T

    def by_trajectory(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] tokens that count, sum of log k, tokens dropped."""
        sums = self._zeros(self.trajectories).index_add_(0, self.cells.row, self.runs.sums)
        if self.by_bucket:
            sides = [column for column, name in enumerate(self.measures, 1) if name.startswith("correction/dropped_")]
            return sums[:, 0], sums[:, 1], sums[:, sides].sum(1)
        return sums[:, 0], sums[:, 2], sums[:, 1]

    def buckets(self) -> dict[str, Tensor]:
        """Axis -> [S, 1 + M] sums: tokens, then `measures`."""
        if not self.by_bucket:
            return {}
        found = dict(self.within)
        for axis, index in (("position", self.cells.position), ("turn", self.cells.turn)):
            found[axis] = self._zeros(len(NAMES[axis])).index_add_(0, index, self.runs.sums)
        sign = self.runs.sums.new_ones(1 + len(self.measures))
        sign[1] = -1  # k1 is the mean of -log k
        return {axis: sums * sign for axis, sums in found.items()}


def breakdown_metrics(sums: dict[str, list[list[float]]], measures: Sequence[str]) -> dict[str, float]:
    """`<metric>/<axis>/<bucket>` and `vllm_kl/share/<axis>/<bucket>`; an axis with one bucket in use is left out."""
    metrics = {}
    for axis, buckets in sums.items():
        used = {name: bucket for name, bucket in zip(NAMES[axis], buckets, strict=True) if bucket[0] > 0}
        if len(used) < 2:
            continue
        tokens = sum(count for count, *_ in used.values())
        for name, (count, *values) in used.items():
            metrics[f"vllm_kl/share/{axis}/{name}"] = count / tokens
            for metric, value in zip(measures, values, strict=True):
                metrics[f"{metric}/{axis}/{name}"] = value / count
    return metrics
