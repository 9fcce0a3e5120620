"""Changes to vLLM's CPU backend that a rollout engine needs.

verl loads new weights into a running engine after every training step, and asks it which experts each token was routed
to; the sync canary asks it for log-probs of prompts. The CPU backend can do none of it as it is. Each function is one
change of `changes.py`: it checks that what it changes is what it expects, raises a `PatchError` if not, and returns a
function that undoes it.

keep_linear_weights     here
score_prompts_of_loras  here
keep_moe_weights        vllm_cpu_experts.py
capture_routed_experts  vllm_cpu_routing.py
"""

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F

from verl_ext.upstream.patching import Undo, expect, expect_lookup, patch, together, wrap
from verl_ext.upstream.vllm_cpu_experts import keep_moe_weights
from verl_ext.upstream.vllm_cpu_routing import RUNNER, capture_routed_experts

LAYERS = "vllm.model_executor.layers"
WRAPPER = "vllm.lora.punica_wrapper.punica_cpu"

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


def score_prompts_of_loras() -> Undo:
    """Let vLLM compute log-probs of prompts while an adapter is loaded: without what the adapter has for the head.

    vLLM's CPU wrapper looks up an adapter for each row that is sampled, and multiplies by that whatever rows it is
    given: of prompts, an error in an einsum that ends the engine. On a GPU the head's part is left out of prompts too
    (vLLM issue 51594).
    """
    wrapper = importlib.import_module(WRAPPER).PunicaWrapperCPU
    expect("score_prompts_of_loras", wrapper, "sampler_indices")

    def of_sampled_rows(original: Callable[..., None], self: Any, logits: Any, x: torch.Tensor, *rest: Any) -> None:
        if x.reshape(-1, x.shape[-1]).shape[0] == len(self.sampler_indices):
            original(self, logits, x, *rest)

    parameters = "self, y, x, lora_a_stacked, lora_b_stacked, scale, buffer, kwargs"
    return wrap("score_prompts_of_loras", wrapper, "add_lora_logits", of_sampled_rows, parameters)


def install() -> Undo:
    """Apply all patches, or none if one does not fit. A second call applies nothing and undoes the same."""
    global _undo
    # Before the first patch: where `vllm_plugin` waits for this import, it is what installs, and all of it at once.
    with suppress(ImportError):
        importlib.import_module(RUNNER)
    if _undo is None:
        undo_all = together(keep_linear_weights, score_prompts_of_loras, keep_moe_weights, capture_routed_experts)

        def undo() -> None:
            global _undo
            undo_all()
            _undo = None

        _undo = undo
    return _undo


def on_import(_module: object) -> None:
    """`install`, as the hook that `vllm_plugin.register` sets on vLLM's CPU model runner."""
    install()
