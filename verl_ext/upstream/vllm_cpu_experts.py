"""The experts of vLLM's CPU backend, computed from their plain weights.

Its packed kernels rearrange the weights for themselves; verl loads new ones after every training step. vLLM has
changed how experts are computed twice since 0.27, so the change has two variants, chosen by what is installed:

0.27            `CPUFusedMOE` of `fused_moe/cpu_fused_moe.py`, which has a loop over plain weights of its own
0.28 and later  `CPUUnquantizedExperts` of `fused_moe/experts/cpu_moe.py`, all of whose kernels are packed
"""

import importlib
import inspect
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from verl_ext.upstream.patching import Undo, expect, expect_lookup, patch, together
from verl_ext.upstream.routed_weights import maybe_with_weights

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
KERNELS = f"{FUSED_MOE}.cpu_fused_moe"  # until 0.27
EXPERTS = f"{FUSED_MOE}.experts.cpu_moe"  # since 0.28 of unquantized experts too
CAPTURE = "_verl_ext_capture"  # attribute of a RoutedExperts layer of 0.27: takes the top-k ids of one forward pass
KERNEL = "input, w13, w2, w13_bias, w2_bias, topk_weights, topk_ids, act, isa, skip_weighted"


def keep_moe_weights() -> Undo:
    """Compute unquantized experts from their plain weights; slower than vLLM's packed kernels."""
    return _in_a_kernel() if find_spec(KERNELS) else _in_classes()


def _in_a_kernel() -> Undo:
    """vLLM 0.27, which also hands out the top-k ids on the way.

    Where its grouped kernel can be used, vLLM pads and repacks the experts' weights into new parameters, which
    no longer know how to load a checkpoint: the next load fails. On CPUs with AMX it refuses anything but
    bfloat16. The loop over experts that it uses elsewhere reads the plain weights.

    The loop is also where a layer's top-k ids are at hand, so a capture function bound to the layer (see
    `vllm_cpu_routing`) is called here, in the thread and at the place of the layer's own forward pass.
    """
    change, module = "keep_moe_weights", KERNELS
    original = expect(change, module, "CPUFusedMOE", "layer")
    for name in ("check_grouped_gemm", "_pad_moe_intermediate_for_grouped_gemm", "init_moe_torch"):
        expect(change, module, f"CPUFusedMOE.{name}", "self, layer")
    expect(
        change,
        module,
        "CPUFusedMOE.forward_torch",
        "self, layer, input, topk_weights, topk_ids, activation, global_num_experts, skip_weighted",
    )
    expect(change, "vllm._custom_ops", "is_onednn_acl_supported", "")
    user = expect(
        change,
        f"{FUSED_MOE}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        "self, layer",
    )
    expect_lookup(change, user, FUSED_MOE, "cpu_fused_moe", "CPUFusedMOE", "SGLFusedMOE")
    custom_ops = importlib.import_module("vllm._custom_ops")

    class PlainWeightsMoE(original):  # type: ignore[misc, valid-type]
        hands_out_topk_ids = True

        def _pad_moe_intermediate_for_grouped_gemm(self, layer: torch.nn.Module) -> None:
            pass

        def check_grouped_gemm(self, layer: torch.nn.Module) -> tuple[bool, str]:
            return False, "none"

        def init_moe_torch(self, layer: torch.nn.Module) -> None:
            # On ARM this would repack each expert for oneDNN and drop the plain weights.
            undo = patch("keep_moe_weights", custom_ops, "is_onednn_acl_supported", lambda: False)
            try:
                super().init_moe_torch(layer)
            finally:
                undo()

        def forward_torch(
            self,
            layer: torch.nn.Module,
            input: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            capture = getattr(layer, CAPTURE, None)
            if capture is not None:
                capture(maybe_with_weights(topk_ids, topk_weights))
            return super().forward_torch(layer, input, topk_weights, topk_ids, *args, **kwargs)

    def refuse_sgl(layer: torch.nn.Module) -> None:
        raise ValueError("VLLM_CPU_SGL_KERNEL=1 packs the experts' weights in place: unset it to sync weights")

    owner = importlib.import_module(module)
    return together(
        lambda: patch("keep_moe_weights", owner, "CPUFusedMOE", PlainWeightsMoE),
        lambda: patch("keep_moe_weights", owner, "SGLFusedMOE", refuse_sgl),
    )


def _in_classes() -> Undo:
    """vLLM 0.28 and later: weights stay as they were loaded, and the kernel is `plain_experts`.

    After the first load vLLM pads and packs the weights; after a later one it keeps the kernel, and what was loaded
    would be read as if it were packed.
    """
    change = "keep_moe_weights"
    expect(change, EXPERTS, "CPUUnquantizedExperts._pad_moe_intermediate", "self, layer")
    expect(change, EXPERTS, "cpu_prepack_moe_weight", "weight, isa")
    expect(change, EXPERTS, "is_zentorch_moe_supported", "layer")
    kernel = expect(change, EXPERTS, "cpu_fused_moe")
    fills = "out" in inspect.signature(kernel).parameters  # since 0.30; before, it returns its output
    expect(change, EXPERTS, "cpu_fused_moe", f"out, {KERNEL}" if fills else KERNEL)
    cpu_moe = importlib.import_module(EXPERTS)
    experts = cpu_moe.CPUUnquantizedExperts
    looked_up = ("is_zentorch_moe_supported", "_pad_moe_intermediate", "cpu_prepack_moe_weight")
    expect_lookup(change, experts.process_weights_after_loading, *looked_up)
    expect_lookup(change, experts.apply, "cpu_fused_moe")

    def fill(out: torch.Tensor, *args: Any) -> None:
        out.copy_(plain_experts(*args))

    return together(
        lambda: patch("keep_moe_weights", experts, "_pad_moe_intermediate", lambda self, layer: None),
        lambda: patch("keep_moe_weights", cpu_moe, "cpu_prepack_moe_weight", lambda weight, isa: weight),
        lambda: patch("keep_moe_weights", cpu_moe, "is_zentorch_moe_supported", lambda layer: False),
        lambda: patch("keep_moe_weights", cpu_moe, "cpu_fused_moe", fill if fills else plain_experts),
    )


@torch.library.custom_op("verl_ext::plain_experts", mutates_args=())  # which torch.compile does not look into
def plain_experts(
    input: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    act: str,
    isa: str,
    skip_weighted: bool = False,
) -> torch.Tensor:
    """What vLLM's kernel of the same parameters computes, expert by expert; sums over experts in float32.

    Args:
        input: [N, hidden].
        w13: [E, 2 * width, hidden]; gate before up, but alternating for `swigluoai`.
        w2: [E, hidden, width].
        topk_weights, topk_ids: [N, K].
        isa: of the kernel that this one stands in for.
        skip_weighted: the weight was applied to the input.
    """
    output = torch.zeros(input.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        hidden = _linear(input[token], w13, w13_bias, expert)
        outcome = _linear(_gated(hidden, act), w2, w2_bias, expert).float()
        output.index_add_(0, token, outcome if skip_weighted else outcome * topk_weights[token, place, None])
    return output.to(input.dtype)


@plain_experts.register_fake
def _(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(input)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return F.linear(x, weight[expert], None if bias is None else bias[expert].to(x.dtype))


def _gated(x: torch.Tensor, act: str) -> torch.Tensor:
    """The activations that vLLM's CPU experts take (`MoEActivation`)."""
    if act == "swigluoai":
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = x.chunk(2, dim=-1)
    if act == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate={"gelu": "none", "gelu_tanh": "tanh"}[act]) * up
