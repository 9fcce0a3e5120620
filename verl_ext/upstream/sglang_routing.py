"""SGLang's routed experts, in the form that verl reads.

From 0.5.10 on SGLang returns the experts of a request as text: base64 of int32, a row for each token that was forwarded
(`_handle_batch_output` of srt/managers/tokenizer_manager.py, `get_topk` of srt/state_capturer/base.py). verl 0.9.1 pins
SGLang 0.5.12 and calls `.numpy()` on it, as it could until 0.5.9 (`generate` of async_sglang_server.py): every rollout
with enable_rollout_routing_replay=True ends there. So the text is decoded before verl sees it.

Shape legend: n tokens that were forwarded, all of a sequence but its last, L decoder layers, K experts per token.
"""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_ext.base.errors import HookError
from verl_ext.base.patching import Undo, wrap


def decode_routing(server_module: Any) -> Undo:
    """Have the SGLang servers that verl starts in this process return tensors.

    `set_global_state` is called once a server, with the tokenizer manager that verl then asks. A method of the server
    itself is left alone: Ray has to see that it is a coroutine.
    """
    return wrap("sglang_routing", server_module, "set_global_state", set_global_state, "global_state")


def set_global_state(sglangs: Callable[[Any], None], global_state: Any) -> None:
    manager = global_state.tokenizer_manager
    wrap("sglang_routing", manager, "generate_request", generate_request, "obj, request")
    sglangs(global_state)


async def generate_request(sglangs: Callable[..., Any], obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """SGLang's own, its outputs with tensors in the place of the text; a client over HTTP, who has a request, wants
    the text."""
    text_config = sglangs.__self__.model_config.hf_text_config  # type: ignore[attr-defined]
    async with aclosing(sglangs(obj, request)) as outputs:  # verl takes the first, and leaves the rest to be closed
        async for output in outputs:
            meta = output.get("meta_info", {}) if isinstance(output, dict) and request is None else {}
            if isinstance(text := meta.get("routed_experts"), str):
                tokens = meta["prompt_tokens"] + meta["completion_tokens"]
                ids_nLK = decode_experts(text, tokens, text_config.num_hidden_layers, text_config.num_experts_per_tok)
                output = output | {"meta_info": meta | {"routed_experts": ids_nLK}}
            yield output


def decode_experts(text: str, tokens: int, layers: int, top_k: int) -> Tensor:
    """[n, L, K] int16, in which verl carries them on.

    Raises:
        HookError: it is not of this size.
    """
    ids = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    if len(ids) != (tokens - 1) * layers * top_k:
        raise HookError(
            f"SGLang's routed_experts has {len(ids)} ids for {tokens} tokens, {layers} layers and top-{top_k}: it is "
            "encoded otherwise than by SGLang 0.5.12, which verl pins",
            otherwise="install that one",
        )
    return torch.from_numpy(ids.astype(np.int16)).view(-1, layers, top_k)


def decodes_routing(server_handle: Any) -> bool:
    """Whether the server behind one of verl's SGLang actors returns tensors.

    Raises:
        HookError: verl_ext is not there.
    """
    import ray

    try:
        return ray.get(server_handle.__ray_call__.remote(decodes))
    except ray.exceptions.RayTaskError as error:
        raise HookError(
            f"an SGLang server does not say how it returns routed experts ({error.cause!r}): is verl_ext installed on "
            "the rollout's nodes?"
        ) from error


def decodes(server: Any) -> bool:
    """Ray runs this inside the actor."""
    return hasattr(server.tokenizer_manager.generate_request, "__verl_ext__")
