"""How far two engines disagree about the same tokens.

Shape legend: N tokens, packed (any shape works as long as all tensors share it).
`l_infer` and `l_old` are log-probabilities of the sampled tokens under the same weights: the rollout
engine's and the training engine's. k = exp(l_old - l_infer), training over inference.
"""

import torch
from torch import Tensor

# exp(20) is 4.9e8: beyond any threshold in use, and its square still fits float32.
LOG_RATIO_BOUND = 20.0


def mismatch_ratio(l_infer: Tensor, l_old: Tensor) -> Tensor:
    """k = exp(l_old - l_infer) in float32, the log-ratio clamped to +-20. NaN stays NaN."""
    return (l_old.float() - l_infer.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def count_non_finite(tensor: Tensor, mask: Tensor) -> int:
    """How many entries under `mask` are NaN or infinite."""
    return int((~torch.isfinite(tensor) & mask).sum())


def mismatch_metrics(l_infer: Tensor, l_old: Tensor, mask: Tensor) -> dict[str, float]:
    """The `vllm_kl/*` metrics over the tokens where `mask` is true; {} when there are none.

    Args:
        l_infer: [N] log-probabilities under the rollout engine, any float dtype.
        l_old: [N] log-probabilities under the training engine.
        mask: [N] bool, true on tokens the model generated.

    Returns (means over masked tokens; natural log):
        vllm_kl/k1: mean(l_infer - l_old), an estimate of KL(pi_infer || pi_train) that can be negative.
        vllm_kl/k3: mean(k - log k - 1), the same KL, never negative (Schulman, "Approximating KL
            Divergence", 2020, with x ~ pi_infer and r = pi_train / pi_infer).
        vllm_kl/prob_diff_{mean,max,std}: of |exp(l_infer) - exp(l_old)| (population std).
        vllm_kl/log_ratio_abs_{mean,max}: of |l_infer - l_old|.
        vllm_kl/ess: (sum k)^2 / sum k^2 over the token count, 1 when the engines agree.
        vllm_kl/chi2: mean(k^2) - 1.

    Sums run in float64: k - log k - 1 is log(k)^2 / 2 for the small log-ratios of a healthy run, of which
    float32 would keep no digit.
    """
    infer, old = l_infer[mask].double(), l_old[mask].double()
    n = infer.numel()
    if n == 0:
        return {}
    log_ratio = old - infer
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k = bounded.exp()
    prob_diff = (infer.exp() - old.exp()).abs()
    k_squared = k.square().sum()
    stats = {
        "k1": -log_ratio.mean(),
        "k3": (torch.expm1(bounded) - bounded).mean(),
        "prob_diff_mean": prob_diff.mean(),
        "prob_diff_max": prob_diff.max(),
        "prob_diff_std": prob_diff.std(correction=0),
        "log_ratio_abs_mean": log_ratio.abs().mean(),
        "log_ratio_abs_max": log_ratio.abs().max(),
        "ess": k.sum().square() / k_squared / n,
        "chi2": k_squared / n - 1,
    }
    values = torch.stack(list(stats.values())).tolist()  # one transfer, wherever the tensors live
    return {f"vllm_kl/{name}": value for name, value in zip(stats, values, strict=True)}
