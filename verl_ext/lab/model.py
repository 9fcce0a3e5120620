"""A tiny mixture of experts as functions of a dictionary of weights, so that many versions of it are at hand.

A pre-norm transformer with learned positions; every layer has experts. Weights are laid out as those of nn.Linear and
of transformers' fused experts, so that what rounds them here would there.

Shape legend: B rows, S tokens, V vocabulary, L layers, E experts, K experts per token, d width, H heads, h width of a
head, f width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_ext.lab.settings import ModelSettings

Weights = Mapping[str, Tensor]

EXPERTS, ROUTER, HEAD = ("up", "down"), "router", "head"  # ends of the names of weights
ATTENTION = ("qkv", "out")


def init_weights(
    model: ModelSettings, vocabulary: int, positions: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Random weights, float32: what adds to the residual stream smaller, the deeper the model."""
    d, f, E = model.hidden, model.expert_hidden, model.experts
    deep = math.sqrt(2 * model.layers)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    weights = {
        "embedding": normal(vocabulary, d, std=0.3),
        "positions": normal(positions, d, std=0.3),
        "norm": torch.ones(d),
        HEAD: normal(vocabulary, d, std=d**-0.5),
    }
    for layer in range(model.layers):
        weights |= {
            f"{layer}.norm_attention": torch.ones(d),
            f"{layer}.norm_experts": torch.ones(d),
            f"{layer}.qkv": normal(3 * d, d, std=d**-0.5),
            f"{layer}.out": normal(d, d, std=d**-0.5 / deep),
            f"{layer}.{ROUTER}": normal(E, d, std=d**-0.5),
            f"{layer}.up": normal(E, f, d, std=d**-0.5),
            f"{layer}.down": normal(E, d, f, std=f**-0.5 / deep),
        }
    return weights


class Cache:
    """Keys and values of the tokens so far, of every layer, with room for `positions`."""

    def __init__(self, model: ModelSettings, rows: int, positions: int, dtype: torch.dtype):
        shape = (model.layers, rows, model.heads, positions, model.hidden // model.heads)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.length = 0


@dataclass
class Routing:
    """What the routers of a pass did, a tensor a layer.

    Attributes:
        experts: [B, S, K] int64, in descending order of their scores where the router chose them itself.
        own: [B, S, K], those that it would have chosen: other ones only where `experts` were given to it.
        logits: [B, S, E] float32, the routers', with gradient.
    """

    experts: list[Tensor]
    own: list[Tensor]
    logits: list[Tensor]

    def stacked(self) -> Tensor:
        """[B, S, L, K]"""
        return torch.stack(self.experts, 2)


def forward(
    weights: Weights,
    model: ModelSettings,
    tokens: Tensor,
    *,
    last: int = 1,
    cache: Cache | None = None,
    replayed: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """Logits [B, last, V] in float32 of the last of [B, S] tokens, and the routing of all, in the dtype of the weights.

    Args:
        cache: the tokens follow those that it holds, and are added to it.
        replayed: [B, S, L, K] experts to use; the weights of the chosen are still the router's, with gradient (R3).
    """
    start = cache.length if cache else 0
    x = F.embedding(tokens, weights["embedding"]) + weights["positions"][start : start + tokens.shape[1]]
    routing = Routing([], [], [])
    for layer in range(model.layers):
        x = x + _attention(weights, model, layer, _norm(x, weights[f"{layer}.norm_attention"]), cache)
        given = None if replayed is None else replayed[:, :, layer]
        x = x + _experts(weights, model, layer, _norm(x, weights[f"{layer}.norm_experts"]), given, routing)
    if cache:
        cache.length += tokens.shape[1]
    return F.linear(_norm(x[:, -last:], weights["norm"]), weights[HEAD]).float(), routing


def choose_experts(logits: Tensor, model: ModelSettings) -> Tensor:
    """[..., K] the experts that a router takes by its logits [..., E].

    `softmax`: the largest (Qwen3-MoE). `sigmoid`: DeepSeek-V3's (arXiv 2412.19437): of groups of experts, those with
    the largest sum of their two best scores are kept, and of their experts the largest taken; without its bias for
    balance.
    """
    if model.router == "softmax" or model.groups == 1:
        return logits.topk(model.top_k, -1).indices
    scores = logits.sigmoid().unflatten(-1, (model.groups, -1))
    best = scores.topk(min(2, scores.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(model.top_groups, -1).indices, True)
    return scores.masked_fill(~kept.unsqueeze(-1), -1.0).flatten(-2).topk(model.top_k, -1).indices


def expert_weights(logits: Tensor, experts: Tensor, model: ModelSettings) -> Tensor:
    """[..., K] what the experts chosen count, 1 in sum."""
    chosen = logits.gather(-1, experts)
    if model.router == "softmax":
        return chosen.softmax(-1)  # of all experts' softmax, renormalised over the chosen
    scores = chosen.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    # Not rms_norm, which is seven kernels on a CPU, and this is one.
    return F.layer_norm(x, weight.shape, weight)


def _attention(weights: Weights, model: ModelSettings, layer: int, x: Tensor, cache: Cache | None) -> Tensor:
    B, S, d = x.shape
    qkv = F.linear(x, weights[f"{layer}.qkv"]).view(B, S, 3, model.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    if cache:
        until = cache.length + S
        cache.keys[layer, :, :, cache.length : until] = k
        cache.values[layer, :, :, cache.length : until] = v
        k, v = cache.keys[layer, :, :, :until], cache.values[layer, :, :, :until]
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=S > 1)  # several tokens come first alone
    return F.linear(seen.transpose(1, 2).reshape(B, S, d), weights[f"{layer}.out"])


def _experts(
    weights: Weights, model: ModelSettings, layer: int, x: Tensor, given: Tensor | None, routing: Routing
) -> Tensor:
    logits = F.linear(x, weights[f"{layer}.{ROUTER}"]).float()
    own = choose_experts(logits.detach(), model)
    experts = own if given is None else given
    shares = expert_weights(logits, experts, model).to(x.dtype)
    routing.experts.append(experts)
    routing.own.append(own)
    routing.logits.append(logits)
    mixed = _all_mixed if x.shape[1] == 1 else _chosen_mixed
    return mixed(x, experts, shares, weights[f"{layer}.up"], weights[f"{layer}.down"])


def _all_mixed(x: Tensor, experts: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts computed, those not chosen counting 0: for few tokens the faster."""
    share = shares.new_zeros(*shares.shape[:-1], len(up)).scatter(-1, experts, shares)
    inner = F.silu(F.linear(x, up.flatten(0, 1))).unflatten(-1, up.shape[:2]) * share.unsqueeze(-1)
    return F.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))


def _chosen_mixed(x: Tensor, experts: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Tokens sorted by their experts, which compute those that they were chosen for: for many tokens the faster."""
    expert, order = experts.flatten().sort(stable=True)
    token = order // experts.shape[-1]
    counts = torch.bincount(expert, minlength=len(up)).tolist()
    parts = x.flatten(0, 1).index_select(0, token).split(counts)
    out = torch.cat([F.linear(F.silu(F.linear(part, u)), d) for part, u, d in zip(parts, up, down, strict=True)])
    out = out * shares.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(x.flatten(0, 1)).index_add(0, token, out).view_as(x)
