"""The small random models that the engines' tests share, and what transformers computes with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes.make_assets import build_model, build_tokenizer

NEAR_TIE = 1e-5  # between the router's scores of two experts: rounding in float32 may order nearer ones either way
FAR_APART = 4.0  # times the usual deviation of 0.02, which leaves every probability near that of any other token


def save_model(
    folder: Path,
    recipe: str = "cpu_tool",
    *,
    even: bool = False,
    scale: float = 1.0,
    change: Callable[[Any, Any], None] | None = None,
) -> Path:
    """Writes a model and its tokenizer to a folder, and returns it.

    Args:
        recipe: the recipe whose model it is.
        even: with an even vocabulary, which tensor parallelism halves.
        scale: the factor of all weight matrices; the model is then in float32.
        change: changes (model, tokenizer) before they are written.
    """
    tokenizer = build_tokenizer()
    if even:
        tokenizer.add_tokens(["<spare>"])
    model = build_model(recipe, tokenizer)
    with torch.no_grad():
        if scale != 1:
            for weight in model.float().parameters():
                if weight.dim() > 1:
                    weight.mul_(scale)
        if change is not None:
            change(model, tokenizer)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def log_probs(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def states(model, ids) -> dict[str, torch.Tensor]:
    """Point of `routing.recorder` -> [n, width], from the outputs of transformers' modules."""
    decoder = model.model
    modules = {"embedding": decoder.embed_tokens, "norm": decoder.norm}
    for number, layer in enumerate(decoder.layers):
        parts = {"attention": layer.self_attn, "experts": layer.mlp, "layer": layer}
        if hasattr(layer.mlp, "gate"):
            parts["router"] = layer.mlp.gate
        modules |= {f"{number}.{name}": part for name, part in parts.items()}
    found, handles = {}, []
    for point, module in modules.items():

        def keep(module, inputs, output, point=point):
            value = output[0] if isinstance(output, tuple) else output
            found[point] = value.detach().flatten(0, -2).clone()

        handles.append(module.register_forward_hook(keep))
    log_probs(model, ids)
    for handle in handles:
        handle.remove()
    return found


def by_name(model) -> dict[str, torch.Tensor]:
    """Weights by the names of a checkpoint, where each expert has its own."""
    found = {}
    for name, tensor in model.state_dict().items():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".experts"):
            found[name] = tensor.clone()
            continue
        for expert, weight in enumerate(tensor):
            parts = weight.chunk(2) if kind == "gate_up_proj" else (weight,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            found |= {f"{place}.{expert}.{each}.weight": part.clone() for each, part in zip(kinds, parts, strict=True)}
    return found
