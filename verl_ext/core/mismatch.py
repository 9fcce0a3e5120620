"""How far two engines disagree about the same tokens.

Shape legend: N tokens, n tokens of a block.
`l_infer` and `l_old` are log-probabilities of the sampled tokens under the same weights: the rollout
engine's and the training engine's. k = exp(l_old - l_infer), training over inference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.segments import Workspace
from verl_ext.core.tokens import Tokens

# exp(20) is 4.9e8: beyond any threshold in use, and its square still fits float32.
LOG_RATIO_BOUND = 20.0


def mismatch_ratio(l_infer: Tensor, l_old: Tensor) -> Tensor:
    """k = exp(l_old - l_infer) in float32, the log-ratio clamped to +-20. NaN stays NaN."""
    return (l_old.float() - l_infer.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def count_non_finite(tensor: Tensor, mask: Tensor) -> int:
    """How many entries under `mask` are NaN or infinite."""
    return int((~torch.isfinite(tensor) & mask).sum())


@dataclass(frozen=True)
class Gap:
    """A block of tokens under both engines, [n] float64; 0 wherever a token does not count.

    Attributes:
        counts: 1 on the tokens that count: masked in, and their log-probabilities finite.
        log_k: l_old - l_infer.
        bounded: log_k clamped to +-20.
        k_minus_1: exp(bounded) - 1.
        p_infer, p_old: the probabilities, also of tokens that do not count; 0 where they are not finite.
    """

    counts: Tensor
    log_k: Tensor
    bounded: Tensor
    k_minus_1: Tensor
    p_infer: Tensor
    p_old: Tensor

    @classmethod
    def of(cls, tokens: Tokens, part: slice, memory: Workspace) -> "Gap":
        """The block's tensors stand in `memory`, until the next block."""
        n = part.stop - part.start
        infer, old = load(tokens, part, memory)
        log_k, counts, clean = log_ratio(infer, old, tokens.mask[part], memory)
        bounded = torch.clamp(log_k, -LOG_RATIO_BOUND, LOG_RATIO_BOUND, out=memory.take("bounded", n))
        k_minus_1 = torch.expm1(bounded, out=memory.take("k_minus_1", n))
        p_infer, p_old = infer.exp_(), old.exp_()
        if not clean:
            for p in (p_infer, p_old):
                p.nan_to_num_(0.0, 0.0, 0.0)
        return cls(counts, log_k, bounded, k_minus_1, p_infer, p_old)


def load(tokens: Tokens, part: slice, memory: Workspace) -> tuple[Tensor, Tensor]:
    """l_infer and l_old of a block in float64."""
    n = part.stop - part.start
    return memory.take("infer", n).copy_(tokens.l_infer[part]), memory.take("old", n).copy_(tokens.l_old[part])


def log_ratio(infer: Tensor, old: Tensor, mask: Tensor, memory: Workspace) -> tuple[Tensor, Tensor, bool]:
    """log k, 0 where a token does not count; 1 where it does, else 0; and whether all do."""
    log_k = torch.sub(old, infer, out=memory.take("log_k", len(mask)))
    counts = memory.take("counts", len(mask))
    if int(mask.count_nonzero()) == len(mask) and bool(log_k.sum().isfinite()):
        return log_k, counts.fill_(1), True  # most blocks, at half the cost
    # x - x is 0 for a finite x, else NaN.
    torch.eq(torch.sub(log_k, log_k, out=counts), 0, out=counts).mul_(mask)
    return log_k.nan_to_num_(0.0, 0.0, 0.0).mul_(counts), counts, False
