"""The gap by the sign of the advantage, known once there are advantages.

k1 and k3 of a batch can stand still while the gap changes the update: what raises a token's probability and what lowers
it are weighted by different errors ("Diagnosing Training Inference Mismatch in LLM Reinforcement Learning",
arXiv 2605.14220).

Most estimators give all generated tokens of a trajectory the same advantage. Then sums by trajectory are enough, which
are known before there are advantages: `sums_by_row`, `signs_of_rows`.

Shape legend: N response tokens, n of a block, B trajectories.
"""

import torch
from torch import Tensor

from verl_ext.core.mismatch import k3_of, k3_sum
from verl_ext.core.segments import blocks, segment_sums
from verl_ext.core.tokens import Tokens

SIGNS = {"positive": 1, "negative": -1}
BLOCK = 1 << 20
NEAR = 1 << 17  # tokens, in whole trajectories: what is made of them stays near a core


@torch.no_grad()
def sums_by_sign(tokens: Tokens, advantages_N: Tensor) -> Tensor:
    """[3, 3] float64: of the tokens with A > 0, with A < 0, and of all, how many count, and their k1 and k3.

    A token counts with m = 1 and finite log-probabilities; sums of several parts add up.

    Args:
        advantages_N: any float dtype; 0 belongs to neither sign.
    """
    sums = torch.zeros(3, 3, dtype=torch.float64)
    for start in range(0, len(advantages_N), BLOCK):
        block = slice(start, start + BLOCK)
        log_k_n = tokens.l_old[block].double() - tokens.l_infer[block].double()
        counts_n = tokens.mask[block] & log_k_n.isfinite()
        sums[2, 0] += counts_n.sum().cpu()
        for row, sign in zip(sums, SIGNS.values(), strict=False):
            log_k = log_k_n[counts_n & (advantages_N[block] * sign > 0)]
            row += torch.stack([log_k.new_tensor(len(log_k)), -log_k.sum(), k3_sum(log_k)]).cpu()
    return sums


@torch.no_grad()
def sums_by_row(tokens: Tokens) -> Tensor:
    """[B, 4] float64: of each trajectory the tokens that count, as of `sums_by_sign`, their k1 and k3, and its
    generated tokens."""
    sums = torch.zeros(len(tokens.offsets) - 1, 4, dtype=torch.float64, device=tokens.mask.device)
    for part, rows in blocks(tokens.offsets, NEAR):
        mask, lengths = tokens.mask[part], tokens.offsets[rows.start : rows.stop + 1].diff()
        log_k = tokens.l_old[part].double() - tokens.l_infer[part].double()
        counts = mask & log_k.isfinite()
        log_k.masked_fill_(~counts, 0.0)
        of_row = (counts.double(), -log_k, k3_of(log_k), mask.double())
        sums[rows] = torch.stack([segment_sums(values, lengths) for values in of_row], dim=1)
    return sums.cpu()


@torch.no_grad()
def signs_of_rows(sums_B4: Tensor, advantages: Tensor) -> tuple[Tensor, list[int]]:
    """`sums_by_sign` of the trajectories whose generated tokens all have A > 0, or all A < 0, or none either; and which
    trajectories these are not, whose tokens have to be looked at.

    Args:
        sums_B4: of `sums_by_row`.
        advantages: nested [B, r], 0 where no token was generated.
    """
    values, offsets, found = advantages.values(), advantages.offsets(), torch.zeros(3, 3, dtype=torch.float64)
    left = torch.zeros(len(sums_B4), dtype=torch.bool)  # also of what has no tokens
    for part, rows in blocks(offsets, NEAR):
        lengths, of_row = offsets[rows.start : rows.stop + 1].diff(), sums_B4[rows]
        above, below = (segment_sums(signs.double(), lengths).cpu() for signs in (values[part] > 0, values[part] < 0))
        alike = ((above == of_row[:, 3]) & (below == 0), (below == of_row[:, 3]) & (above == 0))
        for row, these in zip(found, alike, strict=False):
            row += of_row[these & (above + below > 0), :3].sum(0)
        same = alike[0] | alike[1] | (above + below == 0)
        found[2, 0] += of_row[same, 0].sum()
        left[rows] = ~same
    return found, left.nonzero().squeeze(1).tolist()


def advantage_metrics(sums: Tensor) -> dict[str, float]:
    """`vllm_kl/{share,k1,k3}/advantage/{positive,negative}` and `vllm_kl/advantage_skew`, of `sums_by_sign`; means over
    no token are left out."""
    *by_sign, (counted, _, _) = sums.tolist()
    metrics: dict[str, float] = {}
    for name, (count, k1, k3) in zip(SIGNS, by_sign, strict=True):
        if counted:
            metrics[f"vllm_kl/share/advantage/{name}"] = count / counted
        if count:
            metrics |= {f"vllm_kl/k1/advantage/{name}": k1 / count, f"vllm_kl/k3/advantage/{name}": k3 / count}
    if all(count for count, _, _ in by_sign):
        positive, negative = (k1 / count for count, k1, _ in by_sign)
        metrics["vllm_kl/advantage_skew"] = positive - negative
    return metrics
