"""Runs as a spawned rank of test_routing_engine.py: verl's real training worker and FSDP engine on the CPU.

A process of its own imports verl with VERL_PLATFORM=cpu, and may start torch.distributed.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tests.support.fsdp_ranks import batch_of, join_ranks, training_worker
from tests.support.route_sum import route_sum
from tests.support.routing_families import TOP_K, build, experts_inputs, moe_layers
from verl_ext.routing.engines import ENGINES

LENGTHS = [(4, 3), (2, 5), (3, 1), (1, 4)]  # prompt and response length of each trajectory: 23 tokens
LAYERS = 3


@dataclass
class Case:
    """One engine, and what it is given.

    Attributes:
        mode: router_replay.mode.
        top_tokens: the top tokens are read, see top_token_ranks.py, and nothing else is done.
        planted: (trajectory, response token, decoder layer) whose first expert the rollout has differently.
        left_out: trajectories whose routing did not travel.
    """

    family: str = "qwen3_moe"
    packed: bool = True
    ranks: int = 1  # of Ulysses sequence parallelism
    mode: str = "disabled"
    checkpointing: bool = False
    lora: str | list[str] | None = None  # its target modules
    bucket: int = 0  # of pad_to_length
    top_tokens: bool = False
    planted: list[tuple[int, int, int]] = field(default_factory=list)
    left_out: tuple[int, ...] = ()


def sequences():
    """Every family chooses their experts by a margin: test_decided_routers.py."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 32, (prompt + response,), generator=generator) for prompt, response in LENGTHS]


@torch.no_grad()
def sequence_routes(family, ids, last_token=False, model=None):
    """[n, L, K] uint8 as vLLM would ship it: of a sequence by itself, zeros for dense layers and for the last token."""
    model = model or build(family)
    routes = torch.zeros(len(ids), LAYERS, TOP_K, dtype=torch.uint8)
    with experts_inputs(model) as given:
        model(ids.unsqueeze(0))
    for layer, (chosen, _) in zip(moe_layers(family), given, strict=True):
        routes[:, layer] = chosen.to(torch.uint8)
    if not last_token:
        routes[-1] = 0
    return routes


def rollout_routes(case):
    routes = [sequence_routes(case.family, ids) for ids in sequences()]
    for trajectory, token, layer in case.planted:
        chosen = routes[trajectory][LENGTHS[trajectory][0] + token - 1, layer]
        chosen[0] = next(e for e in range(8) if e not in chosen.tolist())
    return routes


def batch(case, **settings):
    rows, rollout = sequences(), rollout_routes(case)
    fields = {
        "routed_experts": [routes[: 0 if row in case.left_out else None] for row, routes in enumerate(rollout)],
        "routed_experts_sum": [
            torch.tensor([route_sum(routes, ids)]) for routes, ids in zip(rollout, rows, strict=True)
        ],
    }
    defaults = {"temperature": 1.0, "global_batch_size": len(rows), "enable_routing_replay": case.mode != "disabled"}
    return batch_of(rows, LENGTHS, fields, **(defaults | settings))


def make_worker(case, folder):
    from verl.workers.config import EngineRouterReplayConfig

    from verl_ext.workers.actor import RoutingTrainingWorker

    register_attention()
    model = {
        "use_remove_padding": case.packed,
        "enable_gradient_checkpointing": case.checkpointing,
        "override_config": {"attn_implementation": "packed"},
    }
    if case.lora:
        model |= {"lora_rank": 4, "lora_alpha": 64, "target_modules": case.lora}
    engine = {
        "router_replay": EngineRouterReplayConfig(mode=case.mode),
        "ulysses_sequence_parallel_size": case.ranks,
    }
    if case.bucket:
        engine |= {"pad_to_length": True, "pad_to_length_bucket": case.bucket}
    return training_worker(folder, RoutingTrainingWorker, 2, model, **engine)  # two micro-batches


def rank_main(rank, ranks, cases, folders, address, results):
    """Run every case one after another, and leave what came of them in results/RANK.pt."""
    join_ranks(rank, ranks, address)
    from tests.support.top_token_ranks import run_top_tokens

    runs = {name: run_top_tokens if case.top_tokens else run for name, case in cases.items()}
    torch.save({name: runs[name](case, folders[case.family]) for name, case in cases.items()}, f"{results}/{rank}.pt")
    dist.destroy_process_group()


def run(case, folder):
    """compute_log_prob, a LoRA's reference pass, and an update with routers that would choose differently by then.

    Returns the expert ids that the experts were given in each, [N, K] for each micro-batch and layer, what the first
    and the last returned, and the states of the first.
    """
    from verl.utils import tensordict_utils as tu

    from verl_ext.workers.replica_fetch import FETCH

    worker = make_worker(case, folder)
    model, found = worker.engine.module, {"shares": FETCH.group and dist.get_process_group_ranks(FETCH.group)}

    recorder = ENGINES["fsdp2"].open_recorder(worker.engine)
    with experts_inputs(model) as given:
        output = worker.infer_batch(batch(case, calculate_entropy=True, compute_loss=False))
    found["states"] = recorder.close()
    found["experts"] = [ids for ids, _ in given]
    later = {}
    if output is not None:
        found |= {name: tu.get(output, name) for name in output.keys() if name != "metrics"}  # noqa: SIM118
        later = {name: found[name] for name in ("old_routed_experts",) if name in found}
    shared = [later]
    dist.broadcast_object_list(shared)  # as TransferQueue brings it to every rank
    later = shared[0]

    turn_routers(model)
    if case.lora:
        data = batch(case, calculate_entropy=False, compute_loss=False, no_lora_adapter=True)
        data.update(later)
        with experts_inputs(model) as given:
            reference = worker.infer_batch(data)
        found["reference_experts"] = [ids for ids, _ in given]
        found["reference_outputs"] = sorted(reference.keys())

    data = batch(case, calculate_entropy=False, global_token_num=[sum(pair) for pair in LENGTHS])
    data.update(later)
    worker.set_loss_fn(loss)
    with experts_inputs(model) as given:
        trained = worker.train_batch(data)
    found["update_experts"] = [ids for ids, _ in given]
    if trained is not None:
        found["metrics"] = tu.get(trained, "metrics")
    return found


@torch.no_grad()
def turn_routers(model):
    """The routers after an update: they choose differently."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "gate.base_layer.weight", "router.weight")):
            parameter.mul_(-1)


def loss(model_output, data, dp_group=None):
    return -model_output["log_probs"].values().mean(), {}


class GatherTokens(torch.autograd.Function):
    """[.., n, d] of every rank as [.., n * ranks, d]."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group, ctx.rank, ctx.n = group, dist.get_rank(group), part.shape[2]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[:, :, ctx.rank * ctx.n : (ctx.rank + 1) * ctx.n], None


def register_attention():
    """`attn_implementation=packed`: attention within packed sequences, split over Ulysses ranks or not.

    verl splits attention heads inside flash attention, which needs a GPU; here every rank gathers keys and values.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group

    def attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, s_aux=None, **kwargs):
        group = get_ulysses_sequence_parallel_group()
        first, n = 0, query.shape[2]
        position_ids = position_ids.float()[:, None, :, None]
        if group is not None:
            first = dist.get_rank(group) * n
            key, value, position_ids = (GatherTokens.apply(part, group) for part in (key, value, position_ids))
        starts = (position_ids.flatten(2)[:, 0] == 0).cumsum(1)  # [B, m], which sequence a token belongs to
        index = torch.arange(starts.shape[1])
        allowed = (starts[:, first : first + n, None] == starts[:, None]) & (index[first : first + n, None] >= index)
        if attention_mask is not None:
            allowed = attention_mask[:, None, :].bool() & (index[:, None] >= index)
        allowed = allowed | (index[first : first + n, None] == index)  # padding sees itself
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed[:, None], -torch.inf)
        if s_aux is not None:  # gpt_oss: a logit a head that takes its share of the attention nowhere
            logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=3)
        return (logits.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None

    AttentionInterface.register("packed", attention)
    AttentionMaskInterface.register("packed", lambda *args, attention_mask=None, **kwargs: attention_mask)
