"""Attention among packed sequences of one length, instead of flash attention, which a bare machine lacks.

Flash attention handles packed sequences; torch's own kernels handle rows of a matrix. If all sequences have one length,
the packed tokens are such rows, and no mask is needed. A mask would slow the model down, so that what is measured would
seem cheaper.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = "rows"  # the name of the implementation, for transformers


def register(length: int) -> None:
    """Registers attn_implementation="rows" for sequences of `length` tokens."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        def fold(states: Tensor) -> Tensor:
            """Returns [1, H, N, d] as [N / length, H, length, d]."""
            return states[0].unflatten(1, (-1, length)).transpose(0, 1)

        query, key, value = map(fold, (query, key, value))
        sinks, window = kwargs.get("s_aux"), kwargs.get("sliding_window")
        if sinks is None and window is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            out = with_sinks(query, key, value, scaling, sinks, window)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0), None

    AttentionInterface.register(ROWS, attention)
    AttentionMaskInterface.register(ROWS, lambda *args, **kwargs: None)


def with_sinks(query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor, window: int | None) -> Tensor:
    """Computes gpt-oss's attention: a logit per head takes a share of the attention away, and some layers have
    windows."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    place = torch.arange(length, device=query.device)
    hidden = place[:, None] < place
    if window is not None:
        hidden |= place[:, None] - place >= window
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
    nowhere = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)
    return torch.cat([logits, nowhere], 3).softmax(-1)[..., :length] @ value
