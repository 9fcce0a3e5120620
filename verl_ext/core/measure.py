"""One pass over the tokens of a batch: how far the engines are apart, what the corrections make of it.

Shape legend: N response tokens, n tokens of a block, B trajectories.

The tokens are taken in blocks that fit a core's cache, in float64: nothing but the weights is ever as long as the
batch, and all metrics come from the same few sums, which go to the host together. A log-ratio x that is masked out or
not finite is set to 0; e = expm1(x) is 0 with it, and both drop out of every sum:

    sum (k^2 - 1) = sum e^2 + 2 sum e        sum (k - log k - 1) = sum (e - x)

which is also how k3 and chi2 keep their digits at the log-ratios of a healthy run (k3 is x^2 / 2 for x of 1e-4). The
effective sample size is the other way round: sum e + n has no digits left of a sum k that is small against n.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.breakdown import Breakdown, breakdown_metrics
from verl_ext.core.mismatch import Gap
from verl_ext.core.segments import Workspace
from verl_ext.core.tokens import Tokens
from verl_ext.core.weigh import Composition, Settings, blocks

BLOCK = 65_536  # tokens; some 20 float64 temporaries of it share a core's cache. A GPU takes a batch in one block.


@dataclass(frozen=True)
class Measured:
    """Result of `measure`.

    Attributes:
        weight: [N] float32, the product of the corrections' weights, 0 where the mask is; None without corrections.
        metrics: `vllm_kl/*` and `correction/*`; {} when no token is masked in.
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
        block: tokens taken at a time (default: BLOCK on a CPU, all on a GPU).

    Metrics (means over tokens with m=1; natural logarithm):
        vllm_kl/k1: mean(l_infer - l_old), an estimate of KL(pi_infer || pi_train) that can be negative.
        vllm_kl/k3: mean(k - log k - 1), the same KL, never negative (Schulman, "Approximating KL Divergence", 2020,
            with x ~ pi_infer and r = pi_train / pi_infer).
        vllm_kl/prob_diff_{mean,max,std}: of |exp(l_infer) - exp(l_old)| (population std).
        vllm_kl/log_ratio_abs_{mean,max}: of |l_infer - l_old|.
        vllm_kl/ess: (sum k)^2 / sum k^2 over the token count; vllm_kl/chi2: mean(k^2) - 1.
        vllm_kl/sequence_gap_{mean,max}: of |mean over a sequence of (l_infer - l_old)|.
        correction/dropped, dropped_low, dropped_high: share of tokens at weight 0: in all, of those below the bounds of
            a correction, and of the others; correction/sequences_dropped: share of sequences that kept no token.
        correction/weight_mean: over all tokens; correction/entropy_{dropped,kept}: mean entropy of either kind.
        correction/<name>/low, high: share of tokens outside that correction's bounds (of sequences, for one that
            works on sequences).
        {vllm_kl/share, vllm_kl/k1, vllm_kl/k3, correction/dropped_low, correction/dropped_high}/
            {prob,entropy,position,turn}/<bucket>: the same by bucket; share is the bucket's share of the tokens. An
            axis with a single bucket in use is left out.
    """
    size = block or (BLOCK if tokens.mask.device.type == "cpu" else max(len(tokens.mask), 1))
    memory = Workspace(tokens.mask.device)
    composition = Composition(tokens, corrections or {}, size, memory)
    weight = torch.empty(len(tokens.mask), device=tokens.mask.device) if corrections else None
    parts = Breakdown(tokens, breakdown)
    sums = _Sums(tokens.mask.device)
    sums.add(masked=tokens.mask.count_nonzero())
    for part in blocks(len(tokens.mask), size):
        n = part.stop - part.start
        gap = Gap.of(tokens, part, memory)
        _add_differences(sums, gap, memory)
        by_axis = {"prob": gap.p_infer}
        if tokens.entropy is not None:
            by_axis["entropy"] = memory.take("entropy", n).copy_(tokens.entropy[part]).nan_to_num_(0.0)
        k1 = torch.neg(gap.log_k, out=memory.take("k1", n))
        k3 = torch.sub(gap.k_minus_1, gap.bounded, out=memory.take("k3", n))
        measures = [gap.counts, k1, k3]
        if weight is not None:
            found = composition.weigh(part, gap)
            product = torch.mul(found.weight, gap.counts, out=memory.take("product", n))
            weight[part] = product
            dropped = torch.eq(product, 0, out=memory.take("dropped", n)).mul_(gap.counts)
            low = torch.mul(dropped, found.low, out=memory.take("low", n))
            measures += [low, torch.sub(dropped, low, out=memory.take("high", n))]
            sums.add(weight=product.sum())
            if tokens.entropy is not None:
                entropy = by_axis["entropy"]
                sums.add(entropy=torch.dot(entropy, gap.counts), entropy_dropped=torch.dot(entropy, dropped))
        parts.add(part, measures, by_axis, memory)
    return _result(tokens, weight, sums, parts, composition)


class _Sums:
    """Sums and largest values by name; on the device until `to_host`."""

    def __init__(self, device: torch.device):
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.values: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, self.zero) + value

    def raise_to(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.values[name] = torch.maximum(self.values.get(name, self.zero), value)


def _add_differences(sums: _Sums, gap: Gap, memory: Workspace) -> None:
    n = len(gap.counts)
    k = torch.add(gap.k_minus_1, gap.counts, out=memory.take("k", n))  # 0 where a token does not count
    absolute = torch.abs(gap.log_k, out=memory.take("absolute", n))
    difference = torch.sub(gap.p_infer, gap.p_old, out=memory.take("difference", n)).abs_().mul_(gap.counts)
    sums.add(
        log_k_abs=absolute.sum(),
        k=k.sum(),
        k_squared=torch.dot(k, k),
        e=gap.k_minus_1.sum(),
        e_squared=torch.dot(gap.k_minus_1, gap.k_minus_1),
        difference=difference.sum(),
        difference_squared=torch.dot(difference, difference),
    )
    sums.raise_to(log_k_abs_max=absolute.amax(), difference_max=difference.amax())


def _result(tokens: Tokens, weight: Tensor | None, sums: _Sums, parts: Breakdown, composition: Composition) -> Measured:
    by_trajectory = parts.by_trajectory()
    count, k1, _, low, high = by_trajectory.T  # low and high stay 0 without corrections
    dropped = low + high
    gap = k1 / count.clamp(min=1)
    used = count > 0
    sums.add(sequences=used.sum(), sequences_dropped=(used & (dropped == count)).sum(), sequence_gap=gap.abs().sum())
    sums.raise_to(sequence_gap_max=gap.abs().amax() if len(gap) else sums.zero)
    sums.add(**dict(zip(("tokens", "k1", "k3", "low", "high"), by_trajectory.sum(0), strict=True)))
    for name, rows in composition.sequences.items():
        sums.add(**{f"{name}/low": (rows.low * used).sum(), f"{name}/high": (rows.high * used).sum()})
    for name, outside in composition.outside.items():
        sums.add(**{f"{name}/low": outside[0], f"{name}/high": outside[1]})

    buckets = parts.buckets()
    # One transfer for all that is logged, wherever the tensors live.
    packed = [torch.stack(list(sums.values.values())), *(table.flatten() for table in buckets.values())]
    scalars, *tables = torch.cat(packed).cpu().split([len(part) for part in packed])
    s = dict(zip(sums.values, scalars.tolist(), strict=True))
    metrics: dict[str, float] = {}
    if s["tokens"]:
        metrics = _mismatch_metrics(s)
        if weight is not None:
            metrics |= _correction_metrics(s, composition)
        rows_by_axis = {
            axis: table.reshape(buckets[axis].shape).tolist() for axis, table in zip(buckets, tables, strict=True)
        }
        metrics |= breakdown_metrics(rows_by_axis, with_corrections=weight is not None)
    return Measured(
        weight=weight,
        metrics=metrics,
        tokens=int(s["masked"]),
        kept=int(s["tokens"] - s["low"] - s["high"]),
        non_finite=int(s["masked"] - s["tokens"]),
    )


def _mismatch_metrics(s: Mapping[str, float]) -> dict[str, float]:
    n = s["tokens"]
    mean = s["difference"] / n
    return {
        "vllm_kl/k1": s["k1"] / n,
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
