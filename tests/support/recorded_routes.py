"""A batch, its rollout's routing, and a disagreement planted in it: for engines where verl records the routing."""

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    EngineRouterReplayConfig,
    FSDPEngineConfig,
    McoreEngineConfig,
    TrainingWorkerConfig,
    VeOmniEngineConfig,
)

from tests.support.micro_batches import nested
from tests.support.route_sum import route_sum
from verl_ext.core.routing import RouterSums

LAYERS, EXPERTS, TOP_K = 4, 8, 2
MOE = [1, 2, 3]  # the first layer is dense
LENGTHS = [(4, 3), (2, 5), (1, 1), (3, 4)]  # prompt and response length of each trajectory
SEED = 1


def sequences():
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(0, 32, (prompt + response,), generator=generator) for prompt, response in LENGTHS]


def batch(which=(0, 1, 2, 3), routed=None, **settings):
    """Returns what verl's trainer sends to compute_log_prob; at most 12 tokens per micro-batch, so there are
    several."""
    rows = sequences()
    masks = [torch.ones(LENGTHS[i][1], dtype=torch.long) for i in which]
    fields = {
        "input_ids": nested([rows[i] for i in which]),
        "response_mask": nested(masks),
        "loss_mask": nested([mask.clone() for mask in masks]),
    }
    if routed is not None:
        fields["routed_experts"] = nested(routed)
        sums = [route_sum(each, rows[i]) if len(each) else 0 for each, i in zip(routed, which, strict=True)]
        fields["routed_experts_sum"] = nested([torch.tensor([one]) for one in sums])
    data = TensorDict(fields, batch_size=len(masks))
    settings = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 12,
        "temperature": 1.0,
        "compute_loss": False,
        "calculate_entropy": True,
    } | settings
    tu.assign_non_tensor(data, **settings)
    return data


def as_rollout(routed, layers=tuple(MOE), decoder_layers=LAYERS):
    """[n, L, K] as vLLM ships it: a row for each decoder layer, and zeros for the last token, which it never ran."""
    shipped = []
    for rows in routed:
        whole = torch.zeros(len(rows), decoder_layers, rows.shape[2], dtype=torch.uint8)
        whole[:, list(layers)] = rows.to(torch.uint8)
        whole[-1] = 0
        shipped.append(whole)
    return shipped


def plant(rollout, trajectory, token, layer):
    """One other expert for one response token in one layer; ids of its own are left for the others."""
    rollout = [rows.clone() for rows in rollout]
    chosen = rollout[trajectory][LENGTHS[trajectory][0] + token - 1, layer]
    chosen[0] = next(e for e in range(1, EXPERTS) if e not in chosen.tolist())
    return rollout


def check_planted(output, trajectory, token, moe_layer):
    """The agreement is 1 but for one expert of one token in one layer."""
    expected = [torch.ones(response) for _, response in LENGTHS]
    expected[trajectory][token] = 1 - 1 / TOP_K / len(MOE)
    torch.testing.assert_close(torch.cat(output["router_agreement"].unbind()), torch.cat(expected))
    sums = RouterSums.unpack(torch.stack(list(output["router_sums"].unbind())))
    lost = torch.zeros(len(LENGTHS), len(MOE))
    lost[trajectory, moe_layer] = 1
    counts = torch.tensor([[float(response)] for _, response in LENGTHS])
    assert sums.agree.tolist() == (counts - lost / TOP_K).tolist()
    assert sums.exact.tolist() == (counts - lost).tolist()
    assert sums.first.tolist() == lost.tolist()
    assert sums.tokens.tolist() == counts.tolist() and not sums.unknown.any()


def check_replayed(output, trajectory, moe_layer):
    """All experts in use are the rollout's, and the router would have chosen one other in one layer."""
    sums = RouterSums.unpack(torch.stack(list(output["router_sums"].unbind())))
    counts = torch.tensor([[float(response)] * len(MOE) for _, response in LENGTHS])
    own = counts.clone()
    own[trajectory, moe_layer] -= 1 / TOP_K
    assert sums.agree.tolist() == sums.exact.tolist() == counts.tolist()
    assert sums.own.tolist() == own.tolist()


def worker_config(mode, strategy="megatron", use_remove_padding=True, **settings):
    kind = {"megatron": McoreEngineConfig, "veomni": VeOmniEngineConfig, "fsdp2": FSDPEngineConfig}[strategy]
    replay = EngineRouterReplayConfig(mode=mode)
    return TrainingWorkerConfig(
        model_config={"use_remove_padding": use_remove_padding},
        engine_config=kind(strategy=strategy, router_replay=replay, **settings),
    )


def some_routes():
    generator = torch.Generator().manual_seed(2)
    return [
        torch.rand(sum(pair), len(MOE), EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].to(torch.int16)
        for pair in LENGTHS
    ]
