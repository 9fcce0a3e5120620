"""Data that verl's SGLang server returns with its tokens: their experts, their top tokens, the number of retractions.

From 0.5.10 on SGLang returns the experts of a request as text: base64 of int32, a row for each token that was forwarded
(`_handle_batch_output` of srt/managers/tokenizer_manager.py, `get_topk` of srt/state_capturer/base.py). verl 0.9.1 pins
SGLang 0.5.12, but calls `.numpy()` on the answer, which worked until 0.5.9 (`generate` of async_sglang_server.py).
Every rollout with enable_rollout_routing_replay=True would fail there. So the text is decoded before verl sees it.

`upstream.agent_loop` puts its requests into the `extra_args`, as for vLLM. The change to verl's server takes them out,
the change to SGLang's tokenizer manager passes them on under SGLang's names, and the answer returns in `extra_fields`.
A context variable connects the two changes, because verl passes nothing else between them.

Shape legend: n tokens of one answer, m tokens whose experts are returned (only tokens that were forwarded: all of a
sequence but its last), L decoder layers, K experts per token or top tokens of a place.
"""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_ext.base.errors import HookError
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.base.patching import Undo, apply_all, expect, wrap
from verl_ext.upstream.agent_loop import (
    DISTRIBUTION_CHANGES,
    ROWS_HELD,
    TOP_TOKENS_ASKED,
    refuse_changes,
    sums_of_answer,
)

CHANGE = "sglang_server"
NOTHING = float(np.finfo(np.float32).min)  # SGLang's value for a log-probability of -inf

# Parameters of a request that change SGLang's distribution, vLLM's and those that only SGLang has -> the neutral value.
CHANGES = DISTRIBUTION_CHANGES | {
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}


@dataclass(frozen=True)
class Cut:
    """The tokens that a request samples from: those of the `top_k` most likely for which the total mass of more likely
    tokens is at most `top_p`.

    Both cuts are of the whole vocabulary: top-p does not see the cut of top-k ("joint" in flashinfer's kernel,
    `top_k_top_p_min_p_sampling_from_probs_torch` of srt/layers/sampler.py, SGLang 0.5.12). vLLM takes top-p of the
    tokens that top-k has left.
    """

    top_k: int
    top_p: float


@dataclass
class Request:
    """A request on its way from verl's server to SGLang and back.

    Attributes:
        held: the number of the first token whose experts are asked for.
        top_tokens: the number of tokens at each place.
        cut: the tokens that its log-probabilities are normalised over; None for the vocabulary.
        came: the top tokens: ids [n, K] int32 and log q [n, K] float32.
        retractions: the number of times that SGLang ran out of cache, dropped the request, and read its tokens again.
    """

    held: int
    top_tokens: int
    cut: Cut | None
    came: tuple[np.ndarray, np.ndarray] | None = None
    retractions: int = 0


_request: ContextVar[Request | None] = ContextVar("verl_ext_sglang_request", default=None)


def extend_server(server_module: Any) -> Undo:
    """Makes the SGLang servers that verl starts in this process decode experts and return the requested extras.

    `set_global_state` is called once per server, with the tokenizer manager that verl then uses.

    Raises:
        PatchError: a server takes other arguments.
    """
    server = expect(CHANGE, server_module, "SGLangHttpServer")
    takes = "self, prompt_ids, sampling_params, request_id, ..."
    return apply_all(
        lambda: wrap("sglang_server", server_module, "set_global_state", set_global_state, "global_state"),
        lambda: wrap("sglang_server", server, "generate", generate, takes),
    )


async def generate(
    verls: Callable[..., Any], server: Any, prompt_ids: Any, sampling_params: dict[str, Any], *rest: Any, **named: Any
) -> Any:
    """Wraps verl's `generate`: adds the top tokens that are asked for, and leaves out the rows that the client holds.

    Sets verl's `num_preempted` to the number of retractions. verl does not read it from SGLang, but sums it over a
    trajectory.

    If routing is returned, aborting a request that waits in SGLang's queue after a retraction brings tokens without
    experts (`_handle_abort_req` of srt/managers/tokenizer_manager.py). verl's client joins the rows of a response's
    parts (`FullyAsyncLLMServerClient.generate`), so all rows of later parts would belong to other tokens. These tokens
    are left out, and verl's client has them sampled again.
    """
    if _forwards(server, named):
        return await verls(server, prompt_ids, sampling_params, *rest, **named)
    sampling = dict(sampling_params)
    extra = dict(sampling.pop("extra_args", None) or {})
    held, k = extra.pop(ROWS_HELD, None), extra.pop(TOP_TOKENS_ASKED, 0)
    if extra:
        sampling["extra_args"] = extra
    request = Request(held or 0, k, cut_of(sampling, k, server.config.logprobs_mode) if k else None)
    token = _request.set(request)
    try:
        output = await verls(server, prompt_ids, sampling, *rest, **named)
    finally:
        _request.reset(token)
    output.num_preempted = request.retractions
    if server.config.enable_rollout_routing_replay and output.stop_reason == "abort" and output.routed_experts is None:
        output.token_ids, output.log_probs = [], []
    if held is not None and output.routed_experts is not None:
        output.extra_fields |= sums_of_answer(prompt_ids, output, held)
    if request.came is not None:
        ids, log_q = request.came
        rows = slice(len(ids) if output.token_ids else 0)  # verl drops tokens if log-probabilities are missing
        output.extra_fields |= {TOP_TOKEN_IDS: ids[rows], TOP_TOKEN_LOG_PROBS: log_q[rows]}
    return output


def _forwards(server: Any, named: dict[str, Any]) -> bool:
    """Returns True if this server only reads prompts. It then calls `generate` again, here and in the server that
    decodes."""
    return (
        server._disaggregation_role == "prefill"
        and bool(server._pd_decode_peers)
        and named.get("bootstrap_room") is None
    )


def cut_of(sampling: dict[str, Any], k: int, logprobs_mode: str | None) -> Cut | None:
    """Returns the tokens that a request samples from; None if its log-probabilities cover the whole vocabulary.

    Raises:
        HookError: the training engine cannot know the distribution of the request.
    """
    refuse_changes(sampling.get, CHANGES)
    top_k, top_p = sampling.get("top_k", -1), sampling.get("top_p", 1.0)
    if logprobs_mode != "processed_logprobs" or (top_k <= 0 and top_p >= 1):
        return None
    if not 0 < top_k <= k:
        raise HookError(
            f"a request has top_k={top_k} and top_p={top_p}, which may keep more than the {k} top tokens",
            otherwise=f"give a top_k of at most {k}",
        )
    return Cut(top_k, top_p)


def set_global_state(sglangs: Callable[[Any], None], global_state: Any) -> None:
    manager = global_state.tokenizer_manager
    wrap("sglang_server", manager, "generate_request", generate_request, "obj, request")
    sglangs(global_state)


async def generate_request(sglangs: Callable[..., Any], obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Wraps SGLang's `generate_request`: its outputs get tensors instead of the text, except for a client over HTTP,
    which passes a `request` and wants the text."""
    text_config = sglangs.__self__.model_config.hf_text_config  # type: ignore[attr-defined]
    asked = _request.get() or Request(held=0, top_tokens=0, cut=None)
    if asked.top_tokens:
        obj.top_logprobs_num = asked.top_tokens
    if asked.held:
        obj.routed_experts_start_len = asked.held
    async with aclosing(sglangs(obj, request)) as outputs:  # verl takes the first; the rest is closed here
        async for output in outputs:
            meta = output.get("meta_info", {}) if isinstance(output, dict) and request is None else {}
            asked.retractions = meta.get("num_retractions", 0)
            if isinstance(text := meta.get("routed_experts"), str):
                rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - asked.held
                ids_mLK = decode_experts(text, rows, text_config.num_hidden_layers, text_config.num_experts_per_tok)
                output = output | {"meta_info": (meta := meta | {"routed_experts": ids_mLK})}
            if asked.top_tokens and meta:
                output = output | {"meta_info": meta | {"output_token_logprobs": _take_top_tokens(meta, asked)}}
            yield output


def _take_top_tokens(meta: dict[str, Any], asked: Request) -> list[tuple[float, int, None]]:
    """Puts the top tokens into the request; returns the sampled tokens' log-probabilities, as SGLang writes them."""
    sampled = meta.get("output_token_logprobs") or []
    tokens: np.ndarray = np.array([token for _, token, _ in sampled], np.int32)
    l_own: np.ndarray = np.array([value for value, _, _ in sampled], np.float32)
    ids, log_q = unpack_top(meta.get("output_top_logprobs") or [], len(sampled), asked.top_tokens)
    if asked.cut is not None:
        log_q, l_own = normalise(ids, log_q, tokens, l_own, asked.cut)
    asked.came = ids, log_q
    return [(value, token, None) for value, token in zip(l_own.tolist(), tokens.tolist(), strict=True)]


def decodes_routing(server_handle: Any) -> bool:
    """Returns True if the server behind one of verl's SGLang actors returns tensors.

    Raises:
        HookError: verl_ext is not installed on its node.
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
    """Returns the answer of `decodes_routing`; Ray runs this inside the actor."""
    return hasattr(server.tokenizer_manager.generate_request, "__verl_ext__")


# Pure from here on.


def decode_experts(text: str, rows: int, layers: int, top_k: int) -> Tensor:
    """Returns [m, L, K] int16, the dtype that verl uses for expert ids.

    Raises:
        HookError: the text is not of this size.
    """
    ids = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    if len(ids) != rows * layers * top_k:
        raise HookError(
            f"SGLang's routed_experts has {len(ids)} ids for {rows} tokens, {layers} layers and top-{top_k}: this is "
            "not the encoding of SGLang 0.5.12, which verl pins",
            otherwise="install SGLang 0.5.12",
        )
    return torch.from_numpy(ids.astype(np.int16)).view(-1, layers, top_k)


def unpack_top(places: list[list[tuple[float, int, Any]]], tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns SGLang's `output_top_logprobs` as ids [n, K] int32 and log p [n, K] float32, the most likely first.

    Raises:
        HookError: the number of places is not the number of tokens, or a place does not have K tokens.
    """
    if len(places) != tokens or any(place is None or len(place) != k for place in places):
        raise HookError(
            f"SGLang returned top tokens of {len(places)} places for {tokens} tokens, or not {k} at each",
            fix=("stability.top_tokens.k=0",),
        )
    log_p = np.fromiter(map(itemgetter(0), chain.from_iterable(places)), np.float32, tokens * k).reshape(tokens, k)
    ids = np.fromiter(map(itemgetter(1), chain.from_iterable(places)), np.int32, tokens * k).reshape(tokens, k)
    log_p[log_p <= NOTHING] = -np.inf
    return ids, log_p


def normalise(
    ids_nK: np.ndarray, log_p_nK: np.ndarray, sampled_n: np.ndarray, l_own_n: np.ndarray, cut: Cut
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log q [n, K], -inf for tokens that were cut, and the sampled tokens' own log q [n]. Both are normalised
    over the tokens that were sampled from; SGLang's values are normalised over the vocabulary.

    The kept tokens follow from the top tokens, all of whose masses are known. If a mass equals top_p up to rounding,
    the sampled token decides: it was kept, and so were all tokens that are more likely. A sampled token that is not
    among the top tokens ties with the last of them, and counts as kept, as in `core.top_tokens.read`.

    Args:
        log_p_nK: float32, the most likely first; at least `cut.top_k` of them.
        l_own_n: float32, normalised over the vocabulary, as log p is.
    """
    p = np.exp(log_p_nK.astype(np.float64))
    more_likely = np.cumsum(p, 1) - p
    places = np.arange(p.shape[1])
    counts = ((places < cut.top_k) & (more_likely <= cut.top_p)).sum(1)
    own = ids_nK == sampled_n[:, None]
    held = own.any(1)
    counts = np.where(held, np.maximum(counts, own.argmax(1) + 1), counts)
    kept = places < counts[:, None]
    log_z = np.log((p * kept).sum(1) + np.where(held, 0.0, np.exp(l_own_n.astype(np.float64))))
    log_q = np.where(kept, log_p_nK - log_z[:, None], -np.inf)
    return log_q.astype(np.float32), (l_own_n - log_z).astype(np.float32)
