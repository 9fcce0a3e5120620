"""One pass over the tokens of a batch: how far the engines are apart, what the corrections make of it.

Shape legend: N response tokens, n tokens of a block, B trajectories.

The tokens are taken in blocks of whole trajectories that stay near a core: nothing but the weights is ever as long as
the batch, and all metrics come from the same few sums, which go to the host together. A log-ratio x that is masked out
or not finite is set to 0; e = expm1(x) is 0 with it, and both drop out of every sum:

    sum (k^2 - 1) = sum e^2 + 2 sum e        sum (k - log k - 1) = sum (e - x)

which is also how k3 and chi2 keep their digits at the log-ratios of a healthy run (k3 is x^2 / 2 for x of 1e-4). The
effective sample size is the other way round: sum e + n has no digits left of a sum k that is small against n.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.breakdown import Breakdown, breakdown_metrics
from verl_ext.core.mismatch import LOG_RATIO_BOUND, Gap, probabilities
from verl_ext.core.segments import EXACT, Workspace, blocks, segment_sums, total
from verl_ext.core.tokens import Tokens
from verl_ext.core.weigh import Composition, Settings

BLOCK = 131_072  # tokens: some 14 MB of temporaries
GPU_BLOCK = EXACT // 2


@dataclass(frozen=True)
class Measured:
    """Result of `measure`.

    Attributes:
        weight: [N] float32, the product of the corrections' weights, 0 where the mask is; None without corrections.
        metrics: `vllm_kl/*`, `correction/*` and `router/*`; {} when no token counts.
        tokens, kept: tokens masked in, and those of them with a weight (all, without corrections).
        non_finite: tokens masked in whose l_infer or l_old is NaN or infinite: they weigh 0 and count in no metric.
    """

    weight: Tensor | None
    metrics: dict[str, float]
    tokens: int
    kept: int
    non_finite: int


@torch.no_grad()
def measure(
    tokens: Tokens,
    corrections: Mapping[str, Settings] | None = None,
    *,
    breakdown: bool = True,
    block: int | None = None,
) -> Measured:
    """Measure the mismatch, and weigh every token by the product of the corrections.

    Args:
        tokens: any device, any float dtype; a padded batch is `Tokens.from_padded`.
        corrections: name -> settings, e.g. `{"icepop": {"alpha": 0.5, "beta": 5.0}, "geo_mask": {...}}`.
        breakdown: also give metrics by probability, entropy, position and turn.
        block: tokens taken at a time, in whole trajectories (default: BLOCK on a CPU, GPU_BLOCK on a GPU).

    The metrics are in `verl_ext.metrics.ours`: GAP, CORRECTIONS and, with `tokens.agreement`, ROUTING, where NaN, an
    unknown routing, stands for 1. Means are over tokens with m = 1; what is a mean over none is left out, as are a
    correlation with what does not vary and an axis with a single bucket in use. k3: Schulman, "Approximating KL
    Divergence", 2020, with x ~ pi_infer and r = pi_train / pi_infer.
    """
    size = block or (BLOCK if tokens.mask.device.type == "cpu" else GPU_BLOCK)
    memory = Workspace(tokens.mask.device)
    composition = Composition(tokens, corrections or {}, memory)
    weight = torch.empty(len(tokens.mask), device=tokens.mask.device) if corrections else None
    parts = Breakdown(tokens, breakdown, with_corrections=weight is not None)
    sums, routing = _Sums(), _Routing()
    sums.add(masked=tokens.mask.count_nonzero())
    for part, rows in blocks(tokens.offsets, size):
        n = part.stop - part.start
        gap = Gap.of(tokens, part, memory)
        _add_mismatch(sums, tokens, part, gap, memory)
        k3 = torch.sub(gap.k_minus_1, gap.bounded, out=memory.take("k3", n))
        sums.add(tokens=total(gap.counts), log_k=gap.log_k_sum, k3=k3.sum())
        # Of each trajectory of the block: what sequence corrections read, and the sums by trajectory.
        log_rho = segment_sums(gap.log_k, tokens.offsets[rows.start : rows.stop + 1].diff())
        dropped = low = high = None
        if weight is not None:
            found = composition.weigh(part, rows, gap, log_rho if composition.of_sequences else None)
            product = weight[part].copy_(found.weight)
            dropped = torch.eq(product, 0, out=memory.take("dropped", n, torch.float32))
            if not gap.clean:
                product.mul_(gap.counts)
                dropped.mul_(gap.counts)
            low = torch.mul(dropped, found.low, out=memory.take("low", n, torch.float32))
            high = torch.sub(dropped, low, out=memory.take("high", n, torch.float32))
            sums.add(weight=total(product), low=total(low), high=total(high))
        axes = {"prob": gap.p_infer}
        if tokens.entropy is not None:
            entropy = memory.take("entropy", n).copy_(tokens.entropy[part]).nan_to_num_(0.0)
            axes["entropy"] = entropy
            if dropped is not None:
                of_dropped = torch.mul(entropy, dropped, out=memory.take("entropy_dropped", n)).sum()
                sums.add(entropy=(entropy if gap.clean else entropy * gap.counts).sum(), entropy_dropped=of_dropped)
        agreement = None
        if tokens.agreement is not None:
            agreement = memory.take("agreement", n).copy_(tokens.agreement[part]).nan_to_num_(1.0, 1.0, 1.0)
            if not gap.clean:
                agreement.mul_(gap.counts)
        measures = (gap.counts, gap.log_k, k3, low, high, agreement)
        parts.add(part, measures, dropped, gap.clean, rows, log_rho, axes, memory)
        if agreement is not None:
            routing.add(sums, agreement, gap, memory)
    return _result(tokens, weight, sums, parts, composition)


class _Sums:
    """Sums and largest values by name, of which each block adds its own; they stay on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.largest: dict[str, list[Tensor]] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.sums.setdefault(name, []).append(value)

    def raise_to(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.largest.setdefault(name, []).append(value)

    def names(self) -> list[str]:
        return [*self.sums, *self.largest]

    def stacked(self) -> Tensor:
        """[names] float64."""
        sums = [torch.stack(values).double().sum() for values in self.sums.values()]
        return torch.stack(sums + [torch.stack(values).double().amax() for values in self.largest.values()])


def _add_mismatch(sums: _Sums, tokens: Tokens, part: slice, gap: Gap, memory: Workspace) -> None:
    n = part.stop - part.start
    absolute = torch.abs(gap.log_k, out=memory.take("absolute", n))
    furthest = absolute.amax()
    difference = memory.take("difference", n)
    if bool(furthest <= LOG_RATIO_BOUND):
        # p_old - p_infer = p_infer (k - 1), which needs no exact p_old.
        difference.copy_(gap.p_infer).mul_(gap.k_minus_1).abs_()
    else:
        p = probabilities(tokens, part, memory)
        torch.sub(p["p_old"], p["p_infer"], out=difference).abs_().mul_(gap.counts)
    k = gap.k if gap.clean else gap.k * gap.counts
    sums.add(
        log_k_abs=absolute.sum(),
        k=total(k),
        k_squared=total(torch.mul(k, k, out=memory.take("squared", n, torch.float32))),
        e=gap.k_minus_1.sum(),
        e_squared=torch.dot(gap.k_minus_1, gap.k_minus_1),
        difference=difference.sum(),
        difference_squared=torch.dot(difference, difference),
    )
    sums.raise_to(log_k_abs_max=furthest, difference_max=difference.amax())


class _Routing:
    """Agreement against |log k|.

    The correlation's sums are of differences from one counted token's values: 0 where a measure is constant, and their
    squares at most n times those of differences from the mean, of which they keep the digits.
    """

    origin: tuple[Tensor, Tensor] | None = None

    def add(self, sums: _Sums, agreement: Tensor, gap: Gap, memory: Workspace) -> None:
        """Add one block; its `agreement`, [n] float64 and 0 where a token does not count, is used up."""
        absolute = torch.abs(gap.log_k, out=memory.take("absolute", len(agreement)))
        if self.origin is None:
            token = int(gap.counts.argmax())
            if not gap.counts[token]:
                return  # no token counts so far
            self.origin = agreement[token].clone(), absolute[token].clone()
        # Neither sum of |log k| as a rest of the other: it would have no digits left of one that is far smaller.
        side = memory.take("difference", len(agreement))
        equal = torch.eq(agreement, 1, out=side)
        sums.add(equal=equal.sum(), gap_equal=torch.dot(equal, absolute))
        sums.add(gap_differs=torch.dot(torch.ne(agreement, 1, out=side), absolute))
        for values, origin in zip((agreement, absolute), self.origin, strict=True):
            values.sub_(origin)
            if not gap.clean:
                values.mul_(gap.counts)
        sums.add(agreement=agreement.sum(), agreement_squared=torch.dot(agreement, agreement))
        sums.add(gap=absolute.sum(), gap_squared=torch.dot(absolute, absolute))
        sums.add(agreement_gap=torch.dot(agreement, absolute))


def _result(tokens: Tokens, weight: Tensor | None, sums: _Sums, parts: Breakdown, composition: Composition) -> Measured:
    count, log_k, dropped = parts.by_trajectory()
    gap = (log_k / count.clamp(min=1)).abs()
    used = count > 0
    sums.add(sequences=used.sum(), sequences_dropped=(used & (dropped == count)).sum(), sequence_gap=gap.sum())
    sums.raise_to(sequence_gap_max=torch.cat([gap, gap.new_zeros(1)]).amax())
    for name, rows in composition.sequences.items():
        sums.add(**{f"{name}/low": (rows.low * used).sum(), f"{name}/high": (rows.high * used).sum()})
    for name, outside in composition.outside.items():
        low, high = torch.stack([*outside, count.new_zeros(2)]).sum(0)
        sums.add(**{f"{name}/low": low, f"{name}/high": high})

    buckets = parts.buckets()
    # One transfer for all that is logged, wherever the tensors live.
    packed = [sums.stacked(), *(table.flatten() for table in buckets.values())]
    scalars, *tables = torch.cat(packed).cpu().split([len(part) for part in packed])
    s = dict(zip(sums.names(), scalars.tolist(), strict=True))
    metrics: dict[str, float] = {}
    if s.get("tokens"):
        metrics = _mismatch_metrics(s)
        if weight is not None:
            metrics |= _correction_metrics(s, composition)
        if tokens.agreement is not None:
            metrics |= _router_metrics(s)
        rows_by_axis = {
            axis: table.reshape(buckets[axis].shape).tolist() for axis, table in zip(buckets, tables, strict=True)
        }
        metrics |= breakdown_metrics(rows_by_axis, parts.measures)
    return Measured(
        weight=weight,
        metrics=metrics,
        tokens=int(s["masked"]),
        kept=int(s.get("tokens", 0) - s.get("low", 0) - s.get("high", 0)),
        non_finite=int(s["masked"] - s.get("tokens", 0)),
    )


def _mismatch_metrics(s: Mapping[str, float]) -> dict[str, float]:
    n = s["tokens"]
    mean = s["difference"] / n
    return {
        "vllm_kl/k1": -s["log_k"] / n,
        "vllm_kl/k3": s["k3"] / n,
        "vllm_kl/prob_diff_mean": mean,
        "vllm_kl/prob_diff_max": s["difference_max"],
        "vllm_kl/prob_diff_std": max(s["difference_squared"] / n - mean**2, 0.0) ** 0.5,
        "vllm_kl/log_ratio_abs_mean": s["log_k_abs"] / n,
        "vllm_kl/log_ratio_abs_max": s["log_k_abs_max"],
        "vllm_kl/ess": s["k"] ** 2 / s["k_squared"] / n,
        "vllm_kl/chi2": (s["e_squared"] + 2 * s["e"]) / n,
        "vllm_kl/sequence_gap_mean": s["sequence_gap"] / s["sequences"],
        "vllm_kl/sequence_gap_max": s["sequence_gap_max"],
    }


def _correction_metrics(s: Mapping[str, float], composition: Composition) -> dict[str, float]:
    n, dropped = s["tokens"], s["low"] + s["high"]
    metrics = {
        "correction/dropped": dropped / n,
        "correction/dropped_low": s["low"] / n,
        "correction/dropped_high": s["high"] / n,
        "correction/sequences_dropped": s["sequences_dropped"] / s["sequences"],
        "correction/weight_mean": s["weight"] / n,
    }
    if "entropy" in s:
        if dropped:
            metrics["correction/entropy_dropped"] = s["entropy_dropped"] / dropped
        if n > dropped:
            metrics["correction/entropy_kept"] = (s["entropy"] - s["entropy_dropped"]) / (n - dropped)
    for names, whole in ((composition.outside, n), (composition.sequences, s["sequences"])):
        for name in names:
            metrics[f"correction/{name}/low"] = s[f"{name}/low"] / whole
            metrics[f"correction/{name}/high"] = s[f"{name}/high"] / whole
    return metrics


def _router_metrics(s: Mapping[str, float]) -> dict[str, float]:
    n, equal = s["tokens"], s["equal"]
    metrics = {}
    if equal:
        metrics["router/gap_equal"] = s["gap_equal"] / equal
    if equal < n:
        metrics["router/gap_differs"] = s["gap_differs"] / (n - equal)
    of_agreement = s["agreement_squared"] - s["agreement"] ** 2 / n
    of_gap = s["gap_squared"] - s["gap"] ** 2 / n
    if of_agreement > 0 and of_gap > 0:
        covariance = s["agreement_gap"] - s["agreement"] * s["gap"] / n
        metrics["router/disagreement_gap_correlation"] = -covariance / of_agreement**0.5 / of_gap**0.5
    return metrics
