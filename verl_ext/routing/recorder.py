"""Records a model's states on the way from tokens to logits, with hooks on its modules.

transformers, vLLM and SGLang name a decoder's parts alike, but their outputs differ. The layers of vLLM and SGLang
return the residual next to the hidden states, so that their state is the sum of both. Megatron's parts are found in
`routing.layers`.

Shape legend: n tokens of a pass, d width.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl_ext.base.errors import HookError
from verl_ext.base.names import HEAD, INDEXER

LAYER = r"(?:^|\.)layers\.(\d+)"
MLP = r"(?:mlp|block_sparse_moe|feed_forward)"
# Point -> pattern of its module's name, in the order of a layer's computation.
POINTS = {
    "indexer": rf"{LAYER}\.(?:self_attn|attention)\.indexer$",
    "attention": rf"{LAYER}\.(?:self_attn|attention|linear_attn)$",
    "router": rf"{LAYER}\.{MLP}\.(?:gate|router)$",
    "experts": rf"{LAYER}\.{MLP}$",
    "layer": rf"{LAYER}$",
}
# vLLM and SGLang have an `lm_head` too, but compute the logits in their `logits_processor`.
ENDS = {
    "embedding": r"(?:^|\.)embed_tokens$",
    "norm": r"^(?:.*model\.)?norm$",
    HEAD: r"(?:^|\.)(?:lm_head|logits_processor)$",
}

HEAD_ROWS = 4  # tokens of a pass whose logits are kept
MOST_ROWS = 512  # tokens of a pass whose states are kept: 8k of them would be tens of GB for a model of 30B parameters
# point -> [n, d] of each forward pass, on the host, in its dtype. HEAD: logits of HEAD_ROWS tokens, in the dtype that
# they were computed in.
Passes = dict[str, list[Tensor]]


@dataclass(frozen=True)
class StatePoint:
    """A point on the way from tokens to logits, and where a model has it.

    Attributes:
        name: see `point_of`.
        module: its forward pass computes the state.
        read: (module, inputs, output) -> the state, [..., d].
    """

    name: str
    module: nn.Module
    read: Callable[[nn.Module, Any, Any], Tensor]


class Recorder:
    """Hooks the modules of these points until it is closed; keeps the first MOST_ROWS tokens of each pass.

    Args:
        gather_tokens: [n, d] of this rank -> [n, d] of all tokens of the pass, where ranks share them.
        takes: returns whether to record the current pass.
    """

    def __init__(
        self,
        points: Sequence[StatePoint],
        gather_tokens: Callable[[Tensor], Tensor] = lambda rows_nd: rows_nd,
        takes: Callable[[], bool] = lambda: True,
    ):
        self._passes: Passes = {}
        self._gather_tokens, self._takes = gather_tokens, takes
        self._handles = [point.module.register_forward_hook(self._hook(point)) for point in points]

    def close(self) -> Passes:
        """Removes the hooks, and returns the recorded states."""
        for handle in self._handles:
            handle.remove()
        return self._passes

    def _hook(self, point: StatePoint) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if output is not None and self._takes():  # vLLM gathers the logits on its first rank only
                rows_nd = self._rows(point.name, point.read(module, inputs, output).detach().flatten(0, -2))
                # A copy: vLLM and SGLang add to these tensors in place.
                self._passes.setdefault(point.name, []).append(rows_nd.to("cpu", copy=True))

        return hook

    def _rows(self, point: str, rows_nd: Tensor) -> Tensor:
        return narrowest(rows_nd[:HEAD_ROWS]) if point == HEAD else self._gather_tokens(rows_nd)[:MOST_ROWS]


def narrowest(values: Tensor) -> Tensor:
    """Returns floating-point values in bfloat16, or else float16, if it holds all of them exactly; else unchanged.

    SGLang casts its logits to float32, so that their dtype does not show in which dtype they were computed.
    """
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if bool(((narrow.to(values.dtype) == values) | values.isnan()).all()):
            return narrow
    return values


def named_points(model: nn.Module) -> list[StatePoint]:
    """Returns the points of a model whose parts have the names of transformers.

    Raises:
        HookError: the model has none.
    """
    found = [
        StatePoint(point, module, partial(_read, point))
        for name, module in model.named_modules()
        if (point := point_of(name)) is not None
    ]
    if not found:
        raise HookError(f"{type(model).__name__} has no decoder layers named as transformers names them")
    return found


def _read(point: str, module: nn.Module, inputs: Any, output: Any) -> Tensor:
    value = state_of(point, output)
    return positions(value, own_positions(inputs)) if point.endswith(INDEXER) else value


def joined_passes(passes: Mapping[str, Sequence[Tensor]], lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Returns point -> the rows of all passes one after another, [tokens, d]; without HEAD.

    Args:
        lengths: the number of first rows to take of each pass: the rest is padding, or another token.

    Raises:
        HookError: the recorded passes do not have these lengths.
    """
    joined = {}
    for point, parts in passes.items():
        if point == HEAD:
            continue
        if lengths is not None:
            found = [len(part) for part in parts]
            if len(found) != len(lengths) or any(rows < length for rows, length in zip(found, lengths, strict=True)):
                raise HookError(f"{point} was recorded for passes of {found} tokens, but {list(lengths)} were expected")
            parts = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        joined[point] = _join(parts)
    return joined


def point_of(name: str) -> str | None:
    """Returns the point of a module's name: one of ENDS, or with its layer's number as in "3.router"."""
    for point, pattern in POINTS.items():
        if found := re.search(pattern, name):
            return f"{found[1]}.{point}"
    return next((point for point, pattern in ENDS.items() if re.search(pattern, name)), None)


def order_of(point: str) -> tuple[int, int]:
    """Returns the place of a point in the computation."""
    if point in ENDS:
        return (-1, 0) if point == "embedding" else (10**9, list(ENDS).index(point))
    layer, _, part = point.partition(".")
    return int(layer), list(POINTS).index(part)


def positions(chosen: Tensor, own: Tensor) -> Tensor:
    """Returns the positions that an indexer of sparse attention chose, [..., n, K]; -1 for none, or for one after the
    token itself.

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
    """Returns the positions [n] from an indexer's inputs: vLLM passes the tokens' positions, transformers whole
    sequences."""
    hidden, *others = inputs
    for other in others:
        if isinstance(other, Tensor) and not other.is_floating_point() and other.shape == hidden.shape[:1]:
            return other
    return torch.arange(hidden.shape[-2], device=hidden.device)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates, with rows filled with -1 to the longest: an indexer chooses fewer positions of a short sequence."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in parts])


def state_of(point: str, output: Any) -> Tensor:
    """Returns the hidden states, logits, or an indexer's positions from a module's output."""
    if isinstance(output, Tensor):
        return output
    if point == HEAD:
        return output.next_token_logits  # SGLang's LogitsProcessorOutput
    first = output[0]
    pair = point.endswith(".layer") and len(output) == 2
    if pair and isinstance(output[1], Tensor) and output[1].shape == first.shape:
        return first + output[1]  # the residual of vLLM and SGLang
    return first
