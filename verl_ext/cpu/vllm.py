"""Changes to vLLM's CPU backend that a rollout engine needs.

verl loads new weights into a running engine after every training step, and reads the experts of each token. The sync
canary reads log-probs of prompts. The unchanged CPU backend can do none of this. Each function is one change of
`cpu.changes`: it checks that the code to be changed is the expected one, raises a `PatchError` if not, and returns a
function that undoes it.

Two versions of vLLM are supported, the default and the newest. They differ in how experts are computed:

0.27  `CPUFusedMOE` of `fused_moe/cpu_fused_moe.py`, which has its own loop over plain weights
0.31  `CPUUnquantizedExperts` of `fused_moe/experts/cpu_moe.py`, all of whose kernels are packed

and in the parts that are missing to return routed experts:

0.27  It refuses its CPU kernel. Each layer gets a capture function, which `keep_moe_weights` calls.
0.31  It captures in its router, and hands the ids to the scheduler only through model runner V2, which needs Triton.
      The CPU's model runner, V1, does here what V2 does there.

0.28 to 0.30 are refused, because `expect` does not find the code of 0.31 in them.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from verl_ext.base.patching import Undo, apply_all, expect, expect_lookup, once, patch, wrap

LAYERS = "vllm.model_executor.layers"
WRAPPER = "vllm.lora.punica_wrapper.punica_cpu"
FUSED_MOE = f"{LAYERS}.fused_moe"
KERNELS = f"{FUSED_MOE}.cpu_fused_moe"  # only 0.27 has it
EXPERTS = f"{FUSED_MOE}.experts.cpu_moe"
CAPTURE = "_verl_ext_capture"  # attribute of a RoutedExperts layer of 0.27: takes the top-k ids of one forward pass
KERNEL = "out, input, w13, w2, w13_bias, w2_bias, topk_weights, topk_ids, act, isa, skip_weighted"
RUNNER = "vllm.v1.worker.cpu_model_runner"
CONNECTOR = "vllm.distributed.aux_output_connector.worker"  # of 0.31
LOOK_MS = 50  # the longest that a reader of a queue sleeps
HELD = "_verl_ext_aux_output"  # attribute of the model runner: the connector


def keep_linear_weights() -> Undo:
    """Computes linear layers and the LM head from their plain weights, at any later time.

    After loading, vLLM repacks each weight for oneDNN. A linear layer then drops the plain weight, and the
    next load fails; the LM head keeps both, and the next load changes only the copy that is not used.
    The plain weights are slower than the packed kernels.

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
    """Lets vLLM compute log-probs of prompts while an adapter is loaded, without the adapter's part for the head.

    vLLM's CPU wrapper looks up an adapter for each sampled row, and multiplies all rows by it: rows of prompts cause an
    error in an einsum that ends the engine. On a GPU the head's part is left out for prompts too (vLLM issue 51594).
    """
    wrapper = importlib.import_module(WRAPPER).PunicaWrapperCPU
    expect("score_prompts_of_loras", wrapper, "sampler_indices")

    def of_sampled_rows(original: Callable[..., None], self: Any, logits: Any, x: torch.Tensor, *rest: Any) -> None:
        if x.reshape(-1, x.shape[-1]).shape[0] == len(self.sampler_indices):
            original(self, logits, x, *rest)

    parameters = "self, y, x, lora_a_stacked, lora_b_stacked, scale, buffer, kwargs"
    return wrap("score_prompts_of_loras", wrapper, "add_lora_logits", of_sampled_rows, parameters)


def keep_moe_weights() -> Undo:
    """Computes unquantized experts from their plain weights; slower than vLLM's packed kernels."""
    return _in_a_kernel() if find_spec(KERNELS) else _in_classes()


def _in_a_kernel() -> Undo:
    """Changes vLLM 0.27, and also captures the top-k ids.

    Where its grouped kernel can be used, vLLM pads and repacks the experts' weights into new parameters, which
    no longer know how to load a checkpoint: the next load fails. On CPUs with AMX it refuses anything but
    bfloat16. The loop over experts that it uses elsewhere reads the plain weights.

    The loop also has the layer's top-k ids. It therefore calls the capture function that `_bind_to_layers` bound to the
    layer, in the thread and at the place of the layer's own forward pass.
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
                capture(topk_ids)
            return super().forward_torch(layer, input, topk_weights, topk_ids, *args, **kwargs)

    def refuse_sgl(layer: torch.nn.Module) -> None:
        raise ValueError("VLLM_CPU_SGL_KERNEL=1 packs the experts' weights in place: unset it to sync weights")

    owner = importlib.import_module(module)
    return apply_all(
        lambda: patch("keep_moe_weights", owner, "CPUFusedMOE", PlainWeightsMoE),
        lambda: patch("keep_moe_weights", owner, "SGLFusedMOE", refuse_sgl),
    )


def _in_classes() -> Undo:
    """Changes vLLM 0.31: weights stay as they were loaded, and the kernel is `plain_experts`.

    After the first load vLLM pads and packs the weights; after a later one it keeps the kernel, and would read the
    loaded weights as if they were packed.
    """
    change = "keep_moe_weights"
    expect(change, EXPERTS, "CPUUnquantizedExperts._pad_moe_intermediate", "self, layer")
    expect(change, EXPERTS, "cpu_prepack_moe_weight", "weight, isa")
    expect(change, EXPERTS, "is_zentorch_moe_supported", "layer")
    expect(change, EXPERTS, "cpu_fused_moe", KERNEL)
    cpu_moe = importlib.import_module(EXPERTS)
    experts = cpu_moe.CPUUnquantizedExperts
    looked_up = ("is_zentorch_moe_supported", "_pad_moe_intermediate", "cpu_prepack_moe_weight")
    expect_lookup(change, experts.process_weights_after_loading, *looked_up)
    expect_lookup(change, experts.apply, "cpu_fused_moe")

    def fill(out: torch.Tensor, *args: Any) -> None:
        out.copy_(plain_experts(*args))

    return apply_all(
        lambda: patch("keep_moe_weights", experts, "_pad_moe_intermediate", lambda self, layer: None),
        lambda: patch("keep_moe_weights", cpu_moe, "cpu_prepack_moe_weight", lambda weight, isa: weight),
        lambda: patch("keep_moe_weights", cpu_moe, "is_zentorch_moe_supported", lambda layer: False),
        lambda: patch("keep_moe_weights", cpu_moe, "cpu_fused_moe", fill),
    )


@torch.library.custom_op("verl_ext::plain_experts", mutates_args=())  # torch.compile does not look into it
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
    """Computes the same as vLLM's kernel with these parameters, expert by expert; sums over experts in float32.

    Args:
        input: [N, hidden].
        w13: [E, 2 * width, hidden]; first the rows of gate, then those of up; alternating for `swigluoai`.
        w2: [E, hidden, width].
        topk_weights, topk_ids: [N, K].
        isa: the instruction set of the kernel that this one replaces.
        skip_weighted: whether the weight was already applied to the input.
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
    """Applies one of the activations of vLLM's CPU experts (`MoEActivation`)."""
    if act == "swigluoai":
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = x.chunk(2, dim=-1)
    if act == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate={"gelu": "none", "gelu_tanh": "tanh"}[act]) * up


def capture_routed_experts() -> Undo:
    """Makes `enable_return_routed_experts` work on CPU."""
    runner = expect("capture_routed_experts", RUNNER, "CPUModelRunner", "vllm_config, device")
    return _bind_to_layers(runner) if find_spec(KERNELS) else _deliver(runner)


def _refuse_compiled(runner: Any) -> None:
    if not runner.model_config.enforce_eager:
        raise ValueError("enable_return_routed_experts on CPU needs enforce_eager=True")


def _bind_to_layers(runner: Any) -> Undo:
    """Binds capture functions to layers: vLLM 0.27 binds its capturer to kernels that report their routing, and refuses
    the CPU's.

    Here each layer gets a capture function with its own layer index. It is bound to the layer, not to the kernel,
    because vLLM rebuilds the kernel after every weight load.
    """
    change = "capture_routed_experts"
    expect(change, RUNNER, "CPUModelRunner._bind_routed_experts_capturer", "self, capturer")
    init = expect(change, RUNNER, "CPUModelRunner.init_routed_experts_capturer", "self")
    expect_lookup(change, init, "_bind_routed_experts_capturer")
    expect(change, f"{FUSED_MOE}.routed_experts_capturer", "RoutedExpertsCapturer.capture", "self, layer_id, topk_ids")
    moe_runner = expect(change, f"{FUSED_MOE}.runner.moe_runner", "MoERunner")
    expect(change, f"{FUSED_MOE}.runner.moe_runner", "MoERunner.layer_id")

    def bind(self: Any, capturer: Any) -> None:
        _refuse_compiled(self)
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


def _deliver(runner: Any) -> Undo:
    """Adds an output connector to vLLM 0.31, as model runner V2 has it (vllm/v1/worker/gpu/model_runner.py)."""
    change = "capture_routed_experts"
    expect(change, CONNECTOR, "get_aux_output_connector", "model, vllm_config, kv_cache_config")
    expect(change, CONNECTOR, "AuxOutputWorkerConnector.begin_step", "self, metadata")
    expect(change, CONNECTOR, "AuxOutputWorkerConnector.prepare_output", "self, input_batch")
    expect(change, CONNECTOR, "PendingAuxOutput.enqueue_cpu_copy", "self, num_sampled, num_rejected")
    expect(change, CONNECTOR, "PendingAuxOutput.process_output", "self")
    return apply_all(
        lambda: wrap(
            "capture_routed_experts",
            runner,
            "initialize_kv_cache",
            _connect,
            "self, kv_cache_config, is_profiling, ...",
        ),
        lambda: wrap("capture_routed_experts", runner, "execute_model", _begin, "self, scheduler_output, ..."),
        lambda: wrap("capture_routed_experts", runner, "sample_tokens", _attach, "self, grammar_output"),
    )


def _connect(
    initialize: Callable[..., None], runner: Any, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
) -> None:
    initialize(runner, kv_cache_config, is_profiling, **kwargs)
    if runner.vllm_config.aux_output_config.enabled and not is_profiling:
        _refuse_compiled(runner)
        connect = importlib.import_module(CONNECTOR).get_aux_output_connector
        connector = connect(runner.model, runner.vllm_config, kv_cache_config)
        patch("capture_routed_experts", runner, HELD, connector, new=True)


def _begin(execute: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    if (connector := getattr(runner, HELD, None)) is not None:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
    return execute(runner, scheduler_output, *args, **kwargs)


def _attach(sample: Callable[..., Any], runner: Any, grammar_output: Any) -> Any:
    """Adds the routing of the step's tokens to its output; without speculative decoding no token is rejected."""
    connector = getattr(runner, HELD, None)
    if connector is None or runner.execute_model_state is None:
        return sample(runner, grammar_output)
    requests = list(runner.input_batch.req_ids)
    batch = SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=runner.query_start_loc.np[: len(requests) + 1].copy(),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )
    pending = connector.prepare_output(batch)
    output = sample(runner, grammar_output)
    if pending is not None:
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = pending.process_output()
    return output


def allow_delivery(config: Any) -> Undo:
    """Allows routed experts: vLLM 0.31 refuses them without model runner V2, except on platforms with their own
    runner."""
    if not hasattr(config.VllmConfig, "_verify_aux_output_compatibility"):
        return lambda: None
    return wrap(
        "capture_routed_experts", config.VllmConfig, "_verify_aux_output_compatibility", _as_with_own_runner, "self"
    )


def _as_with_own_runner(verify: Callable[[Any], None], config: Any) -> None:
    from vllm.platforms import current_platform

    if config.use_v2_model_runner or config.speculative_config is not None:
        verify(config)
        return
    undo = patch("capture_routed_experts", type(current_platform), "is_out_of_tree", lambda self: True)
    try:
        verify(config)
    finally:
        undo()


def sleep_in_queues(queues: Any) -> Undo:
    """Lets vLLM's processes sleep while they wait for a message; a hook on the module of their queues.

    A reader polls its queue for a second after each message. On cores shared with training, the polling took more of
    an engine's time than its model. The writer's notice, which it sends anyway, wakes a sleeping reader. A notice sent
    before the reader listened is lost, so the reader also looks every LOOK_MS.
    """

    def asleep(wait: Callable[..., None], self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0
        wait(self, LOOK_MS if timeout_ms is None else min(LOOK_MS, timeout_ms))

    expect("sleep_in_queues", queues.SpinCondition, "__init__", "self, is_reader, context, notify_address, busy_loop_s")
    return wrap("sleep_in_queues", queues.SpinCondition, "wait", asleep, "self, timeout_ms")


def adapt_vllm() -> Undo:
    """Applies all patches, or none if one does not fit. A second call applies nothing and returns the same undo."""
    # Before the first patch: if `plugins.vllm` waits for this import, the import installs all of it at once.
    with suppress(ImportError):
        importlib.import_module(RUNNER)
    return _apply_patches()


@once
def _apply_patches() -> Undo:
    return apply_all(keep_linear_weights, score_prompts_of_loras, keep_moe_weights, capture_routed_experts)


def on_import(_module: object) -> None:
    """Calls `adapt_vllm`; the hook that `plugins.vllm.register` sets on vLLM's CPU model runner."""
    adapt_vllm()
