"""The lab's model against loops over tokens and experts, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.closeness import close
from verl_ext.lab.model import Cache, ModelSettings, choose_experts, expert_weights, forward, init_weights

QWEN = ModelSettings(hidden=16, expert_hidden=8)
DEEPSEEK = ModelSettings(layers=1, hidden=16, expert_hidden=8, router="sigmoid", groups=4, top_groups=2, top_k=3)
MODELS = pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=["softmax", "sigmoid"])
VOCABULARY, POSITIONS = 7, 12


def weights_of(model, seed=0):
    return init_weights(model, VOCABULARY, POSITIONS, torch.Generator().manual_seed(seed))


def tokens_of(rows, length, seed=0):
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def norm(x, weight):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * weight


def oracle_experts(logits, model):
    """Chooses experts by sorting, one token at a time."""
    scores = logits.tolist()
    allowed = range(len(scores))
    if model.router == "sigmoid":
        size = model.experts // model.groups
        groups = [range(g * size, (g + 1) * size) for g in range(model.groups)]
        shown = [1 / (1 + 2.718281828459045**-x) for x in scores]
        best = sorted(groups, key=lambda g: -sum(sorted((shown[e] for e in g), reverse=True)[:2]))
        allowed = [e for group in best[: model.top_groups] for e in group]
    return sorted(allowed, key=lambda e: -scores[e])[: model.top_k]


def oracle(weights, model, row):
    """Logits of every token of a row, and the experts of each token by layer."""
    w = {name: value.double() for name, value in weights.items()}
    d, size = model.hidden, model.hidden // model.heads
    xs = [w["embedding"][token] + w["positions"][i] for i, token in enumerate(row)]
    chosen = []
    for layer in range(model.layers):
        qkv = [w[f"{layer}.qkv"] @ norm(x, w[f"{layer}.norm_attention"]) for x in xs]
        for i in range(len(xs)):
            heads = []
            for h in range(model.heads):
                at = slice(h * size, (h + 1) * size)
                q = qkv[i][:d][at]
                past = range(i + 1)
                score = torch.stack([q @ qkv[j][d : 2 * d][at] for j in past]) / size**0.5
                heads.append(sum(p * qkv[j][2 * d :][at] for p, j in zip(score.softmax(0), past, strict=True)))
            xs[i] = xs[i] + w[f"{layer}.out"] @ torch.cat(heads)
        chosen.append([])
        for i, x in enumerate(xs):
            x = norm(x, w[f"{layer}.norm_experts"])
            logits = w[f"{layer}.router"] @ x
            experts = oracle_experts(logits, model)
            share = logits[experts].exp() if model.router == "softmax" else logits[experts].sigmoid()
            for e, part in zip(experts, share / share.sum(), strict=True):
                inner = w[f"{layer}.up"][e] @ x
                xs[i] = xs[i] + part * (w[f"{layer}.down"][e] @ (inner * inner.sigmoid()))
            chosen[layer].append(set(experts))
    return torch.stack([w["head"] @ norm(x, w["norm"]) for x in xs]), chosen


@MODELS
def test_logits_and_experts_are_those_of_the_formulas(model):
    weights, tokens = weights_of(model), tokens_of(3, 6)
    logits, routing = forward(weights, model, tokens, last=6)
    for row in range(3):
        expected, chosen = oracle(weights, model, tokens[row].tolist())
        close(logits[row], expected, 1e-5)
        for layer, sets in enumerate(chosen):
            assert [set(experts.tolist()) for experts in routing.experts[layer][row]] == sets


@MODELS
def test_token_by_token_with_a_cache_is_the_whole_at_once(model):
    weights, tokens = weights_of(model), tokens_of(4, 8)
    whole, routing = forward(weights, model, tokens, last=3)
    cache = Cache(model, 4, 8, torch.float32)
    parts = [forward(weights, model, tokens[:, :6], cache=cache)]
    parts += [forward(weights, model, tokens[:, i : i + 1], cache=cache) for i in (6, 7)]
    close(torch.cat([logits for logits, _ in parts], 1), whole, 1e-5)
    assert torch.equal(torch.cat([part.stacked() for _, part in parts], 1), routing.stacked())


@MODELS
def test_replayed_experts_are_used_and_their_weights_stay_the_routers(model):
    weights, tokens = weights_of(model), tokens_of(2, 5)
    own, routing = forward(weights, model, tokens)
    same, _ = forward(weights, model, tokens, replayed=routing.stacked())
    assert torch.equal(same, own)
    others = (routing.stacked() + 1) % model.experts
    forced, used = forward(weights, model, tokens, replayed=others)
    assert torch.equal(used.stacked(), others)
    assert torch.equal(used.own[0], routing.own[0])  # of the first layer, which no replay has touched yet
    assert not torch.equal(forced, own)
    for value in weights.values():
        value.requires_grad_()
    forward(weights, model, tokens, replayed=others)[0].sum().backward()
    assert weights["0.router"].grad.abs().sum() > 0


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_experts_come_from_the_best_groups_and_their_weights_add_up_to_1(seed, groups, top_groups):
    model = ModelSettings(router="sigmoid", groups=groups, top_groups=min(groups, top_groups), top_k=2)
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    experts = choose_experts(logits, model)
    assert [set(row.tolist()) for row in experts] == [set(oracle_experts(row, model)) for row in logits.double()]
    close(expert_weights(logits, experts, model).sum(-1), torch.ones(5), 1e-6)
