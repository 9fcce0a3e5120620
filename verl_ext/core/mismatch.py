"""The mismatch of two engines on the same tokens, in total and by the sign of the advantage.

Shape legend: N response tokens of a batch, n tokens of a block that count, B trajectories of a batch, b of a block.
`l_infer` and `l_old` are log-probabilities of the sampled tokens under the same weights: the rollout engine's and the
training engine's. k = exp(l_old - l_infer), training over inference.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.blocks import LARGEST, Block, Scratch, Sums
from verl_ext.core.tokens import LOG_RATIO_BOUND, Tokens, blocks, segment_sums, total

CERTAIN = 0.5  # exp(l_old) of a token that the rollout may have been certain of
ABOVE_ZERO = 1e-3  # l_infer that is above 0 by more than rounding


def mismatch_ratio(l_infer: Tensor, l_old: Tensor) -> Tensor:
    """Returns k = exp(l_old - l_infer) in float32, the log-ratio clamped to +-20. NaN stays NaN."""
    return (l_old.float() - l_infer.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def k3_of(log_ratio: Tensor) -> Tensor:
    """Returns r - log r - 1 for [n] log-ratios, clamped to +-20; NaN where one is not finite."""
    x = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(log_ratio.isfinite(), torch.expm1(x) - x, torch.nan)


def count_non_finite(tensor: Tensor, mask: Tensor) -> int:
    """Returns how many entries under `mask` are NaN or infinite."""
    return int((~torch.isfinite(tensor) & mask).sum())


@dataclass(frozen=True)
class Mismatch:
    """The mismatch of both engines on the tokens of a block that count.

    float64 keeps the digits of k - log k - 1, which is log(k)^2 / 2 for a small log k; values that are only compared
    with bounds or added up are float32. k, k - 1 and k3 are of log k clamped to +-20.

    Attributes:
        log_k: [n] float64, l_old - l_infer.
        k: [n] float32.
        k_minus_1: [n] float64.
        k3: [n] float64, k - log k - 1.
        p_infer: [n] float32, exp(l_infer).
        log_rho: [b] float64, the sum of log k over each trajectory.
    """

    log_k: Tensor
    k: Tensor
    k_minus_1: Tensor
    k3: Tensor
    p_infer: Tensor
    log_rho: Tensor

    @classmethod
    def from_block(cls, block: Block, scratch: Scratch) -> "Mismatch":
        log_k = scratch.copy(block.l_old).sub_(scratch.copy(block.l_infer))
        bounded = scratch.copy(log_k).clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        k_minus_1 = scratch.copy(bounded).expm1_()
        return cls(
            log_k=log_k,
            k=scratch.copy(bounded, torch.float32).exp_(),
            k_minus_1=k_minus_1,
            k3=torch.sub(k_minus_1, bounded, out=bounded),
            p_infer=scratch.copy(block.l_infer, torch.float32).exp_(),
            log_rho=segment_sums(log_k, block.lengths),
        )


def probabilities(block: Block) -> tuple[Tensor, Tensor]:
    """Returns exp(l_infer) and exp(l_old), [n] float64."""
    return block.l_infer.double().exp(), block.l_old.double().exp()


def mismatch_sums(block: Block, mismatch: Mismatch) -> Sums:
    """Returns sums over the tokens of one block that count, sums over its trajectories that have any, and the largest
    values."""
    k, k_minus_1, log_k_abs = mismatch.k, mismatch.k_minus_1, mismatch.log_k.abs()
    furthest = log_k_abs.amax()
    if bool(furthest <= LOG_RATIO_BOUND):  # p_old - p_infer, at less cost than an exact p_old
        difference = mismatch.p_infer.double().mul_(k_minus_1).abs_()
    else:
        p_infer, p_old = probabilities(block)
        difference = (p_old - p_infer).abs_()
    trajectory_gap = (mismatch.log_rho / block.lengths.clamp(min=1)).abs()
    filled = torch.zeros_like(furthest)
    if bool(block.l_infer.amax() >= 0):
        filled = (segment_sums(_impossible(block).double(), block.lengths) > 0).sum()
    return {
        "tokens": block.lengths.sum(),
        "l_old": block.l_old.sum(dtype=torch.float64),
        "log_k": mismatch.log_k.sum(),
        "log_k_abs": log_k_abs.sum(),
        "k": total(k),
        "k_squared": total(k * k),
        "k_minus_1": k_minus_1.sum(),
        "k_minus_1_squared": torch.dot(k_minus_1, k_minus_1),
        "k3": mismatch.k3.sum(),
        "difference": difference.sum(),
        "difference_squared": torch.dot(difference, difference),
        "trajectories": block.lengths.count_nonzero(),
        "trajectory_gap": trajectory_gap.sum(),
        "filled": filled,
        f"{LARGEST}log_k_abs": furthest,
        f"{LARGEST}difference": difference.amax(),
        f"{LARGEST}trajectory_gap": trajectory_gap.amax(),
    }


def _impossible(block: Block) -> Tensor:
    """Returns [n] bool: tokens whose l_infer cannot come from a sampler.

    A zero means certainty, which float32 reaches for likely tokens; for a token that the training engine finds
    unlikely, it means that the value is missing (NeMo-RL 4218).
    """
    zero = (block.l_infer == 0) & (block.l_old < math.log(CERTAIN))
    return zero | (block.l_infer > ABOVE_ZERO)


def mismatch_metrics(sums: Sums) -> dict[str, Tensor]:
    """Returns `vllm_kl/*` of a batch.

    k3: Schulman, "Approximating KL Divergence", 2020, with x ~ pi_infer and r = pi_train / pi_infer.
    """
    n = sums["tokens"]
    difference = sums["difference"] / n
    return {
        "vllm_kl/k1": -sums["log_k"] / n,
        "vllm_kl/k3": sums["k3"] / n,
        "vllm_kl/l_old": sums["l_old"] / n,
        "vllm_kl/prob_diff_mean": difference,
        "vllm_kl/prob_diff_max": sums[f"{LARGEST}difference"],
        "vllm_kl/prob_diff_std": (sums["difference_squared"] / n - difference**2).clamp(min=0).sqrt(),
        "vllm_kl/log_ratio_abs_mean": sums["log_k_abs"] / n,
        "vllm_kl/log_ratio_abs_max": sums[f"{LARGEST}log_k_abs"],
        # Not from k - 1: if sum k is far below n, n + sum (k - 1) has none of its digits left.
        "vllm_kl/ess": sums["k"] ** 2 / sums["k_squared"] / n,
        # mean(k^2) - 1, from k^2 - 1 = (k - 1)^2 + 2 (k - 1), which keeps its digits where k is close to 1.
        "vllm_kl/chi2": (sums["k_minus_1_squared"] + 2 * sums["k_minus_1"]) / n,
        "vllm_kl/sequence_gap_mean": sums["trajectory_gap"] / sums["trajectories"],
        "vllm_kl/sequence_gap_max": sums[f"{LARGEST}trajectory_gap"],
        "vllm_kl/filled": sums["filled"] / sums["trajectories"],
    }


SIGNS = {"positive": 1, "negative": -1}
TOKENS_AT_ONCE = 1 << 20
ROW_TOKENS_AT_ONCE = 1 << 17  # tokens, in whole trajectories: their temporaries stay in a core's cache


@torch.no_grad()
def sums_by_sign(tokens: Tokens, advantages_N: Tensor) -> Tensor:
    """Returns [3, 3] float64, a row each for A > 0, A < 0 and all tokens: the number of tokens that count, and the sums
    of their k1 and k3; the last row has only the number.

    A token counts if m = 1 and its log-probabilities are finite; the sums of several parts add up.

    Args:
        advantages_N: any float dtype; 0 belongs to neither sign.
    """
    sums = torch.zeros(3, 3, dtype=torch.float64, device=advantages_N.device)
    for start in range(0, len(advantages_N), TOKENS_AT_ONCE):
        block = slice(start, start + TOKENS_AT_ONCE)
        log_k_n = tokens.l_old[block].double() - tokens.l_infer[block].double()
        counts_n = tokens.mask[block] & log_k_n.isfinite()
        sums[2, 0] += counts_n.sum()
        for row, sign in zip(sums, SIGNS.values(), strict=False):
            log_k = log_k_n[counts_n & (advantages_N[block] * sign > 0)]
            row += torch.stack([log_k.new_tensor(len(log_k)), -log_k.sum(), k3_of(log_k).sum()])
    return sums.cpu()


@torch.no_grad()
def sums_by_row(tokens: Tokens) -> Tensor:
    """Returns [B, 4] float64: each trajectory's number of tokens that count (as in `sums_by_sign`), the sums of their
    k1 and k3, and its number of generated tokens."""
    sums = torch.zeros(len(tokens.offsets) - 1, 4, dtype=torch.float64, device=tokens.mask.device)
    for part, rows in blocks(tokens.offsets, ROW_TOKENS_AT_ONCE):
        mask, lengths = tokens.mask[part], tokens.offsets[rows.start : rows.stop + 1].diff()
        log_k = tokens.l_old[part].double() - tokens.l_infer[part].double()
        counts = mask & log_k.isfinite()
        log_k.masked_fill_(~counts, 0.0)
        of_row = (counts.double(), -log_k, k3_of(log_k), mask.double())
        sums[rows] = torch.stack([segment_sums(values, lengths) for values in of_row], dim=1)
    return sums.cpu()


@torch.no_grad()
def signs_of_rows(sums_B4: Tensor, advantages: Tensor) -> tuple[Tensor, list[int]]:
    """Returns `sums_by_sign` over the trajectories whose generated tokens all have A > 0, all A < 0, or all A = 0; and
    the rows of the other trajectories, whose tokens have to be read.

    Args:
        sums_B4: of `sums_by_row`.
        advantages: nested [B, r], 0 where no token was generated.
    """
    values, offsets, found = advantages.values(), advantages.offsets(), torch.zeros(3, 3, dtype=torch.float64)
    left = torch.zeros(len(sums_B4), dtype=torch.bool)  # false also for trajectories without tokens
    for part, rows in blocks(offsets, ROW_TOKENS_AT_ONCE):
        lengths, of_row = offsets[rows.start : rows.stop + 1].diff(), sums_B4[rows]
        above = segment_sums((values[part] > 0).double(), lengths).cpu()
        below = segment_sums((values[part] < 0).double(), lengths).cpu()
        alike = ((above == of_row[:, 3]) & (below == 0), (below == of_row[:, 3]) & (above == 0))
        for row, these in zip(found, alike, strict=False):
            row += of_row[these & (above + below > 0), :3].sum(0)
        same = alike[0] | alike[1] | (above + below == 0)
        found[2, 0] += of_row[same, 0].sum()
        left[rows] = ~same
    return found, left.nonzero().squeeze(1).tolist()


def advantage_metrics(sums: Tensor) -> dict[str, float]:
    """Returns `vllm_kl/{share,k1,k3}/advantage/{positive,negative}` and `vllm_kl/advantage_skew` from `sums_by_sign`;
    means over no token are left out."""
    *by_sign, (counted, _, _) = sums.tolist()
    metrics: dict[str, float] = {}
    k1_of = {}
    for name, (count, k1, k3) in zip(SIGNS, by_sign, strict=True):
        if counted:
            metrics[f"vllm_kl/share/advantage/{name}"] = count / counted
        if count:
            k1_of[name] = k1 / count
            metrics |= {f"vllm_kl/k1/advantage/{name}": k1_of[name], f"vllm_kl/k3/advantage/{name}": k3 / count}
    if len(k1_of) == len(SIGNS):
        metrics["vllm_kl/advantage_skew"] = k1_of["positive"] - k1_of["negative"]
    return metrics
