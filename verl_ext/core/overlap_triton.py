"""`expert_overlap` as one fused kernel, for CUDA tensors: every id is read once, every count written once.

Shape legend: N tokens, L MoE layers, K experts per token (top-k); a pair is a token and a layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS_OF_PROGRAM = 128  # one per thread


@triton.jit
def count_common(
    train_NLK,
    infer_NLK,
    overlap_NL,
    pairs,
    train_token_stride,
    train_layer_stride,
    train_id_stride,
    infer_token_stride,
    infer_layer_stride,
    infer_id_stride,
    L: tl.constexpr,  # known when compiling, so that the division is a multiplication
    K: tl.constexpr,
    SIZE: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # N * L * K can pass 2**31
    exists = pair < pairs
    token, layer = pair // L, pair % L
    train_at = train_NLK + token * train_token_stride + layer * train_layer_stride
    infer_at = infer_NLK + token * infer_token_stride + layer * infer_layer_stride
    train = ()  # type: tuple  # a type comment, because Triton would compile an annotation
    for k in tl.static_range(K):
        train += (tl.load(train_at + k * train_id_stride, mask=exists),)
    common = tl.zeros([SIZE], tl.uint8)
    for j in range(K):
        infer = tl.load(infer_at + j * infer_id_stride, mask=exists)
        found = infer == train[0]
        for k in tl.static_range(1, K):
            found |= infer == train[k]
        common += found
    tl.store(overlap_NL + pair, common, mask=exists)


def fused_overlap(train_NLK: Tensor, infer_NLK: Tensor) -> Tensor:
    """Computes `blockwise_overlap` in one pass, for tensors of one shape on one GPU, with any strides and integer
    dtypes."""
    N, L, K = train_NLK.shape
    overlap_NL = torch.empty(N, L, dtype=torch.uint8, device=train_NLK.device)
    if overlap_NL.numel() == 0:
        return overlap_NL
    with torch.cuda.device_of(train_NLK):
        count_common[(triton.cdiv(N * L, PAIRS_OF_PROGRAM),)](
            train_NLK, infer_NLK, overlap_NL, N * L, *train_NLK.stride(), *infer_NLK.stride(), L, K, PAIRS_OF_PROGRAM
        )
    return overlap_NL
