"""What a model computes on its way from tokens to logits, seen by hooks on its modules: vLLM's as transformers' own.

Both name a decoder's parts alike; what they return differs. vLLM's layers hand the residual on beside the hidden
states, so that theirs is the sum of both.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verl_ext.base.errors import HookError

LAYER = r"(?:^|\.)layers\.(\d+)"
BLOCK = r"(?:mlp|block_sparse_moe|feed_forward)"
# Point -> what the name of its module ends in. In the order of a layer's computation.
POINTS = {
    "indexer": rf"{LAYER}\.(?:self_attn|attention)\.indexer$",
    "attention": rf"{LAYER}\.(?:self_attn|attention|linear_attn)$",
    "router": rf"{LAYER}\.{BLOCK}\.(?:gate|router)$",
    "experts": rf"{LAYER}\.{BLOCK}$",
    "layer": rf"{LAYER}$",
}
INDEXER = ".indexer"
ENDS = {"embedding": r"(?:^|\.)embed_tokens$", "norm": r"^(?:.*model\.)?norm$"}


class Recorder:
    """Hooks on a model, while it is open.

    Raises:
        HookError: the model has no decoder layers known by their names.
    """

    def __init__(self, model: nn.Module):
        self._passes: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if (point := point_of(name)) is not None:
                self._handles.append(module.register_forward_hook(self._hook(point)))
        if not self._handles:
            raise HookError(f"{type(model).__name__} has no decoder layers named as transformers names them")

    def close(self) -> dict[str, Tensor]:
        """Take the hooks away; point -> [tokens, width] float32 on the host, of all passes since."""
        for handle in self._handles:
            handle.remove()
        return {point: _join(parts) for point, parts in self._passes.items()}

    def _hook(self, point: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = state_of(point, output)
            if point.endswith(INDEXER):
                value = positions(value, own_positions(inputs))
            self._passes.setdefault(point, []).append(value.detach().float().flatten(0, -2).cpu())

        return hook


def point_of(name: str) -> str | None:
    """The point of a module's name: "embedding", "norm", or with its layer's number as in "3.router"."""
    for point, pattern in POINTS.items():
        if found := re.search(pattern, name):
            return f"{found[1]}.{point}"
    return next((point for point, pattern in ENDS.items() if re.search(pattern, name)), None)


def order_of(point: str) -> tuple[int, int]:
    """The place of a point in the computation."""
    if point in ENDS:
        return (-1, 0) if point == "embedding" else (10**9, 0)
    layer, _, part = point.partition(".")
    return int(layer), list(POINTS).index(part)


def positions(chosen: Tensor, own: Tensor) -> Tensor:
    """What an indexer of sparse attention chose, [..., n, K]: -1 where that is nothing, or behind the token itself.

    vLLM returns its buffer, with rows for more than the n tokens, and -1 where there are fewer positions than K;
    transformers the top-k of scores that are -inf for later positions, which stand in for missing ones.

    Args:
        chosen: [..., at least n, K] integers.
        own: [n], the position of each token.

    Source: `SparseAttnIndexer` of vLLM's sparse_attn_indexer.py, `GlmMoeDsaIndexer` of transformers' glm_moe_dsa.
    """
    chosen = chosen[..., : len(own), :]
    return torch.where(chosen <= own.unsqueeze(-1), chosen, -1)


def own_positions(inputs: tuple[Any, ...]) -> Tensor:
    """[n] of an indexer's inputs: vLLM hands the tokens' positions on, transformers whole sequences."""
    hidden, *others = inputs
    for other in others:
        if isinstance(other, Tensor) and not other.is_floating_point() and other.shape == hidden.shape[:1]:
            return other
    return torch.arange(hidden.shape[-2], device=hidden.device)


def _join(parts: list[Tensor]) -> Tensor:
    """One after another, rows filled with -1 to the longest: an indexer chooses fewer positions of a short sequence."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in parts])


def state_of(point: str, output: Any) -> Tensor:
    """The hidden states, a router's logits, or an indexer's positions in what a module returned."""
    if isinstance(output, Tensor):
        return output
    first = output[0]
    if (
        point.endswith(".layer")
        and len(output) == 2
        and isinstance(output[1], Tensor)
        and output[1].shape == first.shape
    ):
        return first + output[1]  # vLLM's residual
    return first
