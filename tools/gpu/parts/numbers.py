"""Measures how far two kernels of one model are apart: a small version of the mismatch between training and rollout.

Both have the same weights, which every precision can represent, and the same tokens. k3 and the gaps are of the next
tokens' log-probs, as `measure` has them; agreement is of the experts. Each repeat has other tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.models import build, config_of
from gpu.record import SHARE, Place, Record
from verl_ext.core.measure import measure
from verl_ext.core.routing import expert_overlap
from verl_ext.core.tokens import Tokens
from verl_ext.routing.choices import expert_counts, find_choices

LAYERS = 4
PRECISIONS = ("bfloat16", "float16", "float32")
USUAL, AGAIN = ("sdpa", "grouped_mm"), "the same once more"
KERNELS = {
    AGAIN: USUAL,
    "eager attention": ("eager", "grouped_mm"),
    "looped experts": ("sdpa", "eager"),
    "eager attention, looped experts": ("eager", "eager"),
}


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for one batch.

    Attributes:
        log_probs: [B, T - 1] float32, of each next token.
        experts: [N, L, K], of B * T tokens.
    """

    log_probs: Tensor
    experts: Tensor


def run(record: Record, place: Place) -> None:
    rows, length, repeats = (2, 32, 2) if place.tiny else (4, 1024, 5)
    config = config_of("qwen3_moe", tiny=place.tiny, attention="sdpa")
    config.num_hidden_layers = min(config.num_hidden_layers, LAYERS)
    _, top_k = expert_counts(config)
    weights = build(config, torch.bfloat16, place.device).float()
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(config.vocab_size, (repeats, rows, length), generator=generator).to(place.device)
    record.note(
        f"qwen3_moe, {config.num_hidden_layers} layers, {config.num_experts} experts, top-{top_k}; {repeats} batches "
        f"of {rows} x {length} random tokens; the usual kernels are sdpa and grouped experts"
    )
    usual, k3 = {}, {}
    for precision in PRECISIONS:
        model = copy.deepcopy(weights).to(getattr(torch, precision))
        usual[precision] = outputs(model, USUAL, batches)
        for name, kernels in KERNELS.items():
            record.case = f"{precision}: usual kernels against {name}"
            k3[precision, name] = compare(record, usual[precision], outputs(model, kernels, batches), top_k)
        del model
    for precision in PRECISIONS[:2]:
        record.case = f"usual kernels: {precision} against float32"
        compare(record, usual[precision], usual["float32"], top_k)

    record.case = "precisions"
    whole = {precision: k3[precision, "eager attention, looped experts"] for precision in PRECISIONS}
    described = ", ".join(f"{name} {value:.2g}" for name, value in whole.items())
    falls = whole["bfloat16"] > whole["float16"] > whole["float32"]
    record.check("k3 falls from bfloat16 to float16 to float32", falls, described)
    record.check("float32 kernels agree to a k3 of 1e-6", whole["float32"] < 1e-6, described)


def outputs(model: Any, kernels: tuple[str, str], batches_RBT: Tensor) -> list[Outputs]:
    """Returns the outputs of every batch."""
    attention, experts = kernels
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    return [outputs_of(model, ids_BT) for ids_BT in batches_RBT]


@torch.no_grad()
def outputs_of(model: Any, ids_BT: Tensor) -> Outputs:
    given: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        given.append((*args, *kwargs.values())[1])

    blocks = [point.name.rsplit(".", 1)[0] for point in find_choices(model)]
    hooks = [
        model.get_submodule(f"{block}.experts").register_forward_pre_hook(keep, with_kwargs=True) for block in blocks
    ]
    logits = model(ids_BT, use_cache=False).logits[:, :-1].float()
    for hook in hooks:
        hook.remove()
    log_probs = logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
    return Outputs(log_probs, torch.stack(given, dim=1))


def compare(record: Record, ones: Sequence[Outputs], others: Sequence[Outputs], top_k: int) -> float:
    """Records the figures of each pair; returns their mean k3."""
    found: dict[str, list[float]] = {}
    for one, other in zip(ones, others, strict=True):
        mask = torch.ones_like(one.log_probs, dtype=torch.bool)
        metrics = measure(Tokens.from_padded(one.log_probs, other.log_probs, mask), breakdown=False).metrics
        overlap_NL = expert_overlap(one.experts, other.experts)
        pair = {
            "k3": metrics["vllm_kl/k3"],
            "largest |p - p'|": metrics["vllm_kl/prob_diff_max"],
            "largest |log p - log p'|": metrics["vllm_kl/log_ratio_abs_max"],
            "agreement of experts": float(overlap_NL.float().mean()) / top_k,
            "tokens with any layer differing": float((overlap_NL != top_k).any(1).float().mean()),
        }
        for name, value in pair.items():
            found.setdefault(name, []).append(value)
    for name, values in found.items():
        record.figure(name, values, SHARE if name.startswith(("agreement", "tokens")) else "")
    return sum(found["k3"]) / len(found["k3"])
