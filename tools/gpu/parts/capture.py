"""Measures what capture and replay add to the passes of an MoE of some billions of parameters, and checks the
gradients.

It times a forward pass for log-probs without capture, with it, and with the rollout's experts forced (R3); and an
update, forward and backward, with and without R3. The rollout's routing is the model's own with one expert in a hundred
replaced.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measuring import added_bytes, alternating
from tensordict import TensorDict
from torch import nn
from verl.workers.config import EngineConfig, TrainingWorkerConfig

from gpu.models import config_of, router_of, weights_by_hand
from gpu.record import Place, Record
from gpu.verl_engine import PROMPT, RESPONSE, TINY_TOKENS, TOKENS, make_batch, one_rank, verl_engine
from verl_ext.routing.hooked import HookedRouting

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
REPLACED = 0.01  # of the experts, by `rollout_routes`
AIM = 1.03  # of a forward pass with capture, over one without


def run(record: Record, place: Place) -> None:
    record.note("through verl's FSDP2 engine, one rank; attention by torch, among rows of one length")
    with one_rank():
        for family in FAMILIES:
            for of_family in (times, gradients):
                with record.trying(family):
                    of_family(record, place, family)
                gc.collect()  # the engine and its hooks hold each other, and gigabytes
                if place.device != "cpu":
                    torch.cuda.empty_cache()


def attach(engine: Any) -> HookedRouting:
    """Returns the adapter with its hooks on the engine's routers; `mode` is R2 or R3, for a batch that asks for it."""
    adapter = HookedRouting(TrainingWorkerConfig(engine_config=EngineConfig()))
    adapter.prepare(engine)
    return adapter


@torch.no_grad()
def rollout_routes(adapter: HookedRouting, engine: Any, data: TensorDict) -> torch.Tensor:
    """Returns the experts that the model chooses, with one in a hundred replaced by the next one that its token does
    not use.

    Args:
        data: a batch of `make_batch` with enable_routing_replay=True.
    """
    adapter.mode, before = "R2", adapter.mode
    _, output = engine.forward_step(data, loss_function=None, forward_only=True)
    adapter.mode = before
    routes = output["model_output"]["old_routed_experts"]
    ids = routes.values().long()
    other = (ids.amax(-1) + 1) % adapter.experts
    other += (other.unsqueeze(-1) == ids).any(-1) * adapter.experts  # if there is none, the id stays
    replace = (torch.rand(other.shape, device=ids.device) < adapter.top_k / 100) & (other < adapter.experts)
    ids[..., 0] = torch.where(replace, other, ids[..., 0])
    return torch.nested.nested_tensor_from_jagged(ids.to(torch.uint8), routes.offsets())


def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
    return -model_output["log_probs"].values().float().mean(), {}


def update(engine: Any, data: Any) -> None:
    """Runs forward and backward, without the optimizer's step, which replay does not change."""
    engine.module.zero_grad()
    engine.forward_step(data, loss_function=loss, forward_only=False)[0].backward()


@torch.no_grad()
def log_probs(engine: Any, data: Any) -> Any:
    return engine.forward_step(data, loss_function=None, forward_only=True)[1]["model_output"]


def times(record: Record, place: Place, family: str) -> None:
    config = config_of(family, tiny=place.tiny)
    engine = verl_engine(config, torch.float32 if place.tiny else torch.bfloat16, place.device)
    millions = sum(parameter.numel() for parameter in engine.module.parameters()) / 1e6
    tokens = TINY_TOKENS if place.tiny else TOKENS
    record.note(
        f"{millions:,.1f} million parameters, {config.num_hidden_layers} layers, {tokens} tokens in sequences of "
        f"{PROMPT + RESPONSE}; experts by {engine.module.config._experts_implementation}"
    )
    sizes = tokens, config.vocab_size, place.device
    plain = make_batch(*sizes)
    reference = log_probs(engine, plain)["log_probs"].values()
    forward = {"log-probs, before the hooks": lambda: log_probs(engine, plain)}
    before = alternating(forward, place.repeats, place.device)
    adapter = attach(engine)
    asks = make_batch(*sizes, enable_routing_replay=True)
    asks["routed_experts"] = rollout_routes(adapter, engine, asks)
    captures = make_batch(*sizes)
    captures["routed_experts"] = asks["routed_experts"]
    adapter.mode = "R3"  # for the batch that asks for it

    check_capture(record, place, engine, adapter, (captures, asks), reference)
    forward = {
        "log-probs": lambda: log_probs(engine, plain),
        "log-probs, captured": lambda: log_probs(engine, captures),
        "log-probs, R3": lambda: log_probs(engine, asks),
    }
    updates = {"update": lambda: update(engine, plain), "update, R3": lambda: update(engine, asks)}
    spent = before | alternating(forward, place.repeats, place.device)
    spent |= alternating(updates, max(2, place.repeats // 2), place.device)
    record.times(spent)
    record.ratio(spent, "log-probs, captured", "log-probs", at_most=None if place.tiny else AIM)
    record.ratio(spent, "log-probs, R3", "log-probs")
    record.ratio(spent, "update, R3", "update")
    if place.device != "cpu":
        for name, call in (forward | updates).items():
            record.figure(f"{name}: memory added", [added_bytes(call, place.device) / 1e9], "GB")


def check_capture(
    record: Record, place: Place, engine: Any, adapter: Any, batches: tuple[Any, Any], reference: torch.Tensor
) -> None:
    """Checks a batch with comparison and one with replay, against log-probs from before the hooks."""
    captures, asks = batches
    found = log_probs(engine, captures)
    largest = float((found["log_probs"].values() - reference).abs().max())
    record.check("log-probs with capture = without", largest <= (1e-5 if place.tiny else 0.1), f"{largest:.2g} apart")
    agreement = float(found["router_agreement"].values().mean())
    drawn = found["router_agreement"].values().numel() * len(adapter.points) * adapter.top_k
    off = abs(1 - agreement - REPLACED)
    spread = 5 * (REPLACED / drawn) ** 0.5 + 5e-4  # five deviations, and kernels that round otherwise a second time
    record.check("agreement finds the share that was replaced", off < spread, f"{agreement:.4f}")
    forced = float(log_probs(engine, asks)["router_agreement"].values().mean())
    record.check("with R3 all experts are the rollout's", forced == 1.0, f"{forced:.6f}")


def gradients(record: Record, place: Place, family: str) -> None:
    """Checks an update with replay against one whose experts get the replayed ids by hand, with weights by the
    paper."""
    cases = [("float32", torch.float32, "eager", 1e-4)]
    if place.device != "cpu":
        cases.append(("bfloat16, grouped", torch.bfloat16, "grouped_mm", 0.05))
    for name, dtype, experts, tolerance in cases:
        config = config_of(family, tiny=True, experts=experts)
        engine = verl_engine(config, dtype, place.device)
        adapter = attach(engine)
        data = make_batch(TINY_TOKENS, config.vocab_size, place.device, enable_routing_replay=True)
        data["routed_experts"] = rollout_routes(adapter, engine, data)
        adapter.mode = "R3"
        update(engine, data)
        found = read_gradients(engine)
        adapter.mode = "disabled"
        with forced_by_hand(engine, config, data["routed_experts"].values()):
            update(engine, data)
        expected = read_gradients(engine)
        worst, where = max(
            (float((found[n] - g).abs().max() / g.abs().max().clamp(min=1e-12)), n) for n, g in expected.items()
        )
        record.check(f"gradients of R3 = forced by hand, {name}", worst <= tolerance, f"{worst:.2g} apart in {where}")
        routers = [n for n in found if n.endswith(("gate.weight", "router.weight"))]
        moved = all(float(found[n].abs().max()) > 0 for n in routers)
        record.check(f"the routers have gradients, {name}", moved and len(routers) == len(adapter.points))


def read_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients in float64, by parameter; without those that no token reached."""
    grads = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    whole = {
        name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items() if grad is not None
    }
    return {name: grad.double().clone() for name, grad in whole.items()}


@contextmanager
def forced_by_hand(engine: Any, config: Any, routes_TLK: torch.Tensor) -> Iterator[None]:
    """Gives every experts module these ids, and weights by the paper's formula, instead of its router's.

    Rows that are 0 in the routing keep the router's experts.
    """
    blocks = [block for block in engine.module.modules() if isinstance(getattr(block, "experts", None), nn.Module)]
    known_T1 = routes_TLK.flatten(1).any(1).bool().unsqueeze(1)
    hooks = []
    for layer, block in enumerate(blocks):

        def hand(module: Any, args: Any, kwargs: Any, layer: int = layer, block: Any = block) -> Any:
            hidden, ids, weights = (*args, *kwargs.values())
            forced = torch.where(known_T1, routes_TLK[:, layer].to(ids.dtype), ids)
            return (hidden, forced, weights_by_hand(config, router_of(block), hidden, forced).to(weights.dtype)), {}

        hooks.append(block.experts.register_forward_pre_hook(hand, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
