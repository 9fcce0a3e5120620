"""The gap by the sign of the advantage, known once there are advantages.

k1 and k3 of a batch can stand still while the gap changes the update: what raises a token's probability and what lowers
it are weighted by different errors ("Diagnosing Training Inference Mismatch in LLM Reinforcement Learning",
arXiv 2605.14220).

Shape legend: N response tokens, n of a block.
"""

import torch
from torch import Tensor

from verl_ext.core.mismatch import k3_sum
from verl_ext.core.tokens import Tokens

SIGNS = {"positive": 1, "negative": -1}
BLOCK = 1 << 20


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
