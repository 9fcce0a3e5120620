"""The gap by the sign of the advantage, known once there are advantages.

k1 and k3 of a batch can stand still while the gap changes the update: what raises a token's probability and what lowers
it are weighted by different errors ("Diagnosing Training Inference Mismatch in LLM Reinforcement Learning",
arXiv 2605.14220).

Shape legend: N response tokens of all trajectories, n of a block.
"""

import torch
from torch import Tensor

from verl_ext.core.mismatch import k3_sum
from verl_ext.core.tokens import Tokens

SIGNS = {"positive": 1, "negative": -1}
BLOCK = 1 << 20


@torch.no_grad()
def advantage_metrics(tokens: Tokens, advantages_N: Tensor) -> dict[str, float]:
    """`vllm_kl/{share,k1,k3}/advantage/{positive,negative}` over the tokens with m = 1 whose log-probabilities are
    finite, and `vllm_kl/advantage_skew`; means over no token are left out.

    Args:
        advantages_N: any float dtype; 0 belongs to neither sign.
    """
    sums = torch.zeros(2, 3, dtype=torch.float64)  # of each sign: tokens, k1, k3
    counted = 0
    for start in range(0, len(advantages_N), BLOCK):
        block = slice(start, start + BLOCK)
        log_k_n = tokens.l_old[block].double() - tokens.l_infer[block].double()
        counts_n = tokens.mask[block] & log_k_n.isfinite()
        counted += int(counts_n.sum())
        for row, sign in zip(sums, SIGNS.values(), strict=True):
            log_k = log_k_n[counts_n & (advantages_N[block] * sign > 0)]
            row += torch.stack([log_k.new_tensor(len(log_k)), -log_k.sum(), k3_sum(log_k)]).cpu()
    metrics: dict[str, float] = {}
    for name, (count, k1, k3) in zip(SIGNS, sums.tolist(), strict=True):
        if counted:
            metrics[f"vllm_kl/share/advantage/{name}"] = count / counted
        if count:
            metrics |= {f"vllm_kl/k1/advantage/{name}": k1 / count, f"vllm_kl/k3/advantage/{name}": k3 / count}
    if bool((sums[:, 0] > 0).all()):
        means = sums[:, 1] / sums[:, 0]
        metrics["vllm_kl/advantage_skew"] = float(means[0] - means[1])
    return metrics
