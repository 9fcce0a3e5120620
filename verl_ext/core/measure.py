"""One pass over the tokens of a batch: how far the engines are apart, what the corrections make of it.

`measure` takes a batch whole. Where it comes in parts, because it is large or because it is measured micro-batch by
micro-batch and rank by rank, `gather` is the pass over a part, and `put_together` makes the metrics of the whole of
what all of them left.

Shape legend: N response tokens, n tokens of a block that count.

The tokens are taken in blocks of whole trajectories that stay near a core. Each block is read, its log-ratios are
computed, its tokens weighed; what remains of it are its weights and some sums. All metrics come from the sums of the
batch, which go to the host together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.agreement import AgreementSums, Origin, agreement_metrics, agreement_sums, origin_of
from verl_ext.core.block import Block, read_blocks
from verl_ext.core.breakdown import BucketSums, bucket_metrics, bucket_sums, lag_sums
from verl_ext.core.mismatch import Mismatch, MismatchMaxima, MismatchSums, mismatch_metrics, mismatch_sums
from verl_ext.core.scratch import Scratch
from verl_ext.core.segments import EXACT
from verl_ext.core.sums import combined, on_host
from verl_ext.core.tokens import Tokens
from verl_ext.core.weigh import CorrectionSums, Settings, Weighed, correction_metrics, correction_sums, weigh

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

    The metrics are in `verl_ext.metrics.ours`: GAP, CORRECTIONS and, with `tokens.agreement`, ROUTING, of the tokens
    where that is not NaN: which were compared. Means are over tokens with m = 1; what is a mean over none is left out,
    as are a correlation with what does not vary and an axis with a single bucket in use. With `tokens.lag`, they come
    by lag too, whatever `breakdown` says: the guard goes by it.
    """
    weight, gathered = gather(tokens, corrections or {}, breakdown=breakdown, block=block)
    return put_together([gathered], corrections or {}, weight)


@dataclass(frozen=True)
class Gathered:
    """What remains of some tokens once they are measured, on the host.

    Attributes:
        sums, maxima: None where no token counts.
        tokens: masked in.
        origin: what the sums of the routers' agreement are relative to; None where there are none.
    """

    sums: "Sums | None"
    maxima: MismatchMaxima | None
    tokens: int
    origin: Origin | None = None


@torch.no_grad()
def gather(
    tokens: Tokens,
    corrections: Mapping[str, Settings],
    *,
    breakdown: bool = True,
    block: int | None = None,
    as_mask: bool = False,
    origin: Origin | None = None,
) -> tuple[Tensor | None, Gathered]:
    """The weights as of `Measured`, and what the metrics are made of; arguments as of `measure`.

    Args:
        as_mask: what has a weight weighs 1, for a loss that has the ratio already.
        origin: of an earlier part, where the routers' agreement was compared.
    """
    device = tokens.mask.device
    size = block or (BLOCK if device.type == "cpu" else GPU_BLOCK)
    weight = torch.zeros(len(tokens.mask), device=device) if corrections else None
    scratch = Scratch(device)
    sums: list[Sums] = []
    maxima: list[MismatchMaxima] = []
    for part in read_blocks(tokens, size, scratch):
        mismatch, weighed = Mismatch.of(part, scratch), None
        if weight is not None:
            weighed = weigh(part, mismatch, corrections, scratch, as_mask=as_mask)
            part.put(weighed.weight, into=weight)
        if part.agreement is not None and origin is None:
            origin = origin_of(part.agreement, mismatch.log_k)
        part_sums, part_maxima = _sums(part, mismatch, weighed, origin, breakdown, scratch)
        sums.append(part_sums)
        maxima.append(part_maxima)
    if not sums:
        return weight, Gathered(None, None, tokens.count, origin)
    return weight, Gathered(*on_host((combined(sums, torch.sum), combined(maxima, torch.amax))), tokens.count, origin)


def put_together(
    parts: Sequence[Gathered], corrections: Mapping[str, Settings], weight: Tensor | None = None
) -> Measured:
    """The metrics of all parts as if they had been measured together, with the weights given.

    Parts with the routers' agreement have one `origin`.
    """
    whole = merged(parts)
    batch, largest, masked = whole.sums, whole.maxima, whole.tokens
    if batch is None or largest is None:
        return Measured(weight, {}, tokens=masked, kept=0, non_finite=masked)
    n, trajectories = batch.mismatch.tokens, batch.mismatch.trajectories
    metrics, dropped = mismatch_metrics(batch.mismatch, largest), 0.0
    if batch.corrections is not None:
        metrics |= correction_metrics(batch.corrections, n, trajectories, corrections)
        dropped = batch.corrections.low + batch.corrections.high
    if batch.agreement is not None:
        metrics |= agreement_metrics(batch.agreement)
    metrics |= bucket_metrics(batch.buckets)
    return Measured(
        weight=weight,
        metrics={name: value.item() for name, value in metrics.items()},
        tokens=masked,
        kept=int(n - dropped),
        non_finite=masked - int(n),
    )


def merged(parts: Sequence[Gathered]) -> Gathered:
    """Of all parts, what the metrics are made of."""
    sums = [part.sums for part in parts if part.sums is not None]
    maxima = [part.maxima for part in parts if part.maxima is not None]
    tokens = sum(part.tokens for part in parts)
    if not sums:
        return Gathered(None, None, tokens)
    return Gathered(combined(sums, torch.sum), combined(maxima, torch.amax), tokens)


@dataclass(frozen=True)
class Sums:
    """All sums of a block, or of the batch; None and {} for what was not asked for."""

    mismatch: MismatchSums
    corrections: CorrectionSums | None
    agreement: AgreementSums | None
    buckets: dict[str, BucketSums]  # axis -> sums


def _sums(
    block: Block, mismatch: Mismatch, weighed: Weighed | None, origin: Origin | None, breakdown: bool, scratch: Scratch
) -> tuple[Sums, MismatchMaxima]:
    of_mismatch, maxima = mismatch_sums(block, mismatch)
    of_agreement, buckets = None, {}
    partial: dict[str, Tensor] = {}
    if block.agreement is not None:
        of_agreement = agreement_sums(block.agreement, mismatch.log_k, origin)
    if breakdown or block.lag is not None:
        measures = {"vllm_kl/k1": -mismatch.log_k, "vllm_kl/k3": mismatch.k3}
        if weighed is not None:
            measures |= {"correction/dropped_low": weighed.low, "correction/dropped_high": weighed.high}
        if block.agreement is not None:
            partial["router/agreement"] = block.agreement
        if breakdown:
            buckets = bucket_sums(block, mismatch.p_infer, measures, partial, scratch)
        if block.lag is not None:
            measures["vllm_kl/log_ratio_abs_mean"] = mismatch.log_k.abs()
            buckets["lag"] = lag_sums(block, block.lag, measures, partial)
    return Sums(of_mismatch, correction_sums(block, weighed) if weighed else None, of_agreement, buckets), maxima
