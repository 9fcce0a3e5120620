"""How far two engines disagree about the same tokens.

Shape legend: N tokens, n tokens of a block.
`l_infer` and `l_old` are log-probabilities of the sampled tokens under the same weights: the rollout
engine's and the training engine's. k = exp(l_old - l_infer), training over inference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.segments import Workspace
from verl_ext.core.tokens import LOG_RATIO_BOUND, Tokens


def mismatch_ratio(l_infer: Tensor, l_old: Tensor) -> Tensor:
    """k = exp(l_old - l_infer) in float32, the log-ratio clamped to +-20. NaN stays NaN."""
    return (l_old.float() - l_infer.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def count_non_finite(tensor: Tensor, mask: Tensor) -> int:
    """How many entries under `mask` are NaN or infinite."""
    return int((~torch.isfinite(tensor) & mask).sum())


@dataclass(frozen=True)
class Gap:
    """A block of tokens under both engines, [n] each, in the memory of its block until the next one.

    Log-ratios are float64, so that k - log k - 1 keeps its digits where it is log(k)^2 / 2 of a small log k; what is
    only compared with bounds or added up is float32.

    Attributes:
        counts: float32, 1 on the tokens that count: masked in, and their log-probabilities finite; else 0.
        clean: whether all of them count.
        log_k: float64, l_old - l_infer; 0 where a token does not count.
        log_k_sum: its sum.
        bounded: float64, log_k clamped to +-20.
        k_minus_1: float64, exp(bounded) - 1.
        k: float32, exp(bounded); 1 where a token does not count.
        p_infer: float32, exp(l_infer), also of tokens that do not count; 0 where it is not finite.
    """

    counts: Tensor
    clean: bool
    log_k: Tensor
    log_k_sum: Tensor
    bounded: Tensor
    k_minus_1: Tensor
    k: Tensor
    p_infer: Tensor

    @classmethod
    def of(cls, tokens: Tokens, part: slice, memory: Workspace) -> "Gap":
        n = part.stop - part.start
        log_k, counts, total = log_ratio(tokens, part, memory)
        clean = total is not None
        bounded = torch.clamp(log_k, -LOG_RATIO_BOUND, LOG_RATIO_BOUND, out=memory.take("bounded", n))
        k_minus_1 = torch.expm1(bounded, out=memory.take("k_minus_1", n))
        k = memory.take("k", n, torch.float32).copy_(bounded).exp_()
        p_infer = memory.take("p_infer", n, torch.float32).copy_(tokens.l_infer[part]).exp_()
        if not clean:
            p_infer.nan_to_num_(0.0, 0.0, 0.0)
        return cls(counts, clean, log_k, log_k.sum() if total is None else total, bounded, k_minus_1, k, p_infer)


def log_ratio(tokens: Tokens, part: slice, memory: Workspace) -> tuple[Tensor, Tensor, Tensor | None]:
    """log k of a block, 0 where a token does not count; 1 where it does, else 0; and the sum, if all do."""
    mask, n = tokens.mask[part], part.stop - part.start
    old, infer = memory.take("log_k", n).copy_(tokens.l_old[part]), memory.take("infer", n).copy_(tokens.l_infer[part])
    log_k = old.sub_(infer)
    counts = memory.take("counts", n, torch.float32)
    total = log_k.sum()
    if bool(total.isfinite()) and int(mask.count_nonzero()) == n:
        return log_k, counts.fill_(1), total  # most blocks, at half the cost
    # x - x is 0 for a finite x, else NaN.
    torch.eq(log_k - log_k, 0, out=counts).mul_(mask)
    return log_k.nan_to_num_(0.0, 0.0, 0.0).mul_(counts), counts, None


def probabilities(tokens: Tokens, part: slice, memory: Workspace) -> dict[str, Tensor]:
    """exp(l_infer) and exp(l_old) of a block in float64; 0 where they are not finite."""
    n = part.stop - part.start
    fields = {"p_infer": tokens.l_infer, "p_old": tokens.l_old}
    return {
        name: memory.take(f"exact_{name}", n).copy_(values[part]).exp_().nan_to_num_(0.0, 0.0, 0.0)
        for name, values in fields.items()
    }
