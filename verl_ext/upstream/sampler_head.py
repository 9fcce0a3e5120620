"""The head of the sampler's distribution on its way: from vLLM through verl's server and agent loop into the batch.

With `logprobs=K`, vLLM returns the K most likely tokens of each place. verl asks for none but the sampled one's, and
takes no more. In its server, the request is changed and the answer kept, as two arrays; in its agent loop's worker, the
answers of a trajectory's calls are collected, and become two fields beside `responses`.

Off in a process unless its environment has VERL_EXT_SAMPLER_HEAD=K; `request` puts it into the environment of a run's
Ray processes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from wrapt import register_post_import_hook

from verl_ext.core.head import Call, heads_of
from verl_ext.errors import HookError
from verl_ext.fields import HEAD_IDS, HEAD_LOG_PROBS
from verl_ext.upstream import runtime_env
from verl_ext.upstream.patching import Undo, expect, expect_lookup, together, wrap

VARIABLE = "VERL_EXT_SAMPLER_HEAD"
CHANGE = "sampler_head"
ASKED = "verl_ext_head"  # in the extra_args of a request
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
CLIENT = "verl.workers.rollout.llm_server"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"

# Of a request, what changes the distribution beside temperature, top-k and top-p -> the value that does not.
UNKNOWN = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
}

# Of the trajectory that an agent loop is at work on; None where no heads are wanted.
_calls: ContextVar[list[Call] | None] = ContextVar("verl_ext_head_calls", default=None)


def request(config: Any, k: int) -> None:
    """Ask for K tokens in all Ray processes of a run."""
    runtime_env.ask(config, VARIABLE, str(k))


def install() -> None:
    """Where it is requested, patch verl's modules as soon as this process imports them."""
    if k := int(os.environ.get(VARIABLE, 0)):
        register_post_import_hook(in_server, SERVER)
        register_post_import_hook(partial(in_client, k=k), CLIENT)
        register_post_import_hook(partial(in_agent_loop, k=k), AGENT_LOOP)


def in_server(server: Any) -> Undo:
    """Let verl's vLLM server do what a request's extra_args ask for.

    Raises:
        PatchError: it makes the request, or reads the answer, in another way.
    """
    expect(CHANGE, server, "extract_prompt_logprobs", "output, num_prompt_logprobs, result_dict")
    return together(
        partial(wrap, CHANGE, server, "SamplingParams", ask),
        partial(wrap, CHANGE, server, "extract_prompt_logprobs", take),
    )


def ask(vllms: Callable[..., Any], **arguments: Any) -> Any:
    """vLLM's SamplingParams, with the head where it is asked for: flat, without a dictionary a token, and without the
    text of each of its tokens, which verl reads for stop strings alone.

    Raises:
        HookError: the agent loop asks for what the training engine cannot know of.
    """
    found = vllms(**arguments)
    if found.extra_args and (k := found.extra_args.pop(ASKED, 0)):
        for name, usual in UNKNOWN.items():
            if (value := getattr(found, name, usual)) and value != usual:
                raise HookError(
                    f"a request has {name}={value}, by which the sampler's head is of another distribution than the "
                    "training engine's",
                    otherwise=f"leave {name} out of the agent loop's sampling parameters, or set stability.head.k=0",
                )
        found.logprobs, found.flat_logprobs = k, True
        if not found.stop:
            found.detokenize = False
    return found


def take(verls: Callable[..., None], *, output: Any, num_prompt_logprobs: int | None, result_dict: dict) -> None:
    """verl's `extract_prompt_logprobs`, the one place where it holds the answer and what it returns of it.

    Raises:
        HookError: the answer has another number of heads than of tokens.
    """
    verls(output=output, num_prompt_logprobs=num_prompt_logprobs, result_dict=result_dict)
    answer = output.outputs[0]
    if not hasattr(answer.logprobs, "start_indices") or not answer.token_ids:  # not asked for, or nothing to tell
        return
    sampled, ids, log_q = unpacked(answer.logprobs, answer.token_ids)
    result_dict[HEAD_IDS], result_dict[HEAD_LOG_PROBS] = ids, log_q
    # As with logprobs=0: verl reads the sampled token's of each place, and would make K objects of each.
    answer.logprobs = [{token: value} for token, value in zip(answer.token_ids, sampled, strict=True)]


class _Value:
    """What verl reads of vLLM's Logprob."""

    __slots__ = ("logprob",)

    def __init__(self, logprob: float):
        self.logprob = logprob


def unpacked(flat: Any, token_ids: Any) -> tuple[list[_Value], np.ndarray, np.ndarray]:
    """Of vLLM's FlatLogprobs at n places, at least one: the sampled tokens' values, ids [n, K] int32 and log q [n, K]
    float32.

    Raises:
        HookError: it has another number of heads than of tokens, or of tokens a head.
    """
    n, entries = len(token_ids), len(flat.logprobs)
    width = entries // n
    if len(flat) != n or width * n != entries or width < 2:
        raise HookError(
            f"vLLM returned {entries} log-probabilities at {len(flat)} places for {n} tokens, where each place has the "
            "sampled token's and those of the head",
            fix=("stability.head.k=0",),
        )
    # Narrow, since they are most of what a token weighs. Not in half precision: q (log q - log p) is of first order in
    # the rounding of log q, which cancels in no sum, and 2^-11 of it is more than a healthy KL.
    log_q = np.asarray(flat.logprobs, np.float32).reshape(n, width)
    ids = np.asarray(flat.token_ids, np.int32).reshape(n, width)
    return [_Value(value) for value in log_q[:, 0].tolist()], ids[:, 1:], log_q[:, 1:]


def in_client(client: Any, k: int) -> Undo:
    """Let the client that agent loops call ask for heads, and keep the answers.

    Raises:
        PatchError: it takes other arguments.
    """
    expect(CHANGE, client, "LLMServerClient.generate", "self, request_id, prompt_ids, sampling_params, ...")

    async def generate(verls: Callable, self: Any, request_id: Any, **arguments: Any) -> Any:
        if (calls := _calls.get()) is None:
            return await verls(self, request_id, **arguments)
        sampling = dict(arguments["sampling_params"])
        sampling["extra_args"] = {**(sampling.get("extra_args") or {}), ASKED: k}
        output = await verls(self, request_id, **{**arguments, "sampling_params": sampling})
        ids, log_q = (output.extra_fields.pop(name, None) for name in (HEAD_IDS, HEAD_LOG_PROBS))
        if ids is not None:
            calls.append(Call(list(arguments["prompt_ids"]), list(output.token_ids), ids, log_q))
        return output

    return wrap("sampler_head", client.LLMServerClient, "generate", generate)


def in_agent_loop(agent_loop: Any, k: int) -> Undo:
    """Let a trajectory that is not for validation have the fields of its heads.

    Not by methods of the worker: Ray has copied those into its own class when that was defined.

    Raises:
        PatchError: the worker or what an agent loop returns is another.
    """
    worker = expect(CHANGE, agent_loop, "AgentLoopWorker")
    expect_lookup(CHANGE, expect(CHANGE, worker, "_run_agent_loop"), "rollout_trace_attr")
    output = expect(CHANGE, agent_loop, "AgentLoopOutput")
    return together(
        partial(wrap, CHANGE, agent_loop, "rollout_trace_attr", trajectory),
        partial(wrap, CHANGE, output, "as_dict", partial(as_dict, k=k)),
    )


@contextmanager
def trajectory(verls: Callable, *arguments: Any, validate: bool, **settings: Any) -> Iterator[None]:
    """verl's `rollout_trace_attr`, inside which a worker runs an agent loop and writes its output; the calls of both
    are remembered in its task."""
    token = _calls.set(None if validate else [])
    try:
        with verls(*arguments, validate=validate, **settings):
            yield
    finally:
        _calls.reset(token)


def as_dict(verls: Callable[[Any], dict[str, Any]], output: Any, k: int) -> dict[str, Any]:
    """The fields of an AgentLoopOutput, those of the heads among them."""
    fields = verls(output)
    if (calls := _calls.get()) is not None:
        ids, log_q = heads_of(calls, output.prompt_ids, output.response_ids, k)
        fields |= {HEAD_IDS: ids, HEAD_LOG_PROBS: log_q}
    return fields
