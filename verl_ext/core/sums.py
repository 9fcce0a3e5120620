"""Sums of a batch from those of its blocks.

They come in trees: a tensor, None, or a dataclass, dictionary or tuple of trees.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def combined(trees: Sequence[Tree], how: Callable[[Tensor, int], Tensor]) -> Tree:
    """One tree in float64 from those of all blocks: `torch.sum` or `torch.amax` over the blocks at each place."""
    return _merged(trees, lambda tensors: how(torch.stack(tensors).double(), 0))


def on_host(tree: Tree) -> Tree:
    """A copy on the host of a tree of one dtype, in one transfer, wherever its tensors live."""
    tensors: list[Tensor] = []
    _merged([tree], tensors.extend)
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    copies = iter(flat.split([tensor.numel() for tensor in tensors]))
    return _merged([tree], lambda found: next(copies).view(found[0].shape))


def _merged(trees: Sequence[Any], merge: Callable[[list[Tensor]], Any]) -> Any:
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return merge(list(trees))
    if isinstance(first, tuple):
        return tuple(_merged(values, merge) for values in zip(*trees, strict=True))
    if isinstance(first, dict):
        return {key: _merged([tree[key] for tree in trees], merge) for key in first}
    return type(first)(**_merged([vars(tree) for tree in trees], merge))
