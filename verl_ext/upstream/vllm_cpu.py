"""Changes to vLLM's CPU backend that a rollout engine needs.

verl loads new weights into a running engine after every training step, and asks it which experts each
token was routed to. The CPU backend can do neither as it is. Each function here is one change of `changes.py`: it
checks that what it changes is what it expects, raises a `PatchError` if not, and returns a function that undoes it.
"""

import importlib
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from verl_ext.upstream.patching import Undo, expect, expect_lookup, patch, together

LAYERS = "vllm.model_executor.layers"
CAPTURE = "_verl_ext_capture"  # attribute of a RoutedExperts layer: takes the top-k ids of one forward pass

RUNNER = "vllm.v1.worker.cpu_model_runner"

_undo: Undo | None = None


def keep_linear_weights() -> Undo:
    """Compute linear layers and the LM head from their plain weights, at any later time.

    After loading, vLLM repacks each weight for oneDNN. A linear layer then drops the plain weight, and the
    next load fails; the LM head keeps both, and the next load changes only the copy that is not used.
    Slower than the packed kernels.

    The weights of causal convolutions are left to vLLM, which repacks them in place on CPUs with AMX. Loading
    such a model a second time raises a RuntimeError here, because it would compute with the wrong layout.
    """
    change = "keep_linear_weights"
    dispatch = expect(change, f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm", "layer, remove_weight")
    expect(change, f"{LAYERS}.utils", "cpu_unquantized_gemm", "layer, x, weight, bias")
    for module, method in [
        ("linear", "UnquantizedLinearMethod"),
        ("vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ]:
        name = f"{method}.process_weights_after_loading"
        user = expect(change, f"{LAYERS}.{module}", name, "self, layer")
        expect_lookup(change, user, f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm")

    def dispatch_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        if hasattr(layer, "_cpu_unpacked_conv_weight"):
            raise RuntimeError(f"{type(layer).__name__}: vLLM repacked this weight for AMX; it can't be loaded again")
        if layer.weight.ndim == 2:
            layer.cpu_linear = F.linear  # vLLM passes it the layer's present weight at each call
        else:
            dispatch(layer, remove_weight)

    utils = importlib.import_module(f"{LAYERS}.utils")
    return patch("keep_linear_weights", utils, "dispatch_cpu_unquantized_gemm", dispatch_plain)


def keep_moe_weights() -> Undo:
    """Compute unquantized experts from their plain weights, and hand out the top-k ids on the way.

    Where its grouped kernel can be used, vLLM pads and repacks the experts' weights into new parameters, which
    no longer know how to load a checkpoint: the next load fails. On CPUs with AMX it refuses anything but
    bfloat16. The loop over experts that it uses elsewhere reads the plain weights; it is slower.

    The loop is also where a layer's top-k ids are at hand, so a capture function bound to the layer (see
    `capture_routed_experts`) is called here, in the thread and at the place of the layer's own forward pass.
    """
    change, module = "keep_moe_weights", f"{LAYERS}.fused_moe.cpu_fused_moe"
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
        f"{LAYERS}.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        "self, layer",
    )
    expect_lookup(change, user, f"{LAYERS}.fused_moe", "cpu_fused_moe", "CPUFusedMOE", "SGLFusedMOE")
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
                capture(topk_ids)
            return super().forward_torch(layer, input, topk_weights, topk_ids, *args, **kwargs)

    def refuse_sgl(layer: torch.nn.Module) -> None:
        raise ValueError("VLLM_CPU_SGL_KERNEL=1 packs the experts' weights in place: unset it to sync weights")

    owner = importlib.import_module(module)
    return together(
        lambda: patch("keep_moe_weights", owner, "CPUFusedMOE", PlainWeightsMoE),
        lambda: patch("keep_moe_weights", owner, "SGLFusedMOE", refuse_sgl),
    )


def capture_routed_experts() -> Undo:
    """Make `enable_return_routed_experts` work on CPU; needs `keep_moe_weights`.

    vLLM binds its capturer to the kernels that can report their routing, and refuses the CPU one. Here each
    layer gets a capture function with its own layer index. It is bound to the layer, not to the kernel,
    because vLLM builds the kernel anew after every weight load.
    """
    change, module = "capture_routed_experts", RUNNER
    runner = expect(change, module, "CPUModelRunner", "vllm_config, device")
    expect(change, module, "CPUModelRunner._bind_routed_experts_capturer", "self, capturer")
    init = expect(change, module, "CPUModelRunner.init_routed_experts_capturer", "self")
    expect_lookup(change, init, "_bind_routed_experts_capturer")
    expect(
        change,
        f"{LAYERS}.fused_moe.routed_experts_capturer",
        "RoutedExpertsCapturer.capture",
        "self, layer_id, topk_ids",
    )
    moe_runner = expect(change, f"{LAYERS}.fused_moe.runner.moe_runner", "MoERunner")
    expect(change, f"{LAYERS}.fused_moe.runner.moe_runner", "MoERunner.layer_id")

    def bind(self: Any, capturer: Any) -> None:
        if not self.model_config.enforce_eager:
            raise ValueError("enable_return_routed_experts on CPU needs enforce_eager=True")
        for layer in self.model.modules():
            if not isinstance(layer, moe_runner):
                continue
            method = layer.routed_experts.quant_method
            if not getattr(getattr(method, "cpu_fused_moe", None), "hands_out_topk_ids", False):
                raise ValueError(
                    "enable_return_routed_experts on CPU needs unquantized experts and the patch "
                    f"keep_moe_weights; {layer.layer_name} is computed by {type(method).__name__}"
                )
            take = partial(capturer.capture, layer.layer_id)
            patch("capture_routed_experts", layer.routed_experts, CAPTURE, take, new=True)

    return patch("capture_routed_experts", runner, "_bind_routed_experts_capturer", bind)


def install() -> Undo:
    """Apply all patches, or none if one does not fit. A second call applies nothing and undoes the same."""
    global _undo
    # Before the first patch: where `vllm_plugin` waits for this import, it is what installs, and all of it at once.
    with suppress(ImportError):
        importlib.import_module(RUNNER)
    if _undo is None:
        undo_all = together(keep_linear_weights, keep_moe_weights, capture_routed_experts)

        def undo() -> None:
            global _undo
            undo_all()
            _undo = None

        _undo = undo
    return _undo


def on_import(_module: object) -> None:
    """`install`, as the hook that `vllm_plugin.register` sets on vLLM's CPU model runner."""
    install()
