"""Computes the logits of a training engine in float32, from weights and states of the engine's own dtype.

In bfloat16, logits from 8 to 16 are 1/16 apart, and each log-probability has that rounding. The product of two bfloat16
numbers is exact in float32, so nothing but the rounding changes. The backward pass stays as it is.

Shape legend: n tokens, d width, V this rank's part of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from verl_ext.base.errors import HookError
from verl_ext.routing.layers import heads_of


def compute_in_float32(engine: Any) -> int:
    """Hooks the heads of a built engine on this rank; returns how many there are: 0 on all but the last pipeline stage.

    Raises:
        HookError: the head is not a plain linear layer: its logits are not its weight times the states.
    """
    heads = heads_of(engine)
    for head in heads:
        if getattr(head, "base_layer", None) is not None:
            raise HookError(f"the model's head ({type(head).__name__}) has an adapter: leave it out of the LoRA")
        # Before FSDP's own hook, which frees the weight.
        head.register_forward_hook(_replace_logits, prepend=True, with_kwargs=True)
    return len(heads)


def _replace_logits(head: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any], output: Any) -> Any:
    """Megatron's head takes the embedding's weight where both share it, and returns its bias beside the logits."""
    beside = isinstance(output, tuple)
    logits = output[0] if beside else output
    if logits.dtype == torch.float32:
        return output
    given = named.get("weight")
    weight = head.weight if given is None else given
    bias = None if getattr(head, "skip_bias_add", False) else getattr(head, "bias", None)
    states = _all_tokens(inputs[0]) if getattr(head, "sequence_parallel", False) else inputs[0]
    exact = _Float32Logits.apply(logits, states, weight, bias)
    return (exact, *output[1:]) if beside else exact


def _all_tokens(states: Tensor) -> Tensor:
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    with torch.no_grad():
        return gather_from_sequence_parallel_region(states)


class _Float32Logits(torch.autograd.Function):
    """Takes the rounded logits' place in the graph, so that gradients pass through the engine's own product."""

    @staticmethod
    def forward(ctx: Any, rounded: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtype = rounded.dtype
        logits = torch.empty_like(rounded, dtype=torch.float32)
        # Into a view of the result: autograd lets nobody change a result in place that is itself a view.
        float32_product(states, weight, bias, rounded.dtype, out=logits.flatten(0, -2))
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].to(ctx.dtype), None, None, None


def float32_product(states: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor) -> None:
    """Writes states times weight, plus bias, to `out`.

    Args:
        states: [..., d].
        weight: [V, d].
        bias: [V].
        dtype: bfloat16 or float16, to which the engine rounds states and weight first, as autocast does.
        out: [n, V] float32.
    """
    rows_nd, weight_Vd = states.detach().flatten(0, -2).to(dtype), weight.detach().to(dtype)
    with torch.autocast(rows_nd.device.type, enabled=False):
        if rows_nd.is_cuda:
            # No copy of the weight, and the speed of bfloat16; only CUDA has this.
            torch.mm(rows_nd, weight_Vd.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(rows_nd.float(), weight_Vd.float().t(), out=out)
        if bias is not None:
            out += bias.detach().to(dtype)
