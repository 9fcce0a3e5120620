"""Measures what capturing and comparing the routing adds to compute_log_prob: the same forward passes with and without
it.

    python tools/bench_capture.py [--tokens 4096] [--layers 8] [--hidden 512] [--experts 64] [--repeats 9] [--threads 2]

A randomly initialised Qwen3-MoE of transformers runs packed sequences, and the entropies and log-probabilities of its
tokens are computed, as verl's FSDP engine does in compute_log_prob. `with` adds the FSDP adapter's hooks, the top-k's
margins, the comparison with a rollout's routing, and the sums; `replay (R3)` forces the rollout's experts as well. The
rollout's routing is the model's own with one expert in a hundred replaced. All three use one model, and passes
alternate. The ratios are those of the medians of wall-clock time, and of the processors' time, which other work on the
machine disturbs less.

The smaller the model, the larger the share of the hooks: the cost of a layer's capture does not depend on hidden and
expert size, so its share falls with them.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

os.environ.setdefault("VERL_PLATFORM", "nvidia" if torch.cuda.is_available() else "cpu")  # before verl is imported

from tensordict import TensorDict
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.utils import tensordict_utils as tu

from verl_ext.routing.fsdp import FsdpRouting

PROMPT, RESPONSE = 128, 384  # tokens of each sequence


class Engine:
    """verl's forward_step on packed tokens, without what FSDP adds."""

    def __init__(self, module: nn.Module):
        self.module = module.eval()
        self.model_config = SimpleNamespace(hf_config=module.config)

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        ids, positions = (micro_batch[name].values().unsqueeze(0) for name in ("input_ids", "position_ids"))
        logits = self.module(ids, position_ids=positions, use_cache=False).logits[0]
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        taken = log_probs.gather(1, ids[0].roll(-1).unsqueeze(1)).squeeze(1)
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(taken, micro_batch["input_ids"].offsets())}
        loss, metrics = 0.0, {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=None)
        return loss, {"model_output": output | {"entropy": entropy}, "metrics": metrics}


def attach(engine: Any) -> FsdpRouting:
    """Returns the adapter with its hooks on the engine's routers; `mode` is R2 or R3, for a batch that asks for it."""
    replay = SimpleNamespace(router_replay=SimpleNamespace(mode="disabled"))
    adapter = FsdpRouting(SimpleNamespace(engine_config=replay))  # type: ignore[arg-type]
    adapter.prepare(engine)
    return adapter


def make_batch(tokens: int, vocabulary: int, device: str, **settings: Any) -> TensorDict:
    """Returns random sequences of PROMPT + RESPONSE tokens, with all fields that verl's engine reads of a
    micro-batch."""
    count, length = tokens // (PROMPT + RESPONSE), PROMPT + RESPONSE
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(vocabulary, (count, length), generator=generator).to(device)

    def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    ones = torch.ones(count, RESPONSE, dtype=torch.long, device=device)
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested(torch.arange(length, device=device).expand(count, -1)),
            "prompts": nested(rows[:, :PROMPT]),
            "responses": nested(rows[:, PROMPT:]),
            "response_mask": nested(ones),
            "loss_mask": nested(ones),
        },
        batch_size=count,
    )
    defaults = {"calculate_entropy": True, "use_remove_padding": True, "temperature": 1.0, "global_batch_size": count}
    tu.assign_non_tensor(data, **defaults | settings)
    return data


@torch.no_grad()
def rollout_routes(adapter: FsdpRouting, engine: Any, data: TensorDict) -> torch.Tensor:
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


def qwen3_moe(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        moe_intermediate_size=options.hidden // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        attn_implementation="sdpa",
    )
    return Qwen3MoeForCausalLM(config).to(options.device, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch, in sequences of 512")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.tokens % (PROMPT + RESPONSE):
        parser.error(f"--tokens must be a multiple of {PROMPT + RESPONSE}")

    engine = Engine(qwen3_moe(options))
    adapter = attach(engine)
    sizes = options.tokens, options.vocabulary, options.device
    batches = {"without": make_batch(*sizes)}
    routes = rollout_routes(adapter, engine, make_batch(*sizes, enable_routing_replay=True))
    for name, replays in (("with", False), ("replay (R3)", True)):
        batches[name] = make_batch(*sizes, enable_routing_replay=replays)
        batches[name]["routed_experts"] = routes
    adapter.mode = "R3"  # for the batch that asks for it
    wall: dict[str, list[float]] = {name: [] for name in batches}
    processor: dict[str, list[float]] = {name: [] for name in batches}
    with torch.no_grad():
        for repeat in range(options.repeats + 1):
            for name, data in batches.items():
                start, used = time.perf_counter(), time.process_time()
                engine.forward_step(data, loss_function=None, forward_only=True)
                if options.device == "cuda":
                    torch.cuda.synchronize()
                if repeat:  # the first one warms up
                    wall[name].append(time.perf_counter() - start)
                    processor[name].append(time.process_time() - used)

    shape = f"{options.tokens} tokens, {options.layers} layers of {options.experts} experts, top-{options.top_k}, "
    print(f"{shape}hidden {options.hidden}, {options.device}, {options.threads} threads, {options.repeats} repeats")
    for name in batches:
        medians = [statistics.median(times[name]) for times in (wall, processor)]
        ratios = [m / statistics.median(times["without"]) for m, times in zip(medians, (wall, processor), strict=True)]
        print(f"{name:12} {medians[0] * 1e3:9.1f} ms   ratio {ratios[0]:.3f}   of processor time {ratios[1]:.3f}")


if __name__ == "__main__":
    main()
