"""The mismatch of a batch, and the weights that the corrections give its tokens.

Shape legend: N response tokens of all trajectories, n tokens of a block that count, b trajectories of a block, C
corrections, r response tokens of a trajectory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from verl_ext.base.names import LAG_EDGES
from verl_ext.core.blocks import LARGEST, Block, Scratch, Sums, add_up, copy_to_host, read_blocks
from verl_ext.core.breakdown import (
    agreement_measures,
    agreement_metrics,
    agreement_sums,
    bucket_metrics,
    bucket_sums,
    lag_sums,
    server_sums,
)
from verl_ext.core.corrections import CORRECTIONS, check_range, check_shapes
from verl_ext.core.mismatch import Mismatch, mismatch_metrics, mismatch_sums, probabilities
from verl_ext.core.tokens import EXACT_COUNT, Tokens, expand, segment_sums, total

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Weighed:
    """The weights that the corrections give the tokens of a block that count.

    Attributes:
        weight: [n] float32, the product of the corrections' weights.
        dropped: [n] float32, 1 where the weight is 0, else 0.
        low: [n] float32, 1 where a token is dropped and a correction found it, or its trajectory, below the bounds.
        high: [n] float32, 1 where a token is dropped for another reason.
        outside: [C, 2], the number of tokens, or trajectories, that each correction found below and above its bounds.
        extremes: [C, 2], the negative of each correction's least weight, and its largest.
    """

    weight: Tensor
    dropped: Tensor
    low: Tensor
    high: Tensor
    outside: Tensor
    extremes: Tensor


def weigh(
    block: Block, mismatch: Mismatch, corrections: Mapping[str, Settings], scratch: Scratch, as_mask: bool = False
) -> Weighed:
    """Applies the corrections, at least one; with `as_mask`, the tokens that they keep have weight 1.

    Raises:
        MethodError: a correction returned something other than Weights of the shape of what it reads.
    """
    quantities = _quantities(block, mismatch, corrections)
    used = block.lengths > 0
    weights, lows, outside, extremes = [], [], [], []
    for name, settings in corrections.items():
        correction = CORRECTIONS[name]
        read = [quantities[quantity] for quantity in correction.reads]
        found = correction.function(*read, **settings)
        check_shapes(name, found, like=read[0])
        weight, low = found.weight.float(), found.low.float()
        least, largest = weight.aminmax()
        extremes.append(torch.stack([-least, largest]))
        if correction.per_sequence:
            outside.append(torch.stack([(found.low * used).sum(), (found.high * used).sum()]))
            if not bool(((weight != 1) | (low != 0)).any()):
                continue  # a mask keeps most blocks whole
            weight, low = expand(weight, block.lengths), expand(low, block.lengths)
        else:
            outside.append(torch.stack([total(found.low), total(found.high)]))
        weights.append(weight)
        lows.append(low)
    weight = reduce(torch.mul, weights or [torch.ones_like(mismatch.k)])
    any_low = reduce(torch.maximum, lows or [torch.zeros_like(mismatch.k)])
    dropped = torch.eq(weight, 0, out=scratch.empty(len(weight), dtype=torch.float32))
    if as_mask:
        weight = 1 - dropped
    low = scratch.copy(dropped, torch.float32).mul_(any_low)
    high = scratch.copy(dropped, torch.float32).sub_(low)
    return Weighed(weight, dropped, low, high, torch.stack(outside), torch.stack(extremes))


def _quantities(block: Block, mismatch: Mismatch, corrections: Mapping[str, Settings]) -> dict[str, Tensor]:
    """Returns the quantities that a correction may read (`core.corrections`): [n] per token or [b] per trajectory."""
    quantities = {"k": mismatch.k, "log_rho": mismatch.log_rho, "log_g": mismatch.log_rho / block.lengths.clamp(min=1)}
    if any({"p_infer", "p_old"} & {*CORRECTIONS[name].reads} for name in corrections):
        quantities["p_infer"], quantities["p_old"] = probabilities(block)
    return quantities


def correction_sums(block: Block, weighed: Weighed) -> Sums:
    """Returns sums over the tokens of one block that count, and over its trajectories that have any."""
    dropped = segment_sums(weighed.dropped, block.lengths)
    # A dropped token's 0 is lifted above every weight: torch.where is seven times slower on a CPU.
    kept = torch.add(weighed.weight, weighed.dropped, alpha=torch.finfo(torch.float32).max)
    sums = {
        "weight": total(weighed.weight),
        f"{LARGEST}weight": weighed.weight.amax(),
        f"{LARGEST}minus_weight": -kept.amin(),
        "low": total(weighed.low),
        "high": total(weighed.high),
        "trajectories_dropped": ((block.lengths > 0) & (dropped == block.lengths)).sum(),  # no token kept
        "outside": weighed.outside,
        f"{LARGEST}extremes": weighed.extremes,
    }
    if block.entropy is not None:
        sums["entropy"] = block.entropy.sum()
        sums["entropy_dropped"] = torch.dot(block.entropy, weighed.dropped.double())
    return sums


def correction_metrics(sums: Sums, corrections: Mapping[str, Settings]) -> dict[str, Tensor]:
    """Returns `correction/*` of a batch; {} without corrections."""
    if not corrections:
        return {}
    tokens, trajectories, dropped = sums["tokens"], sums["trajectories"], sums["low"] + sums["high"]
    metrics = {
        "correction/dropped": dropped / tokens,
        "correction/dropped_low": sums["low"] / tokens,
        "correction/dropped_high": sums["high"] / tokens,
        "correction/sequences_dropped": sums["trajectories_dropped"] / trajectories,
        "correction/weight_mean": sums["weight"] / tokens,
        "correction/weight_max": sums[f"{LARGEST}weight"],
    }
    if dropped < tokens:
        metrics["correction/weight_min"] = -sums[f"{LARGEST}minus_weight"]
    if "entropy" in sums:
        if dropped > 0:
            metrics["correction/entropy_dropped"] = sums["entropy_dropped"] / dropped
        if dropped < tokens:
            metrics["correction/entropy_kept"] = (sums["entropy"] - sums["entropy_dropped"]) / (tokens - dropped)
    for name, (low, high) in zip(corrections, sums["outside"], strict=True):
        whole = trajectories if CORRECTIONS[name].per_sequence else tokens
        metrics[f"correction/{name}/low"] = low / whole
        metrics[f"correction/{name}/high"] = high / whole
    return metrics


TOKENS_AT_ONCE = 131_072  # tokens: some 14 MB of temporaries
TOKENS_AT_ONCE_ON_GPU = EXACT_COUNT // 2


@dataclass(frozen=True)
class Measured:
    """Result of `measure`.

    Attributes:
        weight: [N] float32, the product of the corrections' weights, 0 where the mask is 0; None without corrections.
        metrics: `vllm_kl/*`, `correction/*` and `router/*`; {} when no token counts.
        tokens, kept: tokens masked in, and how many of these have a weight (without corrections, all that count).
        non_finite: tokens masked in whose l_infer or l_old is NaN or infinite: their weight is 0, and no metric counts
            them.
    """

    weight: Tensor | None
    metrics: dict[str, float]
    tokens: int
    kept: int
    non_finite: int


def measure(
    tokens: Tokens,
    corrections: Mapping[str, Settings] | None = None,
    *,
    breakdown: bool = True,
    block: int | None = None,
) -> Measured:
    """Measures the mismatch, and weighs every token by the product of the corrections.

    Args:
        tokens: any device, any float dtype; a padded batch is `Tokens.from_padded`.
        corrections: name -> settings, e.g. `{"icepop": {"alpha": 0.5, "beta": 5.0}, "geo_mask": {...}}`.
        breakdown: also give metrics by probability, entropy, position and turn.
        block: tokens taken at a time, in whole trajectories (default: TOKENS_AT_ONCE, or TOKENS_AT_ONCE_ON_GPU).

    The metrics are in `verl_ext.base.metrics.ours`: GAP, CORRECTIONS and, with `tokens.agreement`, ROUTING, over the
    tokens that were compared (agreement not NaN). Means are over tokens with m = 1. Left out are means over no token,
    correlations with a constant, and axes with a single bucket in use. The breakdowns by `tokens.lag` and
    `tokens.buckets` do not depend on `breakdown`: the guard reads those by lag.
    """
    weight, gathered = gather(tokens, corrections or {}, breakdown=breakdown, block=block)
    return put_together([gathered], corrections or {}, weight)


@dataclass(frozen=True)
class Gathered:
    """The sums of some measured tokens, on the host.

    Attributes:
        sums: {} where no token counts.
        tokens: masked in.
    """

    sums: Sums
    tokens: int

    @property
    def non_finite(self) -> int:
        """See `Measured`."""
        return self.tokens - int(self.sums.get("tokens", 0))


@torch.no_grad()
def gather(
    tokens: Tokens,
    corrections: Mapping[str, Settings],
    *,
    breakdown: bool = True,
    block: int | None = None,
    as_mask: bool = False,
) -> tuple[Tensor | None, Gathered]:
    """Returns the weights as in `Measured`, and the sums of the metrics; other arguments as for `measure`.

    Args:
        as_mask: tokens with a weight get weight 1, for a loss that has the ratio already.

    Raises:
        MethodError: a correction returned something other than finite weights of at least 0, one per value.
    """
    device = tokens.mask.device
    size = block or (TOKENS_AT_ONCE if device.type == "cpu" else TOKENS_AT_ONCE_ON_GPU)
    weight = torch.zeros(len(tokens.mask), device=device) if corrections else None
    scratch = Scratch(device)
    sums: list[Sums] = []
    for part in read_blocks(tokens, size, scratch):
        mismatch, weighed = Mismatch.from_block(part, scratch), None
        if weight is not None:
            weighed = weigh(part, mismatch, corrections, scratch, as_mask=as_mask)
            part.put(weighed.weight, into=weight)
        sums.append(_sums(part, mismatch, weighed, breakdown, scratch))
    whole = copy_to_host(add_up(sums)) if sums else {}
    if weight is not None and whole:
        for name, (minus_least, largest) in zip(corrections, whole[f"{LARGEST}extremes"].tolist(), strict=True):
            check_range(name, -minus_least, largest)
    return weight, Gathered(whole, tokens.count)


def put_together(
    parts: Sequence[Gathered], corrections: Mapping[str, Settings], weight: Tensor | None = None
) -> Measured:
    """Returns the metrics of all parts as if they had been measured together, with the weights given."""
    whole = merge(parts)
    sums, masked = whole.sums, whole.tokens
    if not sums:
        return Measured(weight, {}, tokens=masked, kept=0, non_finite=masked)
    metrics = mismatch_metrics(sums) | correction_metrics(sums, corrections)
    metrics |= agreement_metrics(sums) | bucket_metrics(sums)
    dropped = sums["low"] + sums["high"] if corrections else 0.0
    return Measured(
        weight=weight,
        metrics={name: value.item() for name, value in metrics.items()},
        tokens=masked,
        kept=int(sums["tokens"] - dropped),
        non_finite=whole.non_finite,
    )


def merge(parts: Sequence[Gathered]) -> Gathered:
    """Adds up the sums of the metrics over all parts."""
    sums = [part.sums for part in parts if part.sums]
    return Gathered(add_up(sums) if sums else {}, sum(part.tokens for part in parts))


def _sums(block: Block, mismatch: Mismatch, weighed: Weighed | None, breakdown: bool, scratch: Scratch) -> Sums:
    sums = mismatch_sums(block, mismatch)
    if weighed is not None:
        sums |= correction_sums(block, weighed)
    if block.agreement is not None:
        sums |= agreement_sums(block.agreement, mismatch.log_k)
    if breakdown or block.buckets or block.lag is not None:
        measures = {"vllm_kl/k1": -mismatch.log_k, "vllm_kl/k3": mismatch.k3}
        if weighed is not None:
            measures |= {"correction/dropped_low": weighed.low, "correction/dropped_high": weighed.high}
        by_row = measures | {"vllm_kl/log_ratio_abs_mean": mismatch.log_k.abs()}
        known = {} if block.agreement is None else agreement_measures(block.agreement)
        if breakdown:
            sums |= bucket_sums(block, mismatch.p_infer, measures | known, scratch)
        sums |= lag_sums(block, by_row | known)
        if block.buckets:
            sums |= server_sums(block, by_row | known)
    return sums


PARTED = ("vllm_kl/k1", "vllm_kl/k3")


def split_gap(tokens: Tokens, l_version: Sequence[Tensor]) -> dict[str, float]:
    """Returns `vllm_kl/engine/*` and `vllm_kl/stale/*`, which add up to the gap of these trajectories.

    l_version is the training engine's log-probability under the weights that sampled the tokens. The engines' part is
    the gap between l_infer and l_version; the rest of the gap between l_infer and l_old is the policy's own movement.
    For k1, the rest is mean(l_version - l_old); for k3, it is the change of the estimate, which may be negative.

    Args:
        tokens: of the rescored trajectories, in their order. Where several versions sampled a trajectory, only the
            tokens of the newest count (`Tokens.lag`).
        l_version: [r] for each trajectory, under its newest version.

    Returns {} where no token counts: masked in, with three finite log-probabilities.
    """
    then = torch.cat(list(l_version))
    mask = tokens.mask & tokens.l_infer.isfinite() & tokens.l_old.isfinite() & then.isfinite()
    if (bucket := tokens.lag_buckets()) is not None:
        mask &= bucket < len(LAG_EDGES)
    whole = measure(Tokens(tokens.l_infer, tokens.l_old, mask, tokens.offsets), breakdown=False).metrics
    engine = measure(Tokens(tokens.l_infer, then, mask, tokens.offsets), breakdown=False).metrics
    if not whole:
        return {}
    of_engines = {name: engine[name] for name in (*PARTED, "vllm_kl/log_ratio_abs_mean")}
    split = {f"vllm_kl/engine/{name.removeprefix('vllm_kl/')}": value for name, value in of_engines.items()}
    split |= {f"vllm_kl/stale/{name.removeprefix('vllm_kl/')}": whole[name] - engine[name] for name in PARTED}
    counted = segment_sums(mask.float(), tokens.offsets.diff()) > 0
    return split | {"vllm_kl/rescored": float(counted.sum())}
