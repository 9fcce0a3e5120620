"""The mismatch of a batch by probability, by entropy, by position in the response, by turn, by the number of tool
calls, by the age of the weights that sampled it, and by the server that generated it.

Shape legend: p tokens of a block, n of these that count, C runs of tokens, S buckets of one axis, M measures.

Probability and entropy change from token to token: their sums are products with indicators. Position, turn and calls
are constant over runs of tokens, so sums over runs serve all three; the server is constant over a trajectory. The age
changes once in a trajectory at most.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_ext.base.names import BUCKETS, ENTROPY_EDGES, POSITION_EDGES, PROBABILITY_EDGES, TURNS
from verl_ext.core.blocks import Block, Scratch, Sums, lengths_between
from verl_ext.core.tokens import segment_sums

AGREEMENT, COMPARED = "router/agreement", "compared"  # a measure, and the tokens for which it is known
OF_SERVERS = ("tokens", "vllm_kl/k3", "vllm_kl/log_ratio_abs_mean", AGREEMENT, COMPARED)


def bucket_sums(block: Block, p_infer: Tensor, measures: dict[str, Tensor], scratch: Scratch) -> Sums:
    """Returns `AXIS:MEASURE` -> [S] sums of the measures, [n] each, of one block; `AXIS:tokens` counts the tokens."""
    n = len(p_infer)
    values_Mn = scratch.empty(1 + len(measures), n)
    values_Mn[0] = 1  # its sums are numbers of tokens
    for row, values in zip(values_Mn[1:], measures.values(), strict=True):
        row.copy_(values)
    sums_SM = {}
    inside_Sn = scratch.empty(len(PROBABILITY_EDGES), n)
    sums_SM["prob"] = _indicate(inside_Sn, p_infer, PROBABILITY_EDGES) @ values_Mn.T
    if block.entropy is not None:
        sums_SM["entropy"] = _indicate(inside_Sn, block.entropy, ENTROPY_EDGES) @ values_Mn.T
    starts, position, turn, calls = cut_runs(block.mask, block.starts)
    lengths = lengths_between(starts, block.places)
    sums_CM = torch.stack([lengths.double(), *(segment_sums(row, lengths) for row in values_Mn[1:])], dim=1)
    for axis, bucket in (("position", position), ("turn", turn), ("calls", calls)):
        sums_SM[axis] = _sum_buckets(axis, bucket, sums_CM)
    return {name: sums for axis, each in sums_SM.items() for name, sums in _name_sums(axis, measures, each).items()}


def lag_sums(block: Block, measures: dict[str, Tensor]) -> Sums:
    """Returns the same sums by the age of the weights that sampled the tokens; {} where none is older."""
    if block.lag is None:
        return {}
    starts = torch.cat([block.lengths.cumsum(0) - block.lengths, block.lag.diff().nonzero().squeeze(1) + 1]).unique()
    starts = starts[starts < len(block.lag)]
    lengths = torch.cat([starts, starts.new_tensor([len(block.lag)])]).diff()
    sums_CM = torch.stack([lengths.double(), *(segment_sums(row, lengths).double() for row in measures.values())], 1)
    return _name_sums("lag", measures, _sum_buckets("lag", block.lag[starts], sums_CM))


def server_sums(block: Block, measures: dict[str, Tensor]) -> Sums:
    """Returns the sums in OF_SERVERS by the server that generated the trajectories, and its node."""
    rows = (segment_sums(row, block.lengths).double() for row in measures.values())
    sums_bM = torch.stack([block.lengths.double(), *rows], 1)
    found: Sums = {}
    for axis, bucket_b in block.buckets.items():
        of_axis = _name_sums(axis, measures, _sum_buckets(axis, bucket_b, sums_bM))
        found |= {name: sums for name, sums in of_axis.items() if name.partition(":")[2] in OF_SERVERS}
    return found


def _sum_buckets(axis: str, bucket_C: Tensor, sums_CM: Tensor) -> Tensor:
    return sums_CM.new_zeros(len(BUCKETS[axis]), sums_CM.shape[1]).index_add_(0, bucket_C, sums_CM)


def _name_sums(axis: str, measures: dict[str, Tensor], sums_SM: Tensor) -> Sums:
    return {f"{axis}:{measure}": sums_S for measure, sums_S in zip(("tokens", *measures), sums_SM.T, strict=True)}


def _indicate(inside_Sn: Tensor, values: Tensor, edges: Sequence[float]) -> Tensor:
    """Returns 1 in the row of a value's bucket, else 0."""
    for row, upper in zip(inside_Sn, [*edges[1:], torch.inf], strict=True):
        torch.lt(values, upper, out=row)
    # Starts with the last bucket. Differences of sums would lose the digits of a bucket next to an outlier's.
    for bucket in range(len(edges) - 1, 0, -1):
        inside_Sn[bucket].sub_(inside_Sn[bucket - 1])
    return inside_Sn


def cut_runs(mask: Tensor, trajectory_starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cuts a block at trajectories, at POSITION_EDGES and at the start of each turn.

    A turn is the text that the model generated between two stretches of tool output: it starts where the mask rises.
    A trajectory of n turns has n - 1 calls of tools.

    Returns where each run begins in the block, [C + 1] int64, whose last entry is p; and the buckets of a run's
    position, of its turn, and of its trajectory's calls, [C] int64.
    """
    begin, end = trajectory_starts[:-1], trajectory_starts[1:]
    rises = torch.empty_like(mask)
    torch.gt(mask[1:], mask[:-1], out=rises[1:])
    firsts = begin[begin < end]
    rises[firsts] = mask[firsts]  # however the trajectory before ended
    turn_starts = rises.nonzero().squeeze(1)
    by_position = begin[:, None] + begin.new_tensor(POSITION_EDGES)
    starts = torch.cat([by_position[by_position < end[:, None]], turn_starts]).unique()
    trajectory = torch.searchsorted(trajectory_starts, starts, right=True) - 1
    position = torch.bucketize(starts - begin[trajectory], starts.new_tensor(POSITION_EDGES[1:]), right=True)
    earlier = torch.searchsorted(turn_starts, begin[trajectory])
    turn = torch.searchsorted(turn_starts, starts, right=True) - earlier - 1
    calls = torch.searchsorted(turn_starts, end[trajectory]) - earlier - 1
    return torch.cat([starts, end[-1:]]), position, turn.clamp(0, TURNS - 1), calls.clamp(0, TURNS - 1)


def bucket_metrics(sums: Sums) -> dict[str, Tensor]:
    """Returns `<measure>/<axis>/<bucket>` and `vllm_kl/share/<axis>/<bucket>`.

    An axis with one bucket in use is left out, except the lag, whose bucket is information. The agreement's mean is
    over the tokens that were compared.
    """
    metrics = {}
    for axis, names in BUCKETS.items():
        measures = {name.partition(":")[2]: sums_S for name, sums_S in sums.items() if name.startswith(f"{axis}:")}
        tokens, compared = measures.pop("tokens", None), measures.pop(COMPARED, None)
        used = [] if tokens is None else tokens.nonzero().flatten().tolist()
        if tokens is None or (len(used) < 2 and axis != "lag"):
            continue
        for index in used:
            name = f"{axis}/{names[index]}"
            metrics[f"vllm_kl/share/{name}"] = tokens[index] / tokens.sum()
            for measure, values in measures.items():
                count = compared if measure == AGREEMENT and compared is not None else tokens
                if count[index] > 0:
                    metrics[f"{measure}/{name}"] = values[index] / count[index]
    return metrics


def agreement_measures(agreement: Tensor) -> dict[str, Tensor]:
    """Returns two measures of buckets, [n] each: the agreement, NaN as 0; and 1 where it is known, else 0."""
    known = agreement.isfinite()
    return {AGREEMENT: torch.where(known, agreement, 0.0), COMPARED: known.double()}


CONSTANT = 1e-13  # share of the sum of squares below which a variance is rounding


def agreement_sums(agreement: Tensor, log_k: Tensor) -> Sums:
    """Returns sums over the compared tokens of one block, [n] float64 each; the gap is |log k|.

    Most tokens agree in all layers and have a small gap, so that sums of squares of 1 - agreement and of the gap keep
    the digits of a variance.
    """
    if not bool(agreement.sum().isfinite()):  # then one of the terms is not
        compared = agreement.isfinite()
        agreement, log_k = agreement[compared], log_k[compared]
    gap, differing = log_k.abs(), 1 - agreement
    equal = (differing == 0).double()
    return {
        "compared": equal.new_tensor(len(equal)),
        "equal": equal.sum(),  # tokens with the same experts everywhere
        # Both sums of the gap are computed directly: as total minus the other, a far smaller one would lose all digits.
        "gap_equal": torch.dot(equal, gap),
        "gap_differs": torch.dot(1 - equal, gap),
        "differing": differing.sum(),
        "differing_squared": torch.dot(differing, differing),
        "gap_squared": torch.dot(gap, gap),
        "differing_gap": torch.dot(differing, gap),
    }


def agreement_metrics(sums: Sums) -> dict[str, Tensor]:
    """Returns `router/gap_*` and the correlation of 1 - agreement with |log k|; {} if routing was not compared.

    A mean over no token is left out, and so is a correlation with a constant.
    """
    if "compared" not in sums:
        return {}
    metrics, n, equal = {}, sums["compared"], sums["equal"]
    if equal > 0:
        metrics["router/gap_equal"] = sums["gap_equal"] / equal
    if equal < n:
        metrics["router/gap_differs"] = sums["gap_differs"] / (n - equal)
    differing, gap = sums["differing"], sums["gap_equal"] + sums["gap_differs"]
    of_differing = sums["differing_squared"] - differing**2 / n
    of_gap = sums["gap_squared"] - gap**2 / n
    if of_differing > CONSTANT * sums["differing_squared"] and of_gap > CONSTANT * sums["gap_squared"]:
        covariance = sums["differing_gap"] - differing * gap / n
        metrics["router/disagreement_gap_correlation"] = covariance / of_differing.sqrt() / of_gap.sqrt()
    return metrics
