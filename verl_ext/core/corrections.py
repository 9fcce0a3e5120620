"""Corrections: a per-token weight on the policy-gradient loss, made from the mismatch ratio k.

Weights are detached constants. A token weighted 0 leaves the numerator of the loss only: the divisor stays
the full response length, as in IcePop's objective.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenWeights:
    """What a correction did, all of the shape of k: the weight, and where it dropped a token and why."""

    weight: Tensor  # float32
    low: Tensor  # bool: k below the band
    high: Tensor  # bool: k above the band


def icepop(k: Tensor, alpha: float, beta: float) -> TokenWeights:
    """k where alpha <= k <= beta, else 0.

    "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!" (Ring-mini-2.0), the function
    M(k) of the objective, with its defaults alpha 0.5 and beta 5.

    Args:
        k: float tensor of any shape, exp(l_old - l_infer).
        alpha, beta: bounds, both inclusive.
    """
    k = k.detach()
    low, high = k < alpha, k > beta
    # ~(in band) rather than low | high, so that NaN, which fails every comparison, weighs 0.
    weight = torch.where((k >= alpha) & (k <= beta), k, torch.zeros_like(k))
    return TokenWeights(weight, low, high)


def correction_metrics(
    tokens: TokenWeights, mask: Tensor, offsets: Tensor, entropy: Tensor | None = None
) -> dict[str, float]:
    """The `correction/*` metrics over packed tokens; {} when no token is masked in.

    Args:
        tokens: the correction's result, each field [N].
        mask: [N] bool, true on generated tokens.
        offsets: [B + 1] int, where each of the B sequences starts in the packed tokens.
        entropy: [N] entropy of the training policy, in nats.

    Returns:
        correction/dropped, dropped_low, dropped_high: fractions of tokens at weight 0, in all and by side.
        correction/sequences_all_dropped: fraction of sequences (with a token) that kept none.
        correction/weight_mean: mean weight over all tokens, dropped ones counted as 0.
        correction/entropy_dropped, entropy_kept: mean entropy of either kind, where there is one
            (IcePop's figure 11: dropped tokens have the higher entropy).
    """
    n = int(mask.sum())
    if n == 0:
        return {}
    dropped = (tokens.weight == 0) & mask
    sequence = torch.repeat_interleave(offsets.diff())
    totals = torch.zeros(2, offsets.numel() - 1, dtype=torch.long, device=mask.device)
    totals.index_add_(1, sequence, torch.stack([mask, dropped]).long())
    has_tokens = totals[0] > 0
    metrics = {
        "correction/dropped": int(dropped.sum()) / n,
        "correction/dropped_low": int((tokens.low & mask).sum()) / n,
        "correction/dropped_high": int((tokens.high & mask).sum()) / n,
        "correction/sequences_all_dropped": int((has_tokens & (totals[0] == totals[1])).sum()) / int(has_tokens.sum()),
        "correction/weight_mean": float(tokens.weight[mask].double().mean()),
    }
    if entropy is not None:
        for name, group in (("dropped", dropped), ("kept", mask & ~dropped)):
            if group.any():
                metrics[f"correction/entropy_{name}"] = float(entropy[group].double().mean())
    return metrics
