"""Routed experts from vLLM's CPU backend; needs `keep_moe_weights`.

What vLLM lacks for it differs between versions, so the change has four variants, chosen by what is installed:

0.27          it refuses its CPU kernel; each layer gets a capture function, which `keep_moe_weights` calls
0.28, 0.29    it asks the kernel whether it can; the experts are made to say yes, and hand out what they choose
0.30          it captures in its router, on CPU as elsewhere
0.31          the same, and hands the ids to the scheduler through model runner V2 alone, which needs Triton; the CPU's
              model runner, V1, does here what V2 does there
"""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np

from verl_ext.upstream.patching import Undo, expect, expect_lookup, patch, together, wrap
from verl_ext.upstream.routed_weights import maybe_with_weights
from verl_ext.upstream.vllm_cpu_experts import CAPTURE, EXPERTS, FUSED_MOE, KERNELS

RUNNER = "vllm.v1.worker.cpu_model_runner"
CONNECTOR = "vllm.distributed.aux_output_connector.worker"  # since 0.31
HELD = "_verl_ext_aux_output"  # attribute of the model runner: the connector


def capture_routed_experts() -> Undo:
    """Make `enable_return_routed_experts` work on CPU."""
    runner = expect("capture_routed_experts", RUNNER, "CPUModelRunner", "vllm_config, device")
    if find_spec(KERNELS):
        return _bind_to_layers(runner)
    if find_spec("vllm.distributed.aux_output_connector"):
        return _deliver(runner)
    experts = expect("capture_routed_experts", EXPERTS, "CPUUnquantizedExperts")
    changes = [lambda: wrap("capture_routed_experts", runner, "init_routed_experts_capturer", _eagerly, "self")]
    if hasattr(experts, "_select_experts"):  # they choose for themselves, without a router
        changes += [
            lambda: wrap("capture_routed_experts", experts, "_select_experts", _hand_out, "self, hidden_states, ..."),
            lambda: patch("capture_routed_experts", experts, "supports_routing_replay_capture", lambda self: True),
        ]
    return together(*changes)


def _refuse_compiled(runner: Any) -> None:
    if not runner.model_config.enforce_eager:
        raise ValueError("enable_return_routed_experts on CPU needs enforce_eager=True")


def _eagerly(init: Callable[[Any], None], runner: Any) -> None:
    _refuse_compiled(runner)
    init(runner)


def _hand_out(select: Callable[..., tuple[Any, Any]], experts: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    topk_weights, topk_ids = select(experts, *args, **kwargs)
    if experts.routing_replay_capture_fn is not None:
        experts.routing_replay_capture_fn(maybe_with_weights(topk_ids, topk_weights))
    return topk_weights, topk_ids


def _bind_to_layers(runner: Any) -> Undo:
    """vLLM 0.27 binds its capturer to the kernels that can report their routing, and refuses the CPU one.

    Here each layer gets a capture function with its own layer index. It is bound to the layer, not to the kernel,
    because vLLM builds the kernel anew after every weight load.
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
    """vLLM 0.31: an output connector, as model runner V2 holds it (vllm/v1/worker/gpu/model_runner.py)."""
    change = "capture_routed_experts"
    expect(change, CONNECTOR, "get_aux_output_connector", "model, vllm_config, kv_cache_config")
    expect(change, CONNECTOR, "AuxOutputWorkerConnector.begin_step", "self, metadata")
    expect(change, CONNECTOR, "AuxOutputWorkerConnector.prepare_output", "self, input_batch")
    expect(change, CONNECTOR, "PendingAuxOutput.enqueue_cpu_copy", "self, num_sampled, num_rejected")
    expect(change, CONNECTOR, "PendingAuxOutput.process_output", "self")
    return together(
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
    """What the step's tokens were routed to goes with its output; without speculative decoding none is rejected."""
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
    """vLLM 0.31 refuses routed experts without model runner V2, but for platforms with a runner of their own."""
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
