"""The product of several corrections' weights, and what each of them did.

Shape legend: n tokens of a block that count, b its trajectories, C corrections.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from verl_ext.core.block import Block
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.mismatch import Mismatch, probabilities
from verl_ext.core.scratch import Scratch
from verl_ext.core.segments import expand, segment_sums, total

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Weighed:
    """What the corrections make of the tokens of a block that count.

    Attributes:
        weight: [n] float32, the product of their weights.
        dropped: [n] float32, 1 where it is 0, else 0.
        low: [n] float32, 1 where a token is dropped and any of them found it, or its trajectory, below its bounds.
        high: [n] float32, 1 where a token is dropped for another reason.
        outside: [C, 2] how many tokens, or trajectories, each correction found below and above its bounds.
    """

    weight: Tensor
    dropped: Tensor
    low: Tensor
    high: Tensor
    outside: Tensor


def weigh(
    block: Block, mismatch: Mismatch, corrections: Mapping[str, Settings], scratch: Scratch, as_mask: bool = False
) -> Weighed:
    """Apply the corrections, of which there is at least one; as a mask, what they keep weighs 1."""
    quantities = _quantities(block, mismatch, corrections)
    used = block.lengths > 0
    weights, lows, outside = [], [], []
    for name, settings in corrections.items():
        correction = CORRECTIONS[name]
        found = correction.function(*(quantities[quantity] for quantity in correction.reads), **settings)
        weight, low = found.weight.float(), found.low.float()
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
    return Weighed(weight, dropped, low, high, torch.stack(outside))


def _quantities(block: Block, mismatch: Mismatch, corrections: Mapping[str, Settings]) -> dict[str, Tensor]:
    """What `core.corrections` lets a correction read, [n] of tokens and [b] of trajectories."""
    quantities = {
        "k": mismatch.k,
        "log_rho": mismatch.log_rho,
        "log_g": mismatch.log_rho / block.lengths.clamp(min=1),
    }
    if any({"p_infer", "p_old"} & {*CORRECTIONS[name].reads} for name in corrections):
        quantities["p_infer"], quantities["p_old"] = probabilities(block)
    return quantities


@dataclass(frozen=True)
class CorrectionSums:
    """Sums over the tokens that count, and over the trajectories that have any."""

    weight: Tensor
    low: Tensor
    high: Tensor
    trajectories_dropped: Tensor  # that kept no token
    outside: Tensor  # [C, 2], as in `Weighed`
    entropy: Tensor | None
    entropy_dropped: Tensor | None  # of the tokens dropped


def correction_sums(block: Block, weighed: Weighed) -> CorrectionSums:
    """Of one block."""
    dropped, entropy = segment_sums(weighed.dropped, block.lengths), block.entropy
    return CorrectionSums(
        weight=total(weighed.weight),
        low=total(weighed.low),
        high=total(weighed.high),
        trajectories_dropped=((block.lengths > 0) & (dropped == block.lengths)).sum(),
        outside=weighed.outside,
        entropy=None if entropy is None else entropy.sum(),
        entropy_dropped=None if entropy is None else torch.dot(entropy, weighed.dropped.double()),
    )


def correction_metrics(
    sums: CorrectionSums, tokens: Tensor, trajectories: Tensor, corrections: Mapping[str, Settings]
) -> dict[str, Tensor]:
    """`correction/*` of a batch with so many tokens that count, and trajectories that have any."""
    dropped = sums.low + sums.high
    metrics = {
        "correction/dropped": dropped / tokens,
        "correction/dropped_low": sums.low / tokens,
        "correction/dropped_high": sums.high / tokens,
        "correction/sequences_dropped": sums.trajectories_dropped / trajectories,
        "correction/weight_mean": sums.weight / tokens,
    }
    if sums.entropy is not None and sums.entropy_dropped is not None:
        if dropped > 0:
            metrics["correction/entropy_dropped"] = sums.entropy_dropped / dropped
        if dropped < tokens:
            metrics["correction/entropy_kept"] = (sums.entropy - sums.entropy_dropped) / (tokens - dropped)
    for name, (low, high) in zip(corrections, sums.outside, strict=True):
        whole = trajectories if CORRECTIONS[name].per_sequence else tokens
        metrics[f"correction/{name}/low"] = low / whole
        metrics[f"correction/{name}/high"] = high / whole
    return metrics
