"""How many experts two engines have in common for the same token.

Shape legend: N tokens, n tokens of a block, L MoE layers, K experts per token (top-k).
"""

from importlib.util import find_spec

import torch
from torch import Tensor

# Comparisons of a block, a byte each. A thread's share stays in its core's cache between the comparison and the sum; on
# other devices a block only has to be worth its launches.
BLOCK_PER_THREAD = 2**20
BLOCK_ON_DEVICE = 2**26


def expert_overlap(train_NLK: Tensor, infer_NLK: Tensor) -> Tensor:
    """|T and I| per token and layer, [N, L] uint8: how many of the K expert ids are in both sets.

    The order of the ids inside a set does not matter; ids within one set are distinct, as top-k's are. The two may
    differ in integer dtype. K is at most 255.

    Raises:
        ValueError: the two tensors differ in shape.
    """
    if train_NLK.shape != infer_NLK.shape:
        raise ValueError(
            f"routing of the training engine {tuple(train_NLK.shape)} and of the rollout "
            f"{tuple(infer_NLK.shape)} differ in shape [tokens, layers, top_k]"
        )
    if train_NLK.is_cuda and find_spec("triton"):
        from verl_ext.core.overlap_triton import fused_overlap

        return fused_overlap(train_NLK, infer_NLK)
    return blockwise_overlap(train_NLK, infer_NLK)


def blockwise_overlap(train_NLK: Tensor, infer_NLK: Tensor) -> Tensor:
    """`expert_overlap` in plain torch, on any device; its temporaries do not grow with N.

    With the ids of a set K planes apart, all K * K comparisons run along contiguous memory, so that both they and
    their sum are vector instructions, a byte an id. The plain comparison of [N, L, K, 1] with [N, L, 1, K] goes over
    runs of K.
    """
    (N, L, K), device = train_NLK.shape, train_NLK.device
    dtype = torch.promote_types(train_NLK.dtype, infer_NLK.dtype)
    comparisons = BLOCK_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else BLOCK_ON_DEVICE
    n = max(1, min(N, comparisons // max(1, L * K * K)))
    train_KnL, infer_KnL = torch.empty(2, K, n, L, dtype=dtype, device=device)
    # 0 or 1 in the dtype of the ids: torch compares wider ids into bool one by one.
    same_KKnL = torch.empty(K, K, n, L, dtype=dtype, device=device)
    overlap_NL = torch.empty(N, L, dtype=torch.uint8, device=device)
    for start in range(0, N, n):
        part = slice(start, start + n)
        count = len(overlap_NL[part])
        train, infer, same = train_KnL[:, :count], infer_KnL[:, :count], same_KKnL[:, :, :count]
        train.copy_(train_NLK[part].permute(2, 0, 1))
        infer.copy_(infer_NLK[part].permute(2, 0, 1))
        torch.eq(train.unsqueeze(1), infer.unsqueeze(0), out=same)
        overlap_NL[part] = same.sum((0, 1), dtype=dtype)
    return overlap_NL
