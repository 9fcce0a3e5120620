"""megatron-core's real TopKRouter, recorded and replayed by verl's patch and by its own RouterReplay."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.megatron_cpu import (
    KINDS,
    put_on_cpu,
    top_k_router,
    verls_patch,
)


@pytest.fixture(params=["verl", "megatron"])
def replay(request, monkeypatch):
    """The active RouterReplay (verl's, by its patch, or megatron-core's own) and its enum of actions."""
    put_on_cpu(monkeypatch)
    if request.param == "verl":
        verls_patch(monkeypatch)
        from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
    else:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    return SimpleNamespace(kind=RouterReplay, action=RouterReplayAction)


def top_k_by_hand(logits, settings, bias, top_k=4):
    """Sets of experts from the papers, token by token in float64: groups are chosen by the sum of their two best."""
    chosen = []
    for row in logits.double():
        scores = row if settings["moe_router_score_function"] == "softmax" else row.sigmoid() + bias.double()
        allowed = set(range(len(row)))
        if groups := settings.get("moe_router_num_groups"):
            size = len(row) // groups
            best = [sum(sorted(scores[g * size : (g + 1) * size].tolist())[-2:]) for g in range(groups)]
            kept = sorted(range(groups), key=lambda g: -best[g])[: settings["moe_router_group_topk"]]
            allowed = {e for g in kept for e in range(g * size, (g + 1) * size)}
        chosen.append(set(sorted(allowed, key=lambda e: -float(scores[e]))[:top_k]))
    return chosen


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_experts_are_the_top_k(replay, kind):
    torch.manual_seed(3)
    router = top_k_router(KINDS[kind])
    assert isinstance(router.router_replay, replay.kind)
    router.router_replay.set_router_replay_action(replay.action.RECORD)
    hidden = torch.randn(40, 1, 8)
    with torch.no_grad():
        _, routing_map = router(hidden)
    recorded = [set(ids.tolist()) for ids in router.router_replay.get_recorded_indices()]
    logits = (hidden @ router.weight.detach().T).squeeze(1)
    expected = top_k_by_hand(logits, KINDS[kind], router.expert_bias)
    disturbed = logits * (1 + 1e-4 * torch.randn(logits.shape))
    assert top_k_by_hand(disturbed, KINDS[kind], router.expert_bias) == expected, "no choice hangs on rounding"
    assert recorded == expected
    assert recorded == [set(row.nonzero().flatten().tolist()) for row in routing_map]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_expert_outside_the_own_top_k_has_weight_and_gradient(replay, kind):
    torch.manual_seed(4)
    router = top_k_router(KINDS[kind])
    logits = torch.randn(6, 1, 16)
    own = top_k_by_hand(logits.squeeze(1), KINDS[kind], router.expert_bias)
    target = torch.stack([torch.tensor(sorted(chosen)) for chosen in own])
    outside = [next(e for e in range(16) if e not in chosen) for chosen in own]
    target[:, 0] = torch.tensor(outside)
    router.router_replay.set_target_indices(target)
    router.router_replay.set_router_replay_action(replay.action.REPLAY_FORWARD)
    logits.requires_grad_()
    weights, routing_map = router.routing(logits)
    assert [set(row.nonzero().flatten().tolist()) for row in routing_map] == [set(row.tolist()) for row in target]
    picked = weights[torch.arange(6), outside]
    assert (picked > 0).all()
    picked.sum().backward()
    assert (logits.grad.squeeze(1)[torch.arange(6), outside].abs() > 0).all()
