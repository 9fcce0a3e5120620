"""How many experts two engines have in common for the same token.

Shape legend: N tokens, n tokens of a block, L MoE layers, K experts per token (top-k).
"""

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from verl_ext.core.blocks import Scratch

PAIRS = 2**20  # of a token and a layer, a block: some 10 MB of temporaries
COMPARISONS = 2**22  # of ids at a time, a byte each
WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))  # bytes, and a dtype of that size


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

    Most sets are equal, and in the same order, for both engines sort by score: they are found by comparing the bytes
    of a whole set as one word. Only the ids of the others are compared with each other.
    """
    N, L, K = train_NLK.shape
    dtype = torch.promote_types(train_NLK.dtype, infer_NLK.dtype)
    overlap_NL = torch.full((N, L), K, dtype=torch.uint8, device=train_NLK.device)
    tokens, scratch = max(1, PAIRS // max(1, L)), Scratch(train_NLK.device)
    for start in range(0, N, tokens):
        part = slice(start, start + tokens)
        train_PW, infer_PW = _view_words(
            *(ids[part].to(dtype).contiguous().view(-1, K) for ids in (train_NLK, infer_NLK))
        )
        unequal_P = train_PW[:, 0] != infer_PW[:, 0]
        for word in range(1, train_PW.shape[1]):
            unequal_P |= train_PW[:, word] != infer_PW[:, word]
        overlap_P, size = overlap_NL[part].view(-1), max(1, COMPARISONS // K**2)
        chunks: Iterable[Tensor | slice] = [slice(first, first + size) for first in range(0, len(unequal_P), size)]
        if 2 * unequal_P.count_nonzero() < len(unequal_P):  # else picking them out costs more than it saves
            chunks = unequal_P.nonzero().squeeze(1).split(size)
        for chunk in chunks:
            scratch.next_block()
            overlap_P[chunk] = _count_common(train_PW[chunk].view(dtype), infer_PW[chunk].view(dtype), scratch)
    return overlap_NL


def _view_words(train_PK: Tensor, infer_PK: Tensor) -> tuple[Tensor, Tensor]:
    """The same bytes in the widest words that make up a row, and that start at a multiple of their width in both."""
    places = (train_PK.shape[1], train_PK.storage_offset(), infer_PK.storage_offset())
    size = train_PK.element_size()
    word = next(dtype for width, dtype in WORDS if all(place * size % width == 0 for place in places))
    return train_PK.view(word), infer_PK.view(word)


def _count_common(train_PK: Tensor, infer_PK: Tensor, scratch: Scratch) -> Tensor:
    """[P] uint8 by K * K comparisons, the ids of a set K planes apart: both they and their sum are vector instructions
    along contiguous memory."""
    (P, K), dtype = train_PK.shape, train_PK.dtype
    # In three dimensions: torch's copy of a transposed matrix is several times slower.
    train_KP, infer_KP = (
        scratch.empty(K, P, 1, dtype=dtype).copy_(ids.T.unsqueeze(2)).squeeze(2) for ids in (train_PK, infer_PK)
    )
    # 0 or 1 in the dtype of the ids: torch compares wider ids into bool one by one.
    same_KKP = scratch.empty(K, K, P, dtype=dtype)
    torch.eq(train_KP.unsqueeze(1), infer_KP.unsqueeze(0), out=same_KKP)
    return same_KKP.sum((0, 1), dtype=dtype).to(torch.uint8)
