"""Where in a batch the mismatch sits: by probability, by entropy, by position in the response, by turn, by
the age of the weights that sampled it.

Shape legend: p tokens of a block, n of these that count, C runs of tokens, S buckets of one axis, M measures.

Probability and entropy change from token to token: their sums are products with indicators. Position and turn are
constant over runs of tokens, whose sums serve both; age is constant over trajectories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.base.metrics.buckets import ENTROPY_EDGES, NAMES, POSITION_EDGES, PROBABILITY_EDGES, TURNS
from verl_ext.core.blocks import Block, Scratch, lengths_between
from verl_ext.core.tokens import segment_sums


@dataclass(frozen=True)
class BucketSums:
    """Sums over the tokens that count in each bucket of one axis."""

    tokens: Tensor  # [S]
    measures: dict[str, Tensor]  # metric -> [S]
    known: dict[str, Tensor]  # metric -> [S], the tokens that it is known of, where that need not be all


def bucket_sums(
    block: Block, p_infer: Tensor, measures: dict[str, Tensor], partial: dict[str, Tensor], scratch: Scratch
) -> dict[str, BucketSums]:
    """Axis -> sums of the `measures`, [n] each, of one block; the `partial` ones are NaN where they are not known."""
    n = len(p_infer)
    values_Mn = scratch.empty(1 + len(measures) + 2 * len(partial), n)
    values_Mn[0] = 1  # its sums are numbers of tokens
    for row, values in zip(values_Mn[1:], _rows(measures, partial), strict=True):
        row.copy_(values)
    sums_SM = {}
    inside_Sn = scratch.empty(len(PROBABILITY_EDGES), n)
    sums_SM["prob"] = _indicate(inside_Sn, p_infer, PROBABILITY_EDGES) @ values_Mn.T
    if block.entropy is not None:
        sums_SM["entropy"] = _indicate(inside_Sn, block.entropy, ENTROPY_EDGES) @ values_Mn.T
    runs = Runs.of(block.mask, block.starts)
    lengths = lengths_between(runs.starts, block.places)
    sums_CM = torch.stack([lengths.double(), *(segment_sums(row, lengths) for row in values_Mn[1:])], dim=1)
    for axis, bucket in (("position", runs.position), ("turn", runs.turn)):
        sums_SM[axis] = sums_CM.new_zeros(len(NAMES[axis]), len(values_Mn)).index_add_(0, bucket, sums_CM)
    return {axis: _of_bucket(sums, measures, partial) for axis, sums in sums_SM.items()}


def lag_sums(block: Block, lag: Tensor, measures: dict[str, Tensor], partial: dict[str, Tensor]) -> BucketSums:
    """As `bucket_sums`, by the trajectories' buckets, [b]."""
    rows = (segment_sums(row, block.lengths).double() for row in _rows(measures, partial))
    sums_bM = torch.stack([block.lengths.double(), *rows], 1)
    sums_SM = sums_bM.new_zeros(len(NAMES["lag"]), sums_bM.shape[1]).index_add_(0, lag, sums_bM)
    return _of_bucket(sums_SM, measures, partial)


def _rows(measures: dict[str, Tensor], partial: dict[str, Tensor]) -> list[Tensor]:
    """Of each measure its values, and of the partial ones, after those, where they are known."""
    known = [values.isfinite() for values in partial.values()]
    there = [torch.where(where, values, 0.0) for where, values in zip(known, partial.values(), strict=True)]
    return [*measures.values(), *there, *(where.double() for where in known)]


def _of_bucket(sums_SM: Tensor, measures: dict[str, Tensor], partial: dict[str, Tensor]) -> BucketSums:
    tokens, *columns = sums_SM.T
    named = dict(zip([*measures, *partial], columns, strict=False))
    return BucketSums(tokens, named, dict(zip(partial, columns[len(named) :], strict=True)))


def _indicate(inside_Sn: Tensor, values: Tensor, edges: Sequence[float]) -> Tensor:
    """1 in the row of a value's bucket, else 0."""
    for row, upper in zip(inside_Sn, [*edges[1:], torch.inf], strict=True):
        torch.lt(values, upper, out=row)
    # The last bucket first. Differences of sums would lose the digits of a bucket that stands next to an outlier's.
    for bucket in range(len(edges) - 1, 0, -1):
        inside_Sn[bucket].sub_(inside_Sn[bucket - 1])
    return inside_Sn


@dataclass(frozen=True)
class Runs:
    """Runs of tokens of one trajectory, position bucket and turn.

    Attributes:
        starts: [C + 1] int64, where each run begins in the block; the last entry is p.
        position, turn: [C] int64, the buckets of a run.
    """

    starts: Tensor
    position: Tensor
    turn: Tensor

    @classmethod
    def of(cls, mask: Tensor, trajectory_starts: Tensor) -> "Runs":
        """Cut a block at trajectories, at POSITION_EDGES and at the start of each turn.

        A turn is what the model generated between two stretches of tool output: it starts where the mask rises.
        """
        begin, end = trajectory_starts[:-1], trajectory_starts[1:]
        rises = torch.empty_like(mask)
        torch.gt(mask[1:], mask[:-1], out=rises[1:])
        firsts = begin[begin < end]
        rises[firsts] = mask[firsts]  # whatever the trajectory before ended with
        turn_starts = rises.nonzero().squeeze(1)
        by_position = begin[:, None] + begin.new_tensor(POSITION_EDGES)
        starts = torch.cat([by_position[by_position < end[:, None]], turn_starts]).unique()
        trajectory = torch.searchsorted(trajectory_starts, starts, right=True) - 1
        position = torch.bucketize(starts - begin[trajectory], starts.new_tensor(POSITION_EDGES[1:]), right=True)
        earlier = torch.searchsorted(turn_starts, begin[trajectory])
        turn = torch.searchsorted(turn_starts, starts, right=True) - earlier - 1
        return cls(torch.cat([starts, end[-1:]]), position, turn.clamp(0, TURNS - 1))


def bucket_metrics(sums: Mapping[str, BucketSums]) -> dict[str, Tensor]:
    """`<measure>/<axis>/<bucket>` and `vllm_kl/share/<axis>/<bucket>`.

    An axis with one bucket in use is left out, but for the lag, of which the bucket tells something.
    """
    metrics = {}
    for axis, by_bucket in sums.items():
        used = by_bucket.tokens.nonzero().flatten().tolist()
        if len(used) < 2 and axis != "lag":
            continue
        for index in used:
            name, tokens = f"{axis}/{NAMES[axis][index]}", by_bucket.tokens[index]
            metrics[f"vllm_kl/share/{name}"] = tokens / by_bucket.tokens.sum()
            for measure, values in by_bucket.measures.items():
                of = by_bucket.known[measure][index] if measure in by_bucket.known else tokens
                if of > 0:
                    metrics[f"{measure}/{name}"] = values[index] / of
    return metrics


Origin = tuple[Tensor, Tensor]  # agreement and |log k| of one token


@dataclass(frozen=True)
class AgreementSums:
    """Sums over the tokens that count and were compared; the gap is |log k|.

    What the correlation is made of is relative to one token's values: 0 where a measure is constant, and in squares at
    most n times those of differences from the mean, of which it keeps the digits.
    """

    tokens: Tensor
    equal: Tensor  # tokens with the same experts everywhere
    gap_equal: Tensor
    gap_differs: Tensor
    agreement: Tensor  # relative, and all below
    agreement_squared: Tensor
    gap: Tensor
    gap_squared: Tensor
    agreement_gap: Tensor


def origin_of(agreement: Tensor, log_k: Tensor) -> Origin | None:
    """Those of the first token that was compared; None where there is none."""
    first = agreement.isfinite().nonzero()[:1, 0].tolist()
    return (agreement[first[0]].clone(), log_k[first[0]].abs()) if first else None


def agreement_sums(agreement: Tensor, log_k: Tensor, origin: Origin | None) -> AgreementSums:
    """Of one block, [n] float64 each.

    Args:
        origin: None where no token of this block, nor of those before, was compared.
    """
    if not bool(agreement.sum().isfinite()):  # then one of them is not
        compared = agreement.isfinite()
        agreement, log_k = agreement[compared], log_k[compared]
    if origin is None:
        origin = agreement.new_zeros(()), agreement.new_zeros(())
    gap, equal = log_k.abs(), (agreement == 1).double()
    # Neither sum of the gap as a rest of the other: it would have no digits left of one that is far smaller.
    gap_equal, gap_differs = torch.dot(equal, gap), torch.dot(1 - equal, gap)
    agreement, gap = agreement - origin[0], gap.sub_(origin[1])
    return AgreementSums(
        tokens=equal.new_tensor(len(equal)),
        equal=equal.sum(),
        gap_equal=gap_equal,
        gap_differs=gap_differs,
        agreement=agreement.sum(),
        agreement_squared=torch.dot(agreement, agreement),
        gap=gap.sum(),
        gap_squared=torch.dot(gap, gap),
        agreement_gap=torch.dot(agreement, gap),
    )


def agreement_metrics(sums: AgreementSums) -> dict[str, Tensor]:
    """`router/gap_*` and the correlation of 1 - agreement with |log k|.

    A mean over none is left out, and so is a correlation with what does not vary.
    """
    metrics, n = {}, sums.tokens
    if sums.equal > 0:
        metrics["router/gap_equal"] = sums.gap_equal / sums.equal
    if sums.equal < n:
        metrics["router/gap_differs"] = sums.gap_differs / (n - sums.equal)
    of_agreement = sums.agreement_squared - sums.agreement**2 / n
    of_gap = sums.gap_squared - sums.gap**2 / n
    if of_agreement > 0 and of_gap > 0:
        covariance = sums.agreement_gap - sums.agreement * sums.gap / n
        metrics["router/disagreement_gap_correlation"] = -covariance / of_agreement.sqrt() / of_gap.sqrt()
    return metrics
