"""The weights of the chosen experts on their way: from vLLM's routers through verl's agent loop into the batch.

vLLM returns which experts a token went to, not with what weights. Here its capture buffers are made twice as wide, of
two bytes an entry, and each row holds the ids and then the weights, as the bits of a float16: whatever vLLM does with
the ids, it does with both. verl's agent loop takes them apart, into `routed_experts` as ever and into `routed_weights`.

Off in a process unless its environment has VERL_EXT_ROUTED_WEIGHTS=E, the number of experts; `request` puts it into the
environment of a run's Ray processes, from which vLLM's own processes have theirs.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from wrapt import register_post_import_hook

from verl_ext.errors import HookError
from verl_ext.fields import ROLLOUT_WEIGHTS
from verl_ext.upstream.narrow_routing import AGENT_LOOP, whole_sequence
from verl_ext.upstream.patching import Undo, expect, moved, patch, together, wrap
from verl_ext.upstream.runtime_env import ask

VARIABLE = "VERL_EXT_ROUTED_WEIGHTS"
OFF = "stability.router_weights=false"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
CAPTURER = f"{FUSED_MOE}.routed_experts_capturer"
ROUTER = f"{FUSED_MOE}.router.base_router"
ENTRIES = 2**16  # of two bytes
BYTE_IDS = 256  # experts whose ids fit a byte


def requested() -> bool:
    return bool(os.environ.get(VARIABLE))


def request(config: Any, experts: int) -> None:
    """Ask for them in all Ray processes of a run."""
    ask(config, VARIABLE, str(experts))


def install() -> None:
    """Where they are requested, patch verl's agent loop as soon as this process imports it."""
    if requested():
        register_post_import_hook(in_agent_loop, AGENT_LOOP)


def install_in_vllm() -> None:
    """Where they are requested, patch vLLM's capture of routing as soon as this process imports it."""
    if requested():
        register_post_import_hook(in_capturer, CAPTURER)
        register_post_import_hook(in_router, ROUTER)


def in_capturer(capturer: Any) -> Undo:
    """Buffers of ids and weights, in the workers and in the scheduler.

    Raises:
        PatchError: this vLLM sizes them in another way.
    """
    if find_spec("vllm.distributed.aux_output_connector"):
        raise moved("routed_weights", "this vLLM captures routing through its output connectors")
    expect("routed_weights", capturer, "RoutedExpertsCapturer.capture", "self, layer_id, topk_ids")
    top_k = expect("routed_weights", capturer, "_get_num_experts_per_tok", "hf_config")
    expect("routed_weights", capturer, "get_num_experts", "hf_config")
    return together(
        lambda: patch("routed_weights", capturer, "_get_num_experts_per_tok", lambda hf_config: 2 * top_k(hf_config)),
        lambda: patch("routed_weights", capturer, "get_num_experts", lambda hf_config: ENTRIES),
        lambda: wrap("routed_weights", capturer.RoutedExpertsCapturer, "capture", _capture),
    )


def _capture(vllms: Callable[..., None], capturer: Any, layer_id: int, topk_ids: Tensor) -> None:
    """Raises HookError: a kernel that chooses experts by itself has handed out no weights."""
    wanted = capturer.device_buffer.shape[2]
    if topk_ids.shape[1] != wanted:
        raise HookError(
            f"a kernel of vLLM handed out {topk_ids.shape[1]} numbers a token where ids and weights are {wanted}: it "
            "routes by itself and does not say how it weighs the experts",
            fix=(OFF,),
        )
    vllms(capturer, layer_id, topk_ids)


def in_router(router: Any) -> Undo:
    """vLLM's routers, which hand the ids alone to whoever captures them."""
    owner = expect("routed_weights", router, "BaseRouter")
    expect("routed_weights", owner, "_compute_routing")
    return wrap("routed_weights", owner, "set_capture_fn", _with_weights, "self, capture_fn")


def _with_weights(
    set_capture_fn: Callable[..., None], router: Any, capture_fn: Callable[[Tensor], None] | None
) -> None:
    if capture_fn is None:
        set_capture_fn(router, None)
        return
    take = capture_fn
    latest: list[Tensor] = []

    def computing(compute: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, ids = compute(*args, **kwargs)
        latest[:] = [weights]
        return weights, ids

    wrap("routed_weights", router, "_compute_routing", computing)
    set_capture_fn(router, lambda ids: take(with_weights(ids, latest.pop())))


def with_weights(ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """[N, 2 K] int32: the ids, then the weights as the bits of float16, 0 to 65,535."""
    bits = weights_NK.to(torch.float16).contiguous().view(torch.int16).int() & (ENTRIES - 1)
    return torch.cat([ids_NK.int(), bits], dim=1)


def maybe_with_weights(ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """What a capture function is to be handed: the ids, with the weights where they are requested."""
    return with_weights(ids_NK, weights_NK) if requested() else ids_NK


def apart(rows_nLK: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights float16), [n, L, K] each, of [n, L, 2 K] uint16; the ids in the dtype that vLLM has them in."""
    ids, bits = np.split(rows_nLK, 2, axis=2)
    return ids.astype(np.uint8 if experts <= BYTE_IDS else np.uint16), np.ascontiguousarray(bits).view(np.float16)


def in_agent_loop(agent_loop: Any) -> Undo:
    output_class = expect("routed_weights", agent_loop, "AgentLoopOutput")
    return wrap("routed_weights", output_class, "as_dict", as_dict)


def as_dict(verls: Callable[[Any], dict[str, Any]], output: Any) -> dict[str, Any]:
    """The fields of an AgentLoopOutput, as without this change, and `routed_weights` float16 [tokens, L, K].

    Raises:
        HookError: the engine has not returned both.
    """
    rows = output.routed_experts
    if rows is None:
        return verls(output)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint16 or rows.shape[2] % 2:
        raise HookError(
            f"the rollout returns routed experts as {getattr(rows, 'dtype', type(rows).__name__)} "
            f"{tuple(getattr(rows, 'shape', ()))} where their weights were asked for",
            fix=(OFF,),
        )
    ids, weights = apart(rows, int(os.environ[VARIABLE]))
    fields = verls(output.model_copy(update={"routed_experts": ids}))
    fields[ROLLOUT_WEIGHTS] = whole_sequence(weights, len(fields["prompts"]) + len(fields["responses"]))
    return fields
