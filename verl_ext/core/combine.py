"""The gap between the weights with which two engines combine a token's experts.

Shape legend: N tokens, L MoE layers, K experts per token (top-k).
"""

import torch
from torch import Tensor


def weight_gap(ids_NLK: Tensor, weights_NLK: Tensor, other_ids_NLK: Tensor, other_weights_NLK: Tensor) -> Tensor:
    """[N, L] float32 in [0, 1]: the total variation between the two distributions over experts.

    0 where both engines give the same experts the same shares, 1 where they have no expert in common. Each side is
    divided by its sum, so that a factor on the experts' output (DeepSeek-V3's routed_scaling_factor) plays no part.

    Args:
        ids_NLK, other_ids_NLK: any integer dtype; within a set distinct, in any order.
        weights_NLK, other_weights_NLK: of these experts, at least 0, any float.

    Source: TV = 1 - sum of the smaller shares, of what both chose; that engines differ in the weights even where they
    choose alike is why prime-rl's total router recall (PR 3523) ships them too.
    """
    share, other = (_shares(weights) for weights in (weights_NLK, other_weights_NLK))
    dtype = torch.promote_types(ids_NLK.dtype, other_ids_NLK.dtype)
    ids_NLK, other_ids_NLK = ids_NLK.to(dtype), other_ids_NLK.to(dtype)
    common_NL = torch.zeros(ids_NLK.shape[:2], device=ids_NLK.device)
    for k in range(ids_NLK.shape[2]):  # one of theirs with all of ours: temporaries of [N, L, K]
        same_NLK = ids_NLK == other_ids_NLK[..., k : k + 1]
        common_NL += (torch.minimum(share, other[..., k : k + 1]) * same_NLK).sum(-1)
    return (1 - common_NL).clamp(min=0)


def _shares(weights_NLK: Tensor) -> Tensor:
    weights_NLK = weights_NLK.float()
    return weights_NLK / weights_NLK.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
